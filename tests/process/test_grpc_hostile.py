"""Hostile and broken gRPC clients on a running server: each ends with a reason or in time, and the next call succeeds."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.frames import Code
from tests.process.grpc_floods import a_request, flood
from tests.process.harness import WAIT_S, Server, eventually, free_port, paused, start_server
from tests.process.keys import INFER, write_keys
from tests.process.test_listen import needs_openssl, pki  # noqa: F401  # a fixture
from tests.process.wire import extents_in_use, total, wait_no_extents
from tests.unit.frontend.grpc.transport.breaches import CONNECTION_FAULTS, STREAM_FAULTS, window
from tests.unit.frontend.grpc.transport.client_bytes import (
    OPENING,
    block,
    data,
    ended_with,
    headers,
    prefixed,
    reset_with,
)

KSERVE = "/inference.GRPCInferenceService"
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
LIVE = block(path=f"{KSERVE}/ServerLive")
LIMIT_S = 90.0
"""Longer than a busy machine stands still, and less than the deadline of a request, which would end what stalls, too."""
STALL_S = "3"
"""How long a client may stall; a busy machine stalls the good ones, too."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "id=stub:tensor", "--model", "slow=stub:tensor,latency_ms=400", "--grpc-port", str(free_port()),
        "--body-idle-timeout-s", STALL_S, "--grpc-unread-timeout-s", STALL_S, "--max-grpc-held-bytes", str(48 << 20),
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture
def good(server: Server) -> Iterator[triton.InferenceServerClient]:
    """A client that is connected throughout, and is answered at the end as at the beginning."""
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        check_good(client)
        yield client
        check_good(client)


