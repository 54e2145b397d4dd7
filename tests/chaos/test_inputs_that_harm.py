"""F7, F8, F10, F11: an input that harms its worker or its model is refused, and other requests are served."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.chaos.cluster import DENSE, MODEL, Leaks, cluster, count_loads
from tests.chaos.history import open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import Server, eventually
from tests.process.wire import Response, dense_rows, encode, families, get, post_json, stub_rows, total


def num_restarts(server: Server) -> float:
    return total(server.port, "sie_worker_restarts_total")


@pytest.mark.row("F7", "one item finds no memory on the device")
def test_f7_an_item_without_memory_is_refused_and_its_neighbours_are_not(row: Row):
    with cluster(stub="latency_ms=5,fail=oom,fail_on=HUGE") as server:
        leaks = Leaks(server)
        with open_loop(server, 100, seed=SEED) as load:
            answers = [encode(server.port, MODEL, ["HUGE", "beside it"]) for _ in range(pick(20, 500))]
        assert {(answer.status, answer.code()) for answer in answers} == {(503, "RESOURCE_EXHAUSTED")}
        splits = total(server.port, "sie_oom_batch_splits_total")
        restarts = num_restarts(server)
        leaks.check()
    row.all_right("failed requests of others", load.history)
    row.equals("workers lost", restarts, 0)
    row.tell("steps split", splits, "")


@pytest.mark.row("F8", "a device is lost: CUDA answers every further call with the same error")
@pytest.mark.timing
def test_f8_a_lost_device_ends_its_worker_at_once(row: Row):
    with cluster(stub="latency_ms=5,fail=sticky,fail_on=STICKY") as server:
        leaks = Leaks(server)
        with open_loop(server, 100, seed=SEED) as load:
            num_lines, began_s = len(server.output.lines), time.monotonic()
            refusal = encode(server.port, MODEL, ["STICKY"])
            eventually(lambda: count_loads(server, num_lines) == 2, "two successors that serve")
            took_s = time.monotonic() - began_s
        assert (refusal.status, refusal.code()) == (422, "POISON_INPUT")
        ended = [line for line in server.output.lines if "ended with status" in line]
        restarts = num_restarts(server)
        leaks.check()
    assert all("ended with status 75" in line for line in ended), ended
    row.equals("workers lost", restarts, 2)
    row.all_right("failed requests of others", load.history)
    row.at_most("two losses, until both successors serve", took_s, 4.0, "s")


@pytest.mark.row("F10", "an input kills every worker that runs it")
@pytest.mark.timeout(600)
def test_f10_a_poisonous_input_kills_at_most_two_workers(row: Row):
    num_poisons = pick(3, 30)
    most_deaths = 0.0
    with cluster(stub="latency_ms=5,kill_on=POISON") as server:
        leaks = Leaks(server)
        with open_loop(server, 100, seed=SEED) as load:
            for number in range(num_poisons):
                eventually(lambda: len(server.pids("worker")) == 2, "two workers, and the deaths counted")
                before = num_restarts(server)
                refusals = [encode(server.port, MODEL, [f"POISON {number}"]) for _ in range(3)]
                assert {(refusal.status, refusal.code()) for refusal in refusals} == {(422, "POISON_INPUT")}
                eventually(lambda: len(server.pids("worker")) == 2, "two workers, and the deaths counted")
                most_deaths = max(most_deaths, num_restarts(server) - before)
        leaks.check()
    row.equals("poisonous inputs", num_poisons, num_poisons)
    row.at_most("most deaths for one of them", most_deaths, 2, "", slack=1.0)
    row.all_right("failed requests of others", load.history)


def share_of_nan(server: Server) -> float:
    return max(sample.value for sample in families(server.port)["sie_non_finite_share"].samples)


def ask_bad(server: Server, answers: list[Response]) -> None:
    answers.append(encode(server.port, MODEL, ["NAN"]))


@pytest.mark.row("F11", "a model produces NaN for some inputs")
def test_f11_values_that_are_not_finite_are_never_sent(row: Row):
    num_bad = pick(30, 300)
    with cluster(stub="latency_ms=5,score,fail=nan,fail_on=NAN") as server:
        with open_loop(server, 100, seed=SEED) as load:
            bad = [encode(server.port, MODEL, ["fine", f"NAN {n}"]) for n in range(num_bad)]
            bad += [post_json(server.port, f"/v1/encode/{MODEL}", {"items": [{"text": "NAN"}]}) for _ in range(num_bad)]
            body = {"query": {"text": "q"}, "items": [{"text": "NAN"}]}
            scores = [post_json(server.port, f"/v1/score/{MODEL}", body) for _ in range(3)]
        good = dense_rows(encode(server.port, MODEL, ["fine"]))
        # The share is of the latest sequences, and a slow machine puts many good ones of the load between two bad ones.
        eventually(
            lambda: ask_bad(server, bad) or share_of_nan(server) >= 0.01, "a share that calls the model degraded"
        )
        degraded = share_of_nan(server)
        assert get(server.port, "/readyz").status == 200
    assert np.array_equal(good, stub_rows(["fine"], DENSE))
    assert {(answer.status, answer.code()) for answer in bad} == {(500, "INFERENCE_ERROR")}
    assert {(score.status, score.code()) for score in scores} == {(500, "INFERENCE_ERROR")}
    sent = [answer for answer in (*bad, *scores) if b"nan" in answer.body.lower().replace(b"finite", b"")]
    row.equals("answers that hold a NaN", len(sent), 0)
    row.at_least("share that calls the model degraded", degraded, 0.01, "")
    row.all_right("failed requests of others", load.history)
