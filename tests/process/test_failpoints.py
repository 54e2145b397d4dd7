"""A worker killed at any point of a request's life costs no answer, and none is wrong."""

from __future__ import annotations

import pytest

from sie.runtime.failpoints import POINTS
from tests.process.harness import eventually, start_server
from tests.process.wire import total, under_load, wait_no_extents

MODEL = "stub/a=stub:dense=16,latency_ms=1"


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("worker.")])
def test_a_worker_killed_at_a_point_fails_no_request(point):
    """Each incarnation dies at its 40th pass. A kill that comes from nowhere is not held against an input."""
    with start_server(
        "--model", MODEL, "--test", "--failpoints", f"{point}=kill@40", "--restart-budget", "100"
    ) as server:
        with under_load(server, "stub/a", 16, seed=7) as load:
            eventually(lambda: total(server.port, "sie_worker_restarts_total") >= 2, "two deaths")
            load.wait_answers(10)
        wait_no_extents(server.port)