def check_good(client: triton.InferenceServerClient, model: str = "id", key: str = "") -> None:
    an_input = triton.InferInput("INPUT0", [3, 2], "FP32").set_data_from_numpy(ROWS)
    words = {"authorization": f"Bearer {key}"} if key else None
    found = client.infer(model, [an_input], headers=words, client_timeout=LIMIT_S).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(found, ROWS)


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """Return a server whose limit of idle frames a flood is over even where that is read very slowly.

    A flood of a size that is over the ordinary limit in three seconds is none where it takes longer.
    """
    with start_server(
        "--model", "id=stub:tensor", "--model", "slow=stub:tensor,latency_ms=400", "--grpc-port", str(free_port()),
        "--max-grpc-idle-frames-per-s", "100",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


class Raw:
    """A client that sends bytes and reads frames."""

    def __init__(self, server: Server, *, receive_buffer: int = 0) -> None:
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(("127.0.0.1", server.grpc_port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, what: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it may have been ended on the way
            self.sock.sendall(what)

    def frames(self, *, is_over: bool = True, kinds: tuple[int, ...] = ()) -> list[tuple[int, int, int, bytes]]:
        """Return what comes until the end (is_over), or until a frame of one of these kinds has come."""
        found: list[tuple[int, int, int, bytes]] = []
        rest = b""
        while True:
            try:
                received = self.sock.recv(65536)
            except ConnectionError:
                received = b""
            if not received:
                assert is_over, f"ended after {found}"
                return found
            rest += received
            while len(rest) >= 9 and len(rest) >= 9 + int.from_bytes(rest[:3], "big"):
                end = 9 + int.from_bytes(rest[:3], "big")
                found.append((rest[3], rest[4], int.from_bytes(rest[5:9], "big"), rest[9:end]))
                rest = rest[end:]
            if any(kind in kinds for kind, *_ in found):
                return found


# --- breaches of the protocol -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONNECTION_FAULTS)
def test_a_breach_ends_its_connection_by_name(server: Server, strict: Server, name: str):
    breach, code = CONNECTION_FAULTS[name]
    asked = strict if code == Code.ENHANCE_YOUR_CALM else server
    with triton.InferenceServerClient(f"127.0.0.1:{asked.grpc_port}") as beside:
        check_good(beside)
        with Raw(asked) as raw:
            raw.send(OPENING + breach)
            found = raw.frames(kinds=(frames.GOAWAY, frames.RST_STREAM))
            # One that uses a stream twice may find the first call still open, which then ends alone.
            assert (ended_with(found) or reset_with(found, 1)) == code
        check_good(beside)


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_a_breach_of_a_stream_ends_that_alone(server: Server, good: triton.InferenceServerClient, name: str):
    breach, code = STREAM_FAULTS[name]
    with Raw(server) as raw:
        raw.send(OPENING + breach)
        assert reset_with(raw.frames(kinds=(frames.RST_STREAM,)), 1) == code
        raw.send(headers(3, LIVE) + data(3, prefixed(b"")))
        assert any(
            frame[0] == frames.DATA and frame[3][5:] == b"\x08\x01" for frame in raw.frames(kinds=(frames.DATA,))
        )


def test_resets_as_fast_as_they_come_end_the_connection_and_leave_no_work(strict: Server):
    call = block(path=f"{KSERVE}/ModelInfer")
    request = prefixed(a_request("slow", 4))
    with triton.InferenceServerClient(f"127.0.0.1:{strict.grpc_port}") as beside:
        check_good(beside)
        with Raw(strict) as raw:
            raw.send(OPENING + b"".join(
                headers(stream, call) + data(stream, request) + frames.reset_frame(stream, Code.CANCEL)
                for stream in range(1, 26_000, 2)
            ))  # fmt: skip
            assert ended_with(raw.frames()) == Code.ENHANCE_YOUR_CALM
        eventually(lambda: extents_in_use(strict.port) == 0, "the end of their work")
        check_good(beside)


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /v2/models/id/infer HTTP/1.1\r\n\r\n"]
)
def test_http_1_is_told_what_is_spoken_here(server: Server, good: triton.InferenceServerClient, request_: bytes):
    with Raw(server) as raw:
        raw.send(request_)
        answer = b""
        while part := raw.sock.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"gRPC" in answer


def test_tls_to_a_plain_port_is_closed(server: Server, good: triton.InferenceServerClient):
    context = ssl.create_default_context()
    with Raw(server) as raw, pytest.raises(OSError):
        context.wrap_socket(raw.sock, server_hostname="localhost")


# --- those who are slow -----------------------------------------------------------------------------------------------


def test_what_stalls_ends_in_time(server: Server, good: triton.InferenceServerClient):
    openings = [b"", frames.PREFACE[:10], frames.PREFACE, OPENING + frames.frame(frames.HEADERS, 0, 1, LIVE)]
    call = OPENING + headers(1, block(path=f"{KSERVE}/ModelInfer"))
    messages = [b"", data(1, b"\0", 0), data(1, prefixed(a_request("id", 4))[:20], 0)]
    with contextlib.ExitStack() as stack:
        stalled = [(stack.enter_context(Raw(server)), part) for part in openings]
        slow = [(stack.enter_context(Raw(server)), call + part) for part in messages]
        began_s = time.monotonic()
        for raw, part in stalled + slow:
            raw.send(part)
        for raw, _ in slow:
            (ended,) = [frame for frame in raw.frames(kinds=(frames.HEADERS,)) if frame[0] == frames.HEADERS]
            assert b"grpc-status\x014" in ended[3]
        for raw, _ in stalled:
            raw.frames()
        assert 2 < time.monotonic() - began_s < LIMIT_S


def test_a_client_that_gives_no_room_holds_up_nobody_and_is_cut_in_time(
    server: Server, good: triton.InferenceServerClient
):
    with Raw(server) as raw:
        raw.send(OPENING + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
        raw.send(headers(1, block(path=f"{KSERVE}/ModelInfer")) + data(1, prefixed(a_request("id", 1000))))
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.5:
            check_good(good)
        assert reset_with(raw.frames(kinds=(frames.RST_STREAM,)), 1) == Code.CANCEL
        assert time.monotonic() - began_s < LIMIT_S


def test_a_client_that_reads_nothing_is_cut_in_time(server: Server, good: triton.InferenceServerClient):
    room = frames.settings_frame({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}) + window(
        0, frames.MAX_WINDOW - 65_535
    )
    large = prefixed(a_request("id", 1 << 20))
    with Raw(server, receive_buffer=4096) as raw:
        raw.send(OPENING + room)
        for stream in range(1, 13, 2):
            raw.send(headers(stream, block(path=f"{KSERVE}/ModelInfer")))
            for at in range(0, len(large), 1 << 20):
                is_end = at + (1 << 20) >= len(large)
                raw.send(data(stream, large[at : at + (1 << 20)], frames.END_STREAM if is_end else 0))
        began_s = time.monotonic()
        eventually(lambda: num_connections(server) == 1, "its end")
        assert time.monotonic() - began_s < LIMIT_S


def num_connections(server: Server) -> int:
    (pid,) = server.pids("grpc")
    return sum(
        1 for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.laddr.port == server.grpc_port
    )  # fmt: skip


def test_messages_that_never_end_cut_who_holds_most(server: Server, good: triton.InferenceServerClient):
    call = block(path=f"{KSERVE}/ModelInfer")
    part = b"\0" + (30 << 20).to_bytes(4, "big") + bytes((1 << 20) - 5)
    with Raw(server) as small, Raw(server) as large:
        small.send(OPENING + headers(1, call) + data(1, part[:1000], 0))
        large.send(OPENING)
        (pid,) = server.pids("grpc")
        before = psutil.Process(pid).memory_info().rss
        most = before
        stream = 1
        while stream < 20:  # 10 calls of 20 MiB, as their windows grow
            large.send(headers(stream, call) + data(stream, part, 0))
            for _ in range(19):
                large.send(data(stream, bytes(1 << 20), 0))
            most = max(most, psutil.Process(pid).memory_info().rss)
            stream += 2
        assert not any(frame[0] == frames.DATA for frame in large.frames())
        assert most - before < 200 << 20
        (ended,) = [frame for frame in small.frames(kinds=(frames.HEADERS,)) if frame[0] == frames.HEADERS]
        assert b"grpc-status\x014" in ended[3]  # it was too slow, and no more


def test_messages_that_are_served_cut_who_holds_most(server: Server, good: triton.InferenceServerClient):
    call = block(path=f"{KSERVE}/ModelInfer")
    whole = prefixed(a_request("slow", 3 << 20))
    num_cut = total(server.port, "sie_held_bytes_cuts_total")
    with Raw(server) as raw, paused(server.worker()):
        raw.send(OPENING)
        for stream in range(1, 11, 2):  # 5 messages of 12 MiB
            raw.send(headers(stream, call))
            for at in range(0, len(whole), 1 << 20):
                is_end = at + (1 << 20) >= len(whole)
                raw.send(data(stream, whole[at : at + (1 << 20)], frames.END_STREAM if is_end else 0))
        assert not any(kind == frames.DATA for kind, *_ in raw.frames())
    eventually(lambda: total(server.port, "sie_held_bytes_cuts_total") == num_cut + 1, "one cut")
    eventually(lambda: total(server.port, "sie_held_bytes") == 0, "nothing held")


def test_many_idle_connections_cost_the_others_nothing(server: Server, good: triton.InferenceServerClient):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(Raw(server)).send(OPENING)
        for _ in range(20):
            check_good(good)
    eventually(lambda: num_connections(server) == 1, "the end of those that left")


# --- floods -----------------------------------------------------------------------------------------------------------

BEFORE_A_KEY_IS_READ = ["HEADERS of one-byte indexes", "SETTINGS of open streams", "DATA of one byte"]
FLOODS_OF_WORK = [
    *BEFORE_A_KEY_IS_READ, "HEADERS of table sizes", "HEADERS of additions", "HEADERS of unknown methods", "CONTINUATION",
    "SETTINGS of answers", "SETTINGS of many values", "DATA of padding", "empty messages", "empty messages of a frame each",
    "WINDOW_UPDATE of answers", "resets", "calls", "leavers",
]  # fmt: skip
MOST_S = 0.1
PERIOD_S = 0.5
"""Five times what a call may take, and time for dozens of calls."""


def time_of(pid: int) -> tuple[int, int]:
    """Return how long the main thread of a process has run, and has waited for a core, in nanoseconds."""
    run_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(run_ns), int(waited_ns)


def check_good_beside(server: Server, client: triton.InferenceServerClient, name: str, key: str = "") -> None:
    """Assert that nearly all of a good client's calls are answered soon while a flood goes on, in one period of three.

    A flood that stalls the server does so in each. A server that waits for a core has that time on top: other programs run
    on this machine, too.
    """
    (pid,) = server.pids("grpc")
    slowest: list[str] = []
    with flood(name, server.grpc_port):
        for _ in range(3):
            took_s: list[float] = []
            run_ns, waited_ns = time_of(pid)
            end_s = time.monotonic() + PERIOD_S
            while time.monotonic() < end_s:
                began_s = time.monotonic()
                check_good(client, key=key)
                took_s.append(time.monotonic() - began_s)
                time.sleep(0.005)  # as a client that has other things to do; the flood never pauses
            assert server.pids("grpc") == [pid], "killed by the supervisor"
            has_run_ns, has_waited_ns = time_of(pid)
            most_s = MOST_S * (1 + (has_waited_ns - waited_ns) / max(1, has_run_ns - run_ns))
            if np.quantile(took_s, 0.99) < most_s:
                return
            slowest.append(f"{sorted(took_s)[-3:]} of {len(took_s)}, over {most_s:.3f} s")
    pytest.fail("; ".join(slowest))


@pytest.mark.timing(forks=True)
@pytest.mark.parametrize("name", FLOODS_OF_WORK)
def test_a_flood_of_work_delays_nobody_else(server: Server, good: triton.InferenceServerClient, name: str):
    check_good_beside(server, good, name)


@pytest.mark.timing(forks=True)
def test_a_flood_of_work_without_a_key_delays_nobody_with_one(tmp_path: Path):
    write_keys(tmp_path / "keys.toml")
    with start_server(
        "--model", "id=stub:tensor", "--grpc-port", str(free_port()), "--api-keys", str(tmp_path / "keys.toml")
    ) as server, triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:  # fmt: skip
        for name in BEFORE_A_KEY_IS_READ:
            check_good_beside(server, client, name, INFER)


def test_floods_show_in_the_metrics(strict: Server):
    before = total(strict.port, "sie_grpc_connections_ended_total", reason="work")
    with triton.InferenceServerClient(f"127.0.0.1:{strict.grpc_port}") as beside:
        check_good(beside)
        with Raw(strict) as raw:
            # Far more work than a turn has time for, so that some of it waits for the next.
            raw.send(OPENING + frames.frame(frames.PING, 0, 0, b"12345678") * 12_000)
            raw.frames()
        eventually(
            lambda: total(strict.port, "sie_grpc_connections_ended_total", reason="work") == before + 1,
            "its end counted",
        )
        eventually(lambda: total(strict.port, "sie_grpc_connections") == 1, "the good client's connection alone")
        check_good(beside)
    eventually(lambda: total(strict.port, "sie_grpc_waits_total") > 0, "its waits, which are counted now and then")


# --- those who leave --------------------------------------------------------------------------------------------------


def test_clients_that_leave_in_the_middle_leave_nothing_behind(server: Server, good: triton.InferenceServerClient):
    call = headers(1, block(path=f"{KSERVE}/ModelInfer")) + data(1, prefixed(a_request("slow", 4)))
    for at in range(0, len(OPENING + call), 13):
        with Raw(server) as raw:
            raw.send((OPENING + call)[:at])
    for _ in range(5):
        with Raw(server) as raw:
            raw.send(OPENING + call)
    eventually(lambda: num_connections(server) == 1, "their end")
    check_good(good, "slow")
    wait_no_extents(server.port)


# --- those who are merely demanding -----------------------------------------------------------------------------------


def test_a_thousand_calls_at_once_on_one_connection_are_all_answered(
    server: Server, good: triton.InferenceServerClient
):
    request = a_request("id", 16)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        method = channel.unary_unary(f"{KSERVE}/ModelInfer")
        calls = [method.future(request, timeout=WAIT_S) for _ in range(3000)]
        assert all(call.result().endswith(bytes(64)) for call in calls)


def test_large_messages_cross_both_ways_side_by_side(server: Server, good: triton.InferenceServerClient):
    rng = np.random.default_rng(1)
    failures: list[BaseException] = []

    def carry() -> None:
        values = rng.integers(0, 255, (1 << 20,), np.uint8).astype(np.float32)
        try:
            with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
                for _ in range(3):
                    an_input = triton.InferInput("INPUT0", [len(values)], "FP32").set_data_from_numpy(values)
                    found = client.infer("id", [an_input]).as_numpy("OUTPUT0")
                    np.testing.assert_array_equal(found, values)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=carry) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_pings_of_a_client_that_keeps_its_connection_alive_are_answered(server: Server):
    options = [
        ("grpc.keepalive_time_ms", 100), ("grpc.keepalive_timeout_ms", 30_000), ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_time_between_pings_ms", 100),
    ]  # fmt: skip
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=options) as channel:
        method = channel.unary_unary(f"{KSERVE}/ModelInfer")
        assert method(a_request("slow", 4), timeout=60)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=1.0)
        with pytest.raises(grpc.RpcError) as caught:
            list(watch)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert method(a_request("id", 4), timeout=60)


