"""F15, F19, F54, F55: the server lacks shared memory or descriptors, or its journal or its watchers are stuck."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from sie.shm.large import LargeBudget
from sie.shm.layout import ProtocolError
from sie.shm.segment import Segment
from sie.shm.space import InboundSpace, OutboundSpace
from sie.values.work import WorkHeader
from sie.values.work_bytes import read_extent
from tests.chaos.cluster import DENSE, MODEL, Leaks, cluster, logged
from tests.chaos.history import open_loop, quantile
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import WAIT_S, count_fds, eventually, free_port
from tests.process.watchers import watch
from tests.process.wire import connect, dense_rows, encode, get, stub_rows

SEGMENT_BYTES = 1 << 20
_DROPPED = b"log lines were dropped"


@pytest.mark.row("F15", "descriptors of random bytes")
@pytest.mark.timeout(600)
def test_f15_no_descriptor_leads_out_of_its_segment(row: Row):
    rng = np.random.default_rng(SEED)
    count = pick(100_000, 1_000_000)
    outbound = OutboundSpace.create("fuzz", SEGMENT_BYTES, LargeBudget(0), large_extent_bytes=SEGMENT_BYTES)
    lease = outbound.lease(SEGMENT_BYTES // 2)
    assert lease is not None
    lease.view[:] = rng.bytes(lease.nbytes)
    inbound = InboundSpace(Segment.map_peer(os.dup(outbound.fd), outbound.nbytes))
    decoder = msgspec.msgpack.Decoder(WorkHeader)
    num_refused = num_viewed = 0
    for _ in range(count // 10_000):
        wide = rng.integers(0, 1 << 63, (10_000, 2)).tolist()
        near = rng.integers(0, 2 * SEGMENT_BYTES, (10_000, 2)).tolist()
        for (offset, length), (near_offset, near_length) in zip(wide, near, strict=True):
            is_wide = not num_refused % 3
            address, nbytes = (offset, length) if is_wide else (near_offset & ~63, near_length)
            try:
                view = inbound.view(address, nbytes)
                assert len(view) == nbytes
                num_viewed += 1
                read_extent(view, decoder)
                pytest.fail(f"random bytes at {address} were read as a request")
            except ProtocolError:
                num_refused += 1
    row.equals("descriptors", num_refused, count)
    row.tell("of them within the segment", num_viewed, "")


@pytest.mark.row("F15", "somebody tries to write to the memory of a running server")
def test_f15_shared_memory_cannot_be_written_from_outside(row: Row):
    num_tried = num_written = 0
    with cluster() as server:
        for pid in server.pids():
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if not link.readlink().name.startswith(("memfd:sie-ring", "memfd:sie-request", "memfd:sie-reply")):
                        continue
                    num_tried += 1
                    with contextlib.suppress(PermissionError):
                        fd = os.open(link, os.O_RDWR)
                        try:
                            num_written += os.pwrite(fd, b"x" * 64, 0) > 0
                        finally:
                            os.close(fd)
    row.at_least("memories tried", num_tried, 8, "")
    row.equals("memories that took it", num_written, 0)


@pytest.mark.row("F19", "a frontend has no file descriptor for a further connection")
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit here")
@pytest.mark.timing
def test_f19_without_descriptors_connections_wait_and_it_recovers(row: Row):
    held_s, num_files = pick(2.0, 10.0), 160
    with cluster(frontends=1, prefix=("prlimit", f"--nofile={num_files}")) as server:
        leaks = Leaks(server)
        (frontend,) = server.frontends()
        process = psutil.Process(frontend)
        sockets = [connect(server.port) for _ in range(num_files)]
        eventually(lambda: count_fds(frontend) >= num_files // 2, "as many connections as it takes")
        before_s, began_s = cpu_s([process]), time.monotonic()
        time.sleep(held_s)
        share = (cpu_s([process]) - before_s) / (time.monotonic() - began_s)
        for sock in sockets:
            sock.close()
        began_s = time.monotonic()
        eventually(lambda: answers(server.port), "an answer")
        took_s = time.monotonic() - began_s
        assert server.frontends() == [frontend]
        leaks.check()
    row.at_most("processor while it lasts", share * 100, 20, "%")
    row.at_most("good answers again after", took_s, 1.0, "s")


@pytest.mark.row("F19", "the limit of descriptors of a running frontend is lowered under what it holds")
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit here")
@pytest.mark.timeout(400)
@pytest.mark.timing
def test_f19_a_limit_lowered_at_run_time_is_answered_by_a_successor(row: Row):
    with cluster(frontends=2) as server:
        victim = server.frontends()[0]
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(connect(server.port)) for _ in range(40)]
            began_s = time.monotonic()
            subprocess.run(
                ["prlimit", "--pid", str(victim), f"--nofile={count_fds(victim)}"], check=True, timeout=WAIT_S
            )
            # Some of these wait in the kernel from now on: no accept succeeds any more.
            sockets += [stack.enter_context(connect(server.port)) for _ in range(40)]
            eventually(lambda: victim not in server.frontends(), "a successor")
            took_s = time.monotonic() - began_s
            assert len(sockets) == 80
        eventually(lambda: len(server.frontends()) == 2, "two frontends")
        processes = [psutil.Process(pid) for pid in server.frontends()]
        eventually(lambda: all(answers(server.port) for _ in range(8)), "answers")
        before_s, began_s = cpu_s(processes), time.monotonic()
        time.sleep(pick(1.0, 5.0))
        share = (cpu_s(processes) - before_s) / (time.monotonic() - began_s)
        assert logged(server, "the limit of open files was lowered")
    row.at_most("gone after", took_s, 5.0, "s")
    row.at_most("processor of the frontends afterwards", share * 100, 20, "%")


def answers(port: int) -> bool:
    try:
        return np.array_equal(dense_rows(encode(port, MODEL, ["x"])), stub_rows(["x"], DENSE))
    except OSError:
        return False


@pytest.mark.row("F54", "nobody reads the log")
@pytest.mark.timeout(400)
@pytest.mark.timing
def test_f54_a_log_that_nobody_reads_stops_nothing(row: Row):
    """The pipe is full before the server starts, and kills of its worker make it write all the time."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sie-test-") as runtime_dir:
        process = subprocess.Popen(
            [sys.executable, "-m", "sie", "serve", "--model", f"{MODEL}=stub:dense={DENSE}", "--port", str(port),
             "--devices", "cpu:1", "--runtime-dir", runtime_dir, "--log-level", "debug", "--log-format", "json"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=writer,
        )  # fmt: skip
        try:
            eventually(lambda: answers(port), "an answer")
            took_s: list[float] = []
            for _ in range(pick(3, 30)):
                kill_workers_of(process.pid)
                began_s = time.monotonic()
                eventually(lambda: answers(port), "an answer")
                took_s.append(time.monotonic() - began_s)
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK)
            drain(reader)
            kill_workers_of(process.pid)
            eventually(lambda: answers(port), "an answer")
            said = bytearray()
            eventually(lambda: _DROPPED in said or said.extend(drain(reader)), "word of the lines that were dropped")
        finally:
            process.terminate()
            status = process.wait(WAIT_S)
            os.close(reader)
            os.close(writer)
    row.at_most("slowest answer after a worker's death", max(took_s), 2.0, "s")
    row.equals("exit status after SIGTERM", status, 0)


