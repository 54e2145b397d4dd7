"""F35: the wall clock is set; deadlines, watchdogs and uptimes follow another clock."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos.cluster import cluster
from tests.chaos.history import open_loop, quantile
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import eventually
from tests.process.watchers import first_frame
from tests.process.wire import encode

HOUR_S = 3600
STEP_S = 0.5
"""How long a clock stands, which is longer than the tick by which a watchdog would act."""


class WallClock:
    """The wall clock of one server: how far it is off is in a file that each of its processes has mapped."""

    def __init__(self, directory: Path) -> None:
        """Compile what is preloaded."""
        self._file = directory / "offset"
        self.set(0)
        library = directory / "wall_clock.so"
        source = Path(__file__).with_name("wall_clock.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
        self.env = {"LD_PRELOAD": str(library), "CHAOS_WALL_CLOCK": str(self._file)}

    def set(self, offset_s: int) -> None:
        """Let it be so many seconds before or behind the machine's, at once."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", offset_s))


@pytest.mark.row("F35", "the wall clock is set by an hour, forth and back, again and again")
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here, to put a clock before the machine's")
@pytest.mark.timing
def test_f35_a_wall_clock_that_is_set_changes_no_deadline(row: Row, tmp_path: Path):
    clock = WallClock(tmp_path)
    num_seen, offsets_s = 0, [HOUR_S, -HOUR_S, 0] * pick(2, 20)
    watchdog_s = str(pick(4, 1))
    flags = ("--request-timeout-s", "5", "--watchdog-s", watchdog_s, "--tick-timeout-s", watchdog_s, "--lazy-model", "lazy=stub:",
             "--model", "slow=stub:latency_ms=60000")  # fmt: skip
    with cluster(*flags, stub="latency_ms=20", env=clock.env) as server:
        before, began_s = sorted(server.pids()), time.monotonic()
        uptime_s = first_frame(server)["server"]["uptime_seconds"]
        with open_loop(server, 50, seed=SEED, timeout_s=5.0) as load:
            for offset_s in offsets_s:
                clock.set(offset_s)
                time.sleep(STEP_S)
                num_seen += abs(first_frame(server)["timestamp"] - time.time() - offset_s) < 60
        clock.set(-HOUR_S)
        assert encode(server.port, "lazy", ["x"]).code() == "MODEL_LOADING"
        eventually(lambda: encode(server.port, "lazy", ["x"]).status == 200, "a load after the clock was set")
        late = encode(server.port, "slow", ["x"], {"x-sie-timeout-ms": "200"})
        off_s = first_frame(server)["server"]["uptime_seconds"] - uptime_s - (time.monotonic() - began_s)
        after = sorted(server.pids())
    row.equals("times that the clock was set", len(offsets_s), pick(6, 60))
    row.equals("times that the server saw it", num_seen, len(offsets_s))
    row.all_right("failed requests", load.history)
    row.at_most("p99 of requests", quantile(load.history.latencies_s(), 0.99), 1.0, "s")
    row.equals("processes replaced", len(set(before) ^ set(after)), 0)
    row.at_most("error of the uptime that it shows", abs(off_s), 2.0, "s")
    row.equals("status of a request whose time is up", late.status, 504)