@needs_openssl
def test_a_client_that_is_no_client_of_tls_is_closed_and_others_are_served(pki):  # noqa: F811  # the fixture
    with start_server(
        "--model", "id=stub:tensor", "--grpc-port", str(free_port()), "--tls-cert", str(pki / "server.pem"),
        "--tls-key", str(pki / "server.key"),
    ) as server:  # fmt: skip
        for first in (b"GET / HTTP/1.1\r\n\r\n", OPENING, b"\x16\x03\x01\x00\x05hello"):
            with Raw(server) as raw:
                raw.send(first)
                assert not any(frame[0] == frames.SETTINGS for frame in raw.frames() if frame)
        context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
        context.set_alpn_protocols(["http/1.1", "h2"])
        plain = socket.create_connection(("127.0.0.1", server.grpc_port), LIMIT_S)
        with context.wrap_socket(plain, server_hostname="localhost") as sock:
            assert sock.selected_alpn_protocol() == "h2"
        credentials = grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            large = a_request("id", 900_000)
            method = channel.unary_unary(f"{KSERVE}/ModelInfer")
            assert method(large, timeout=WAIT_S).endswith(bytes(3_600_000))
            calls = [method.future(a_request("id", 16), timeout=WAIT_S) for _ in range(1000)]  # more than a turn takes
            assert all(call.result().endswith(bytes(64)) for call in calls)
