"""A request is answered by its deadline, is not run for a client that left, and is refused when there is no room."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest

from tests.process.harness import WAIT_S, Server, eventually, paused, start_server
from tests.process.wire import (
    MSGPACK,
    Client,
    Response,
    connect,
    dense_rows,
    encode,
    extents_in_use,
    post_json,
    raw_request,
    send_until,
    stub_rows,
    total,
    wait_no_extents,
)


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """Have a request under way to the only worker, which does nothing until the block ends; then it is answered."""
    wait_no_extents(server.port)
    with ThreadPoolExecutor(1) as pool:
        with paused(server.worker()):
            answer = pool.submit(encode, server.port, "stub/slow", ["busy"])
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 1, "work in flight")
            yield
        assert answer.result(WAIT_S).status == 200


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "stub/a=stub:dense=16", "--model", "stub/slow=stub:dense=16,latency_ms=1000",
        "--model", "stub/slower=stub:dense=16,latency_ms=4000", "--watchdog-s", "60",
    ) as server:  # fmt: skip
        yield server


def tokens(server: Server) -> float:
    return total(server.port, "sie_tokens_processed_total", model="stub/a")


def ran_only(server: Server, num_tokens: float, before: float) -> bool:
    """Wait for so many more tokens to be counted, which a worker does behind its answer; return whether these are all."""
    eventually(lambda: tokens(server) - before >= num_tokens, f"{num_tokens} tokens")
    return tokens(server) - before == num_tokens


def test_a_deadline_during_the_step_is_504_in_time(server):
    began_s = time.monotonic()
    response = encode(server.port, "stub/slower", ["x"], {"x-sie-timeout-ms": "1000"})
    took_s = time.monotonic() - began_s
    assert (response.status, response.code()) == (504, "DEADLINE_EXCEEDED")
    assert took_s >= 0.99
    num_held = extents_in_use(server.port)
    if time.monotonic() - began_s < 4:  # a machine that stood still may show only what is after the step
        assert num_held, "the lease stays with the worker until it has answered"
    wait_no_extents(server.port)


def test_a_deadline_in_the_queue_is_504_and_the_work_never_runs(server):
    before = tokens(server)
    with busy(server):
        response = encode(server.port, "stub/a", ["x" * 400], {"x-sie-timeout-ms": "100"})
        assert (response.status, response.code()) == (504, "DEADLINE_EXCEEDED")
    wait_no_extents(server.port)
    dense_rows(encode(server.port, "stub/a", ["after"]))
    assert ran_only(server, 2, before), "only the two tokens of 'after' ran"


def test_a_deadline_on_the_openai_route_has_its_envelope(server):
    body = {"model": "stub/slow", "input": "x"}
    response = post_json(server.port, "/v1/embeddings", body, {"x-sie-timeout-ms": "50"})
    assert response.status == 504
    assert response.json()["error"]["code"] == "DEADLINE_EXCEEDED"
    wait_no_extents(server.port)


def test_a_header_cannot_raise_the_deadline():
    with start_server("--model", "stub/slow=stub:dense=16,latency_ms=1000", "--request-timeout-s", "0.2") as server:
        assert encode(server.port, "stub/slow", ["x"], {"x-sie-timeout-ms": "60000"}).status == 504


def test_many_deadlines_at_once_give_every_extent_back(server):
    """Half of them find the worker in a step of others, and the other half a worker that stands still."""
    with ThreadPoolExecutor(16) as pool:

        def ask(numbers: range) -> list[Response]:
            return list(
                pool.map(lambda n: encode(server.port, "stub/slower", [f"{n}"], {"x-sie-timeout-ms": "100"}), numbers)
            )

        answers = ask(range(16))
        with paused(server.worker()):
            answers += ask(range(16))
    assert {answer.status for answer in answers} == {504}
    wait_no_extents(server.port)


def test_queued_work_of_clients_that_left_never_runs(server):
    before = tokens(server)
    body = msgpack.packb({"items": [{"text": "x" * 400}]})
    with busy(server):
        sockets = [connect(server.port) for _ in range(8)]
        for sock in sockets:
            sock.sendall(raw_request("/v1/encode/stub/a", body, {"content-type": MSGPACK}))
        eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") >= 9, "eight in the queue")
        for sock in sockets:
            sock.close()
        gone = {"path": "/v1/encode/{model}", "model": "stub/a", "status": "499"}
        eventually(lambda: total(server.port, "http_requests_total", **gone) >= 8, "eight clients seen to leave")
    wait_no_extents(server.port)
    dense_rows(encode(server.port, "stub/a", ["after"]))
    assert ran_only(server, 2, before), "only the two tokens of 'after' ran"


def test_a_client_that_leaves_during_the_step_leaves_nothing_behind(server):
    body = msgpack.packb({"items": [{"text": "x"}]})
    with connect(server.port) as sock:
        send_until(
            sock, raw_request("/v1/encode/stub/slow", body, {"content-type": MSGPACK}),
            lambda: total(server.port, "sie_extents_in_use", segment="request") > 0, "work in flight",
        )  # fmt: skip
    wait_no_extents(server.port)


def test_a_full_queue_is_503_at_once_with_a_time_to_come_back():
    with start_server(
        "--model", "stub/slow=stub:dense=16,latency_ms=100", "--max-queued-tokens", "100", "--watchdog-s", "60"
    ) as server, ThreadPoolExecutor(1) as pool:  # fmt: skip
        with busy(server):
            waiting = pool.submit(encode, server.port, "stub/slow", ["y" * 396])
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 2, "a full queue")
            refusals = [encode(server.port, "stub/slow", ["z" * 40]) for _ in range(20)]
            refusals.append(post_json(server.port, "/v1/embeddings", {"model": "stub/slow", "input": "z" * 40}))
        assert {refusal.status for refusal in refusals} == {503}
        assert {refusal.code() for refusal in refusals[:-1]} == {"QUEUE_FULL"}
        assert refusals[-1].json()["error"]["code"] == "server_overloaded"
        assert all(1 <= int(refusal.headers["retry-after"]) <= 60 for refusal in refusals)
        assert np.array_equal(dense_rows(waiting.result(WAIT_S)), stub_rows(["y" * 396], 16))
        eventually(lambda: total(server.port, "sie_refusals_total", reason="QUEUE_FULL") == 21, "each is counted")
        wait_no_extents(server.port)
        assert encode(server.port, "stub/slow", ["z" * 40]).status == 200


def test_full_request_memory_is_503_and_then_recovers():
    """Forty requests of 100 KiB do not fit into 1 MiB; each is answered rightly or told to come back."""
    with start_server(
        "--model", "stub/slow=stub:dense=16,latency_ms=200", "--request-segment-bytes", str(1 << 20),
        "--reply-segment-bytes", str(1 << 20), "--large-extent-bytes", str(1 << 20), "--max-large-bytes", "0",
    ) as server:  # fmt: skip
        texts = [f"{n} " * 30_000 for n in range(40)]
        with ThreadPoolExecutor(40) as pool:
            with paused(server.worker()):
                asked = [pool.submit(encode, server.port, "stub/slow", [text]) for text in texts]
                eventually(lambda: any(answer.done() for answer in asked), "no room for one of them")
            answers = [answer.result(WAIT_S) for answer in asked]
        assert {answer.status for answer in answers} == {200, 503}
        for answer, text in zip(answers, texts, strict=True):
            if answer.status == 200:
                assert np.array_equal(dense_rows(answer), stub_rows([text], 16))
            else:
                assert answer.code() == "QUEUE_FULL"
        wait_no_extents(server.port)
        assert encode(server.port, "stub/slow", [texts[0]]).status == 200


def test_replies_that_do_not_fit_wait_for_room_and_all_come():
    """Each reply takes a quarter of the reply memory, so most steps find no room for some of them."""
    with start_server(
        "--model", "stub/a=stub:dense=4096", "--reply-segment-bytes", str(1 << 20), "--large-extent-bytes", "1048576"
    ) as server:
        texts = [f"text {n}" for n in range(16)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda n: encode(server.port, "stub/a", texts, {"x-n": str(n)}), range(48)))
        for answer in answers:
            assert np.array_equal(dense_rows(answer), stub_rows(texts, 4096))
        wait_no_extents(server.port)


def test_large_payloads_get_memory_of_their_own_and_give_it_back():
    """Replies of 4 MiB over large_extent_bytes travel in segments of their own."""
    with start_server(
        "--model", "stub/a=stub:dense=8192", "--reply-segment-bytes", str(1 << 20),
        "--large-extent-bytes", "65536", "--request-segment-bytes", str(1 << 20),
    ) as server, Client(server.port) as client:  # fmt: skip
        texts = [f"text {n} " * 200 for n in range(128)]
        for _ in range(5):
            assert np.array_equal(dense_rows(client.encode("stub/a", texts)), stub_rows(texts, 8192))
        wait_no_extents(server.port)
