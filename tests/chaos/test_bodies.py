"""F22, F23, F27 to F33: any body of a client costs little, harms no other client, and is answered."""

from __future__ import annotations

import contextlib
import gzip
import io
import resource
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import psutil
import pytest

from tests.chaos.cluster import DENSE, MODEL, Leaks, PeakMemory, cluster
from tests.chaos.history import History, open_loop, quantile
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import Server
from tests.process.mutants import ENCODE, PACKED, mutate, seeds
from tests.process.wire import Client, connect, dense_rows, encode, raw_request, read_response, send_raw, stub_rows

MIB = 1 << 20
IDLE_S = pick(3.0, 2.0)
MAX_BODY_BYTES = 34 * MIB


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with cluster(
        "--body-idle-timeout-s", f"{IDLE_S:g}", "--min-body-bytes-per-s", "1024",
        "--model", "stub/image=stub:dense=16,image",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """Return the shared server; afterwards it has the same processes, answers, and holds nothing more."""
    leaks, before = Leaks(shared), sorted(shared.pids())
    yield shared
    assert sorted(shared.pids()) == before, "a process died"
    assert np.array_equal(dense_rows(encode(shared.port, MODEL, ["after"])), stub_rows(["after"], DENSE))
    leaks.check()


def raise_file_limit(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_files + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, num_files + 256), hard))


def open_sockets(server: Server, count: int, data: bytes) -> list[socket.socket]:
    """Open connections that have sent this much, and no more."""
    raise_file_limit(count)
    sockets = [connect(server.port) for _ in range(count)]
    for sock in sockets:
        sock.sendall(data)
    return sockets


def load_for(server: Server, seconds: float) -> History:
    with open_loop(server, 100, seed=SEED) as load:
        time.sleep(seconds)
    return load.history


@pytest.mark.row("F22", "clients that never finish their headers")
@pytest.mark.timeout(400)
@pytest.mark.timing(forks=True)
def test_f22_slow_headers_delay_nobody(row: Row, server: Server):
    quiet = load_for(server, pick(1.5, 5.0))
    began_s = time.monotonic()
    sockets = open_sockets(server, pick(200, 2000), b"POST /v1/encode/stub/a HTTP/1.1\r\nhost: localhost\r\n")
    busy = load_for(server, pick(1.5, 5.0))
    if pick(False, True):
        for sock in sockets:
            sock.settimeout(40.0)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
        row.at_most("last of them closed", time.monotonic() - began_s, 32.0, "s")
    for sock in sockets:
        sock.close()
    row.all_right("failed requests of others", quiet, busy)
    share = pick(0.5, 0.99)  # of the few requests of a short run one stall of the machine delays more than a hundredth
    ratio = quantile(busy.latencies_s(), share) / max(quantile(quiet.latencies_s(), share), pick(0.050, 0.010))
    row.at_most(
        "p99 (short run: median) of others, to that without them, which counts as 10 ms (short run: 50) at least",
        ratio, 2.0, "times",
    )  # fmt: skip


@pytest.mark.row("F23", "clients that send their bodies byte by byte")
@pytest.mark.timeout(400)
@pytest.mark.timing(forks=True)
def test_f23_slow_bodies_are_408(row: Row, server: Server):
    count = pick(100, 1000)
    memory = PeakMemory(server, "frontend")
    head = raw_request(ENCODE, b"", {**PACKED, "content-length": "100000"}, length=False)
    began_s = time.monotonic()
    sockets = open_sockets(server, count, head + b"\x81")
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(load_for, server, IDLE_S + 1.0)
        statuses = drip(sockets, 20.0)
        took_s = time.monotonic() - began_s
        history = busy.result()
    row.equals("answers 408", statuses[408], count)
    row.at_most("last of them answered", took_s, IDLE_S + 2.0, "s")
    row.at_most("memory of a frontend", memory.growth_bytes() / MIB, 64, "MiB more", slack=1.0)
    row.all_right("failed requests of others", history)


def drip(sockets: list[socket.socket], timeout_s: float) -> Counter[int]:
    """Send each a byte every quarter of a second until it has an answer; return the statuses."""
    statuses: Counter[int] = Counter()
    left = list(sockets)
    deadline_s = time.monotonic() + timeout_s
    for sock in left:
        sock.setblocking(False)
    while left and time.monotonic() < deadline_s:
        for sock in list(left):
            try:
                head = sock.recv(4096)
            except BlockingIOError:
                with contextlib.suppress(OSError):
                    sock.send(b"x")
                continue
            except ConnectionError:
                head = b""
            statuses[int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0] += 1
            sock.close()
            left.remove(sock)
        time.sleep(0.25)
    return statuses


