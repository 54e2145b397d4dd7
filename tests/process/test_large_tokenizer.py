"""A load that stops all of a worker's threads, as reading a large tokenizer does, is told apart from a hang."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from tests.process.harness import eventually, start_server
from tests.process.test_comparisons import save_m3
from tests.process.wire import dense_rows, encode, stub_rows, total

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
        eventually(lambda: encode(server.port, "m3", ["w1"]).status == 200, "the load", 100.0)
        assert time.monotonic() - began_s > HELD_S
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", ["x"])), stub_rows(["x"], 16))
        assert server.worker() == worker
        assert total(server.port, "sie_worker_restarts_total") == 0
        assert not any("hangs" in line for line in server.output.lines)
