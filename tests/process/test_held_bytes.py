"""A frontend holds a bounded number of bytes, for a bounded time, for clients that do not send or do not read."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator

import msgpack
import pytest

from sie.frontend.grpc.transport import frames
from tests.process.grpc_floods import a_request
from tests.process.harness import Server, eventually, free_port, start_server
from tests.process.keys import INFER, METRICS, bearer, entry, write_keys
from tests.process.test_grpc_hostile import KSERVE, Raw
from tests.process.wire import MSGPACK, TIMEOUT_S, connect, raw_request, read_response, send_raw
from tests.unit.frontend.grpc.transport.client_bytes import OPENING, block, data, headers, prefixed

MIB = 1 << 20
MAX_BYTES = 64 * MIB
UNREAD_S = 6.0
"""Where a client has to be cut in time; elsewhere a busy machine needs longer to read, or to fill what is held."""
ONE = "sie_test-one-0123456789abcdef"
MODEL = ("--model", "stub/a=stub:dense=4096")
PATH = "/v1/encode/stub/a"
PACKED = {"content-type": MSGPACK, "accept": MSGPACK}


@contextlib.contextmanager
def start(tmp_path_factory: pytest.TempPathFactory, unread_s: float) -> Iterator[Server]:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", entry("one", ONE, ["infer"], max_concurrent=1))
    with start_server(
        *MODEL, "--model", "id=stub:tensor", "--frontends", "1", "--grpc-port", str(free_port()), "--api-keys", str(keys),
        "--max-held-bytes", str(MAX_BYTES), "--unread-timeout-s", f"{unread_s:g}", "--body-idle-timeout-s", "300",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory, 300) as running:
        yield running


def ask(num_items: int, key: str = INFER) -> bytes:
    """Return a request whose answer has 16 KiB for each item."""
    body = msgpack.packb({"items": [{"text": f"text {number}"} for number in range(num_items)]})
    return raw_request(PATH, body, {**PACKED, **bearer(key)})


def metric(server: Server, name: str) -> float:
    page = send_raw(server.port, raw_request("/metrics", headers=bearer(METRICS), method="GET")).body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name)


def wait_all_read(server: Server) -> None:
    eventually(lambda: metric(server, "sie_held_bytes") == 0, "nothing held")


def is_cut(sock: socket.socket) -> bool:
    """Tell whether the connection ends before its answer is whole."""
    head, num_bytes = b"", 0
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(MIB):
            num_bytes += len(piece)
            if b"\r\n\r\n" not in head:
                head += piece
            fields, _, _ = head.partition(b"\r\n\r\n")
            length = int(fields.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            if num_bytes == len(fields) + 4 + length:
                return False
    return True


def test_answers_that_nobody_reads_are_bounded_and_the_greediest_is_cut_first(server: Server):
    num_cut = metric(server, "sie_held_bytes_cuts_total")
    with contextlib.ExitStack() as stack:
        greedy, *others = [stack.enter_context(connect(server.port)) for _ in range(5)]
        greedy.sendall(ask(2000))
        assert select.select([greedy], [], [], TIMEOUT_S)[0]
        for sock in others:
            sock.sendall(ask(700))
            assert select.select([sock], [], [], TIMEOUT_S)[0]
        eventually(lambda: metric(server, "sie_held_bytes_cuts_total") > num_cut, "somebody is cut")
        assert MAX_BYTES / 2 < metric(server, "sie_held_bytes") <= MAX_BYTES
        assert is_cut(greedy)
        assert not any(is_cut(sock) for sock in others)
    wait_all_read(server)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("is_read", [True, False])
def test_key_has_its_grpc_request_back_when_the_answer_has_left(server: Server, is_read: bool, method: str):
    call = headers(1, block(path=f"{KSERVE}/{method}", **bearer(ONE))) + data(1, prefixed(a_request("id", 1000)))
    with Raw(server) as raw:
        raw.send(OPENING + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}) + call)
        raw.frames(kinds=(frames.HEADERS,))
        # A frontend that has just started looks for the others' counts of a key every half second.
        eventually(
            lambda: send_raw(server.port, ask(1, ONE)).status == 429, "the key's limit counts the call over gRPC"
        )
        for _ in range(3):
            assert send_raw(server.port, ask(1, ONE)).status == 429
        if is_read:
            raw.send(frames.frame(frames.WINDOW_UPDATE, 0, 1, (1 << 20).to_bytes(4, "big")))
            eventually(lambda: send_raw(server.port, ask(1, ONE)).status == 200, "room for the next request")
    eventually(lambda: send_raw(server.port, ask(1, ONE)).status == 200, "room for the next request")
    wait_all_read(server)


def test_bodies_under_way_are_bounded_and_the_largest_is_refused_first(server: Server):
    head = {**PACKED, **bearer(INFER), "content-length": str(32 * MIB)}
    with contextlib.ExitStack() as stack:
        socks: list[socket.socket] = []
        for num_bytes in (12 * MIB, 30 * MIB, 11 * MIB, 10 * MIB, 9 * MIB):
            sock = stack.enter_context(connect(server.port))
            sock.sendall(raw_request(PATH, headers=head, length=False) + bytes(num_bytes))
            socks.append(sock)
        refused = read_response(socks[1])
        assert (refused.status, refused.code(), refused.headers["retry-after"]) == (503, "QUEUE_FULL", "1")
        assert b"max_held_bytes" in refused.body
        assert select.select([socks[0], *socks[2:]], [], [], 0.1)[0] == [], "somebody else was refused"
        assert 0 < metric(server, "sie_held_bytes") <= MAX_BYTES
    wait_all_read(server)


def test_announced_bodies_that_do_not_come_cut_nobody(server: Server):
    num_cut = metric(server, "sie_held_bytes_cuts_total")
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connect(server.port))
        body = msgpack.packb({"items": [{"text": "a"}], "pad": bytes(8 * MIB)})
        head = raw_request(PATH, headers={**PACKED, **bearer(INFER), "content-length": str(len(body))}, length=False)
        honest.sendall(head + body[: 2 * MIB])
        announced = {**PACKED, **bearer(INFER), "content-length": str(256 * 1024)}
        for _ in range(MAX_BYTES // (256 * 1024) + 10):
            stack.enter_context(connect(server.port)).sendall(raw_request(PATH, headers=announced, length=False))
        assert metric(server, "sie_held_bytes") < MAX_BYTES / 2
        honest.sendall(body[2 * MIB :])
        assert read_response(honest).status == 200
    assert metric(server, "sie_held_bytes_cuts_total") == num_cut
    wait_all_read(server)


@pytest.mark.timing(forks=True)
def test_a_client_that_reads_nothing_is_cut_in_time(tmp_path_factory: pytest.TempPathFactory):
    with start(tmp_path_factory, UNREAD_S) as server, connect(server.port) as sock:
        sock.sendall(ask(700))
        assert select.select([sock], [], [], TIMEOUT_S)[0]
        began_s = time.monotonic()
        eventually(lambda: metric(server, "sie_held_bytes") > 0, "it is held")
        wait_all_read(server)
        assert UNREAD_S / 2 < time.monotonic() - began_s < UNREAD_S + 5
        assert is_cut(sock)


def test_a_key_has_its_request_back_when_the_answer_is_read(server: Server):
    with connect(server.port) as sock:
        sock.sendall(ask(700, ONE))
        assert select.select([sock], [], [], TIMEOUT_S)[0]
        refused = send_raw(server.port, ask(1, ONE))
        assert refused.status == 429
        assert len(read_response(sock).body) > 700 * 16384
        for _ in range(5):  # on the same connection, and on others
            sock.sendall(ask(100, ONE))
            assert read_response(sock).status == 200
            assert send_raw(server.port, ask(100, ONE)).status == 200


def test_a_refusal_of_long_values_is_short_and_gives_a_key_its_request_back_once(server: Server):
    for path, fields in (("/v1/embeddings", {"model": "x" * 20_000}), (PATH, {"items": [{"text": "a"}], "model": 1})):
        body = json.dumps({"input": "a", "params": {"output_types": ["y" * 20_000]}, **fields}).encode()
        refused = send_raw(server.port, raw_request(path, body, {"content-type": "application/json", **bearer(ONE)}))
        assert refused.status in {400, 404}
        assert len(refused.body) < 2_000
    eventually(lambda: metric(server, "sie_held_bytes") == 0, "it is read")
    assert metric(server, "sie_api_key_running") == 0


@pytest.mark.timing
def test_a_stop_does_not_wait_for_a_client_that_does_not_read():
    with start_server(*MODEL, "--frontends", "1") as server, connect(server.port) as sock:
        sock.sendall(ask(700))
        assert select.select([sock], [], [], TIMEOUT_S)[0]
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < 15, "it waited for the client"