def kill_workers_of(supervisor: int) -> None:
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sie.workers.main" in child.cmdline():
                child.kill()
                child.wait(WAIT_S)


def drain(fd: int) -> bytes:
    parts: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(fd, 1 << 20):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.row("F55", "64 watchers of /ws/status, and a storm of scrapes")
@pytest.mark.timeout(400)
@pytest.mark.timing(forks=True)
def test_f55_watchers_and_scrapes_cost_little(row: Row):
    with cluster() as server, contextlib.ExitStack() as stack:
        watchers = [stack.enter_context(watch(server)) for _ in range(pick(16, 64))]
        processes = [psutil.Process(pid) for pid in server.frontends()]
        before_s, began_s = cpu_s(processes), time.monotonic()
        time.sleep(2.0)
        share = (cpu_s(processes) - before_s) / (time.monotonic() - began_s)
        stop = threading.Event()
        scraping = threading.Thread(target=scrape, args=(server.port, stop))
        scraping.start()
        with open_loop(server, 50, seed=SEED) as load:
            time.sleep(pick(2.0, 10.0))
        stop.set()
        scraping.join(10.0)
        assert all(watcher.recv(timeout=WAIT_S) for watcher in watchers)
    row.tell("watchers", len(watchers), "")
    row.at_most("processor for them, of one core", share * 100, 10, "%")
    row.all_right("failed requests", load.history)
    share = pick(0.8, 0.99)  # of the few requests of a short run one stall of the machine delays more than a hundredth
    row.at_most(
        "p99 (short run: p80) of requests", quantile(load.history.latencies_s(), share) * 1e3, 100, "ms", slack=15.0
    )


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def scrape(port: int, stop: threading.Event) -> None:
    while not stop.is_set():
        assert get(port, "/metrics").status == 200
