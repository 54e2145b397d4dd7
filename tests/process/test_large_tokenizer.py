"""Large tokenizers: others are served while one is read, and a load that stops all threads is told apart from a hang."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sie import native
from tests import generation_models
from tests.large_tokenizer import save_large
from tests.process.harness import Server, eventually, start_server
from tests.process.test_comparisons import save_m3
from tests.process.wire import dense_rows, encode, post_json, stub_rows, total

WATCHDOG_S = 2
HELD_S = 5
SIZE_MIB = 24
"""A second is allowed for each MiB, so a busy host may take as long again, and again, for what comes after the hold."""


def test_a_load_that_holds_the_interpreter_lock_kills_no_worker(tmp_path: Path):
    tokenizer = save_m3(tmp_path / "m3") / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().ljust(SIZE_MIB << 20))
    with start_server(
        "--model", "stub/a=stub:dense=16", "--lazy-model", f"m3={tokenizer.parent}", "--dtype", "float32",
        "--watchdog-s", str(WATCHDOG_S), "--test", "--failpoints", f"load.tokenizer=hold:{HELD_S * 1000}@1",
    ) as server:  # fmt: skip
        worker, began_s = server.worker(), time.monotonic()
        eventually(lambda: encode(server.port, "m3", ["w1"]).status == 200, "the load")
        assert time.monotonic() - began_s > HELD_S
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", ["x"])), stub_rows(["x"], 16))
        assert server.worker() == worker
        assert total(server.port, "sie_worker_restarts_total") == 0
        assert not any("hangs" in line for line in server.output.lines)


P99_S = 0.1


def embed_until(server: Server, is_over: threading.Event) -> list[float]:
    """Embed a text every 20 ms and return each one's latency, from the time at which it was due."""
    latencies_s: list[float] = []
    due_s = time.monotonic()
    while not is_over.is_set():
        due_s += 0.02
        time.sleep(max(0.0, due_s - time.monotonic()))
        assert encode(server.port, "stub/a", ["x"]).status == 200
        latencies_s.append(time.monotonic() - due_s)
    return latencies_s


def times_of(server: Server) -> np.ndarray:
    """Return for the frontend, the worker and this client how long all threads have run, and waited for a core, in ns."""
    pids = (*server.frontends(), server.worker(), os.getpid())
    threads = [[*Path(f"/proc/{pid}/task").glob("*/schedstat")] for pid in pids]
    return np.array([np.sum([read(one) for one in each], axis=0) for each in threads])


def read(schedstat: Path) -> list[int]:
    return [int(word) for word in schedstat.read_text().split()[:2]]


def complete(server: Server, model: str) -> None:
    body = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}
    eventually(lambda: post_json(server.port, "/v1/completions", body).status == 200, f"an answer of {model}")


@pytest.mark.timing
@pytest.mark.skipif(native.load() is None, reason="the compiled library is not built")
def test_others_are_served_while_a_tokenizer_and_a_grammars_vocabulary_of_262144_tokens_are_read(tmp_path: Path):
    small, large = (generation_models.save(tmp_path / name, "llama") for name in ("small", "large"))
    save_large(small / "tokenizer.json", num_chars=4)
    save_large(large / "tokenizer.json")
    with start_server(
        "--model", "stub/a=stub:dense=16", "--model", f"small={small}", "--lazy-model", f"large={large}",
        "--frontends", "1", "--devices", "cpu:1", "--dtype", "float32",
    ) as server:  # fmt: skip
        # What is imported for the first of its kind is not what this test is about.
        complete(server, "small")
        is_over = threading.Event()

        def load() -> None:
            try:
                complete(server, "large")
            finally:
                is_over.set()

        loader = threading.Thread(target=load)
        before = times_of(server)
        loader.start()
        latencies_s = sorted(embed_until(server, is_over))
        loader.join()
        # Other programs run on this machine, too: the time in which a thread waits for a core comes on top.
        most_s = P99_S * max(1 + waited_ns / max(1, ran_ns) for ran_ns, waited_ns in times_of(server) - before)
        assert latencies_s[int(len(latencies_s) * 0.99)] < most_s, (most_s, latencies_s[-20:])