@pytest.mark.row("F24", "clients that read nothing of their answers, and send no end of their bodies")
@pytest.mark.timeout(400)
@pytest.mark.timing(forks=True)
def test_f24_what_nobody_reads_or_ends_is_bounded(row: Row):
    count, max_bytes = pick(24, 100), 128 * MIB
    asked = msgpack.packb({"items": [{"text": f"text {number}"} for number in range(700)]})  # for 11 MiB
    whole = raw_request("/v1/encode/stub/wide", asked, {**PACKED, "accept": PACKED["content-type"]})
    begun = raw_request(ENCODE, b"", {**PACKED, "content-length": str(32 * MIB)}, length=False) + bytes(8 * MIB)
    flags = ("--model", "stub/wide=stub:dense=4096", "--max-held-bytes", str(max_bytes), "--unread-timeout-s", "5")
    with cluster(*flags, frontends=1, workers=1, is_stopped=True) as server, contextlib.ExitStack() as stack:
        memory, cpu_before_s = PeakMemory(server, "frontend"), cpu_s(server)
        with open_loop(server, 20, seed=SEED) as load:
            for data in [whole, begun] * count:
                sock = stack.enter_context(connect(server.port))
                with contextlib.suppress(ConnectionError):  # refused meanwhile
                    sock.sendall(data)
            time.sleep(pick(1.0, 10.0))
        row.at_most("memory of a frontend", memory.growth_bytes() / max_bytes, 2.5, "times max_held_bytes", slack=1.2)
        row.all_right("failed requests of others", load.history)
        row.at_most("p99 of others", quantile(load.history.latencies_s(), pick(0.5, 0.99)) * 1e3, 100, "ms")
        row.tell("processor time", cpu_s(server) - cpu_before_s, "s")
        began_s = time.monotonic()
        stack.close()
        server.stop()
        row.at_most("stop", time.monotonic() - began_s, 10.0, "s")


@pytest.mark.row("F27", "a body of 10 GiB, announced or without an end")
@pytest.mark.timing(forks=True)
def test_f27_giant_bodies_are_cut(row: Row, server: Server):
    memory = PeakMemory(server, "frontend")
    head = raw_request(ENCODE, b"", {**PACKED, "content-length": str(10 << 30)}, length=False)
    took_s: list[float] = []
    for _ in range(9):
        began_s = time.monotonic()
        assert send_raw(server.port, head).status == 413
        took_s.append(time.monotonic() - began_s)
    row.at_most("median refusal of an announced one", sorted(took_s)[4] * 1e3, 20.0, "ms", slack=10.0)
    num_sent = 0
    chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
    with connect(server.port) as sock, contextlib.suppress(OSError):
        sock.settimeout(1.0)
        sock.sendall(raw_request(ENCODE, b"", {**PACKED, "transfer-encoding": "chunked"}, length=False))
        for _ in range(10 << 10):
            sock.sendall(chunk)
            num_sent += len(chunk)
    row.at_most("taken of an endless one", num_sent / MIB, 2 * MAX_BODY_BYTES / MIB, "MiB", slack=1.0)
    row.at_most("memory of a frontend", memory.growth_bytes() / MIB, 2 * MAX_BODY_BYTES / MIB, "MiB more", slack=1.0)


@pytest.mark.row("F28", "a body of very many chunks of one byte")
def test_f28_tiny_chunks_cost_little(row: Row, server: Server):
    num_chunks = pick(100_000, 1_000_000)
    memory = PeakMemory(server, "frontend")
    head = raw_request(ENCODE, b"", {**PACKED, "transfer-encoding": "chunked"}, length=False)
    began_s = time.monotonic()
    with connect(server.port) as sock:
        sock.settimeout(60.0)
        sock.sendall(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(num_chunks // 1000):
                sock.sendall(b"1\r\nx\r\n" * 1000)
            sock.sendall(b"0\r\n\r\n")
        status = read_response(sock).status
    row.tell("status", status, "")
    assert status in (400, 408, 413)
    row.tell("time", time.monotonic() - began_s, "s")
    row.at_most("memory of a frontend", memory.growth_bytes() / MIB, 16, "MiB more", slack=1.0)


@pytest.mark.row("F29", "a compressed bomb")
@pytest.mark.timing(forks=True)
def test_f29_a_compressed_bomb_is_never_unpacked(row: Row, server: Server):
    body = gzip.compress(b"\0" * pick(100 * MIB, 1000 * MIB), 9)
    memory, before_s = PeakMemory(server, "frontend"), cpu_s(server)
    response = send_raw(server.port, raw_request(ENCODE, body, {**PACKED, "content-encoding": "gzip"}))
    assert response.status in (400, 413, 415)
    row.tell("size of the body", len(body) / MIB, "MiB")
    row.at_most("processor time", (cpu_s(server) - before_s) * 1e3, 100, "ms")
    row.at_most("memory of a frontend", memory.growth_bytes() / MIB, 8, "MiB more", slack=1.0)


def cpu_s(server: Server) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in server.frontends())


@pytest.mark.row("F30", "mutated bodies")
@pytest.mark.timeout(900)
def test_f30_mutated_bodies_cause_no_server_error(row: Row, server: Server):
    num_clients, num_bodies = 4, pick(2000, 100_000)

    def send(client_number: int) -> Counter[int]:
        rng, corpus = np.random.default_rng([SEED, client_number]), seeds()
        statuses: Counter[int] = Counter()
        with Client(server.port) as client:
            for index in range(num_bodies // num_clients):
                path, body, headers = corpus[index % len(corpus)]
                statuses[client.request("POST", path, mutate(body, rng), headers).status] += 1
        return statuses

    with ThreadPoolExecutor(num_clients) as pool:
        statuses = sum(pool.map(send, range(num_clients)), Counter())
    row.equals("bodies", statuses.total(), num_bodies)
    row.equals("answers 5xx", sum(count for status, count in statuses.items() if status >= 500), 0)
    row.tell("answers 200", statuses[200], "")
    row.tell("answers 400", statuses[400], "")
    assert min(statuses[200], statuses[400]) > num_bodies / 100, f"the fuzz was one-sided: {statuses}"


@pytest.mark.row("F31", "a million levels of nesting")
@pytest.mark.timing(forks=True)
def test_f31_deep_nesting_is_refused_at_once(row: Row, server: Server):
    depth, as_json = 1_000_000, {"content-type": "application/json"}
    bodies = {
        "msgpack": (b"\x91" * depth, PACKED),
        "msgpack, in an unknown field": (b"\x82\xa1x" + b"\x91" * depth + b"\xc0\xa5items\x90", PACKED),
        "JSON": (b"[" * depth, as_json),
        "JSON, in an unknown field": (b'{"items":[{"text":"x"}],"x":' + b"[" * depth, as_json),
    }
    with Client(server.port) as client:
        for name, (body, headers) in bodies.items():
            took_s: list[float] = []
            for _ in range(9):
                began_s = time.monotonic()
                assert client.request("POST", ENCODE, body, headers).status == 400
                took_s.append(time.monotonic() - began_s)
            row.at_most(f"median refusal, {name}", sorted(took_s)[4] * 1e3, 5.0, "ms", slack=40.0)


@pytest.mark.row("F32", "bodies that would be many times as large when they are decoded")
def test_f32_amplification_is_bounded(row: Row, server: Server):
    count = pick(2_000_000, 8_000_000)
    maps = b"\x81\xa5items\xdd" + struct.pack(">I", count) + b"\x80" * count
    objects = b'{"items":[' + b"{}," * count + b"{}]}"
    for name, body, headers in (("msgpack", maps, PACKED), ("JSON", objects, {"content-type": "application/json"})):
        memory = PeakMemory(server, "frontend")
        began_s = time.monotonic()
        assert send_raw(server.port, raw_request(ENCODE, body, headers)).status in (400, 413)
        row.tell(f"{name} body", len(body) / MIB, "MiB")
        row.tell(f"{name} refused after", time.monotonic() - began_s, "s")
        row.at_most(f"{name} memory of a frontend", memory.growth_bytes() / len(body), 4, "times the body", slack=1.5)


@pytest.mark.row("F33", "pictures that are bombs, cut off, or empty")
@pytest.mark.timing(forks=True)
def test_f33_bad_pictures_are_400_and_cost_little(row: Row, server: Server):
    good = png(8, 8, zlib.compress(b"\0" + b"\0" * 24 + (b"\0" + b"\0" * 24) * 7))
    bad = {
        "a bomb of 50,000 x 50,000 pixels": png(50_000, 50_000, zlib.compress(b"\0" * 10 * MIB, 9)),
        "half a picture": good[: len(good) // 2],
        "no bytes": b"",
        "no picture after its mark": b"\x89PNG\r\n\x1a\n" + b"x" * 100,
    }
    began_s = time.monotonic()
    assert post_picture(server, good) == 200
    row.tell("first picture of a frontend, which loads the library", (time.monotonic() - began_s) * 1e3, "ms")
    assert {post_picture(server, good) for _ in range(16)} == {200}
    memory = PeakMemory(server, "frontend")
    for name, picture in bad.items():
        took_s: list[float] = []
        for _ in range(5):
            began_s = time.monotonic()
            response = post_picture(server, picture)
            took_s.append(time.monotonic() - began_s)
            assert response == 400, (name, response)
        row.at_most(f"median refusal of {name}", sorted(took_s)[2] * 1e3, 50, "ms", slack=20.0)
    assert post_picture(server, good) == 200
    row.at_most("memory of a frontend", memory.growth_bytes() / MIB, 64, "MiB more", slack=1.0)


def post_picture(server: Server, picture: bytes) -> int:
    body = {"items": [{"images": [{"data": picture, "format": "png"}]}]}
    with Client(server.port) as client:
        return client.request("POST", "/v1/encode/stub/image", msgpack.packb(body), PACKED).status


def png(width: int, height: int, pixels: bytes) -> bytes:
    """Return a PNG file of 24 bits a pixel with this image data, whether that fits or not."""
    out = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    out.seek(0, io.SEEK_END)
    for kind, data in (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", pixels),
        (b"IEND", b""),
    ):
        out.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return out.getvalue()
