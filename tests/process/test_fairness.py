"""Models of one worker under more work than it can do: each gets its share of the time, and none waits long."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.wire import Client, total, wait_no_extents

TEXT = "x" * 32  # eight tokens of a stub
NUM_ITEMS = {"encode": 128, "score": 64, "extract": 16}
"""The cheaper, the more at a time: clients that a busy machine starves must not let a queue run empty."""
BODIES: dict[str, dict[str, Any]] = {
    "encode": {"items": [{"text": TEXT}] * NUM_ITEMS["encode"]},
    "score": {"query": {"text": ""}, "items": [{"text": TEXT}] * NUM_ITEMS["score"]},
    "extract": {"items": [{"text": TEXT}] * NUM_ITEMS["extract"]},
}
COSTS_US = {"encode": 20, "score": 150, "extract": 600}
"""What a token of each model takes: thirty times as long for one as for another."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return a server of one worker whose steps have at most 64 tokens, and of one model for each operation."""
    with start_server(
        "--model", f"stub/encode=stub:dense=16,per_token_us={COSTS_US['encode']}",
        "--model", f"stub/score=stub:score,per_token_us={COSTS_US['score']}",
        "--model", f"stub/extract=stub:extract,per_token_us={COSTS_US['extract']}",
        "--max-step-tokens", "64",
        "--frontends", "1",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


class Flood:
    """Clients that ask one model without pause."""

    def __init__(self, server: Server, operation: str, num_clients: int, num_items: int | None = None) -> None:
        self.failures: list[str] = []
        self.waits_s: list[float] = []
        self._stop = threading.Event()
        body = {**BODIES[operation], "items": BODIES[operation]["items"][:num_items]}
        arguments = (server.port, f"/v1/{operation}/stub/{operation}", json.dumps(body).encode())
        self._threads = [threading.Thread(target=self._run, args=arguments) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self, port: int, path: str, body: bytes) -> None:
        with Client(port) as client:
            while not self._stop.is_set():
                began_s = time.monotonic()
                response = client.request("POST", path, body, {"content-type": "application/json"})
                self.waits_s.append(time.monotonic() - began_s)
                if response.status != 200:
                    self.failures.append(f"{response.status} {response.body[:200]!r}")
                    return


@contextlib.contextmanager
def flooded(server: Server, floods: dict[str, int]) -> Iterator[dict[str, Flood]]:
    """Keep each operation's model busy with so many clients; yield once all of them have answers."""
    running = {operation: Flood(server, operation, num_clients) for operation, num_clients in floods.items()}
    try:
        eventually(lambda: all(flood.waits_s or flood.failures for flood in running.values()), "all have answers")
        yield running
    finally:
        for flood in running.values():
            flood.end()
    for operation, flood in running.items():
        assert not flood.failures, (operation, flood.failures)


def shares(server: Server, operations: Sequence[str], while_s: float) -> dict[str, float]:
    """Return each model's share of the time that the worker computed in, over a period."""

    def busy() -> dict[str, float]:
        name = "sie_model_busy_seconds_total"
        return {operation: total(server.port, name, model=f"stub/{operation}") for operation in operations}

    before = busy()
    eventually(lambda: sum(busy().values()) - sum(before.values()) > while_s, "the worker computed")
    spent = {operation: value - before[operation] for operation, value in busy().items()}
    return {operation: value / sum(spent.values()) for operation, value in spent.items()}


@pytest.mark.timing(forks=True)
def test_models_that_all_have_too_much_to_do_get_the_same_time(server: Server) -> None:
    with flooded(server, {"encode": 6, "score": 6, "extract": 6}):
        found = shares(server, list(COSTS_US), 1.5)
    assert found == {operation: pytest.approx(1 / 3, abs=0.15) for operation in COSTS_US}, found


@pytest.mark.parametrize("busy", list(COSTS_US))
@pytest.mark.timing(forks=True)
def test_a_flood_of_one_model_delays_a_lone_request_of_another_by_a_step(server: Server, busy: str) -> None:
    """A lone request waits for the step that runs, not for what waits: at most 64 tokens, and its own 8."""
    others = [operation for operation in COSTS_US if operation != busy]
    with flooded(server, {busy: 16}) as floods:
        queue = f"stub/{busy}"
        eventually(lambda: total(server.port, "sie_queue_depth", model=queue) > 100, "the queue is long")
        lone = {operation: Flood(server, operation, 1, num_items=1) for operation in others}
        eventually(lambda: all(len(flood.waits_s) >= 10 for flood in lone.values()), "ten answers each")
        for flood in lone.values():
            flood.end()
        # Clients that stood still together let a queue run empty; they fill it again.
        eventually(lambda: total(server.port, "sie_queue_depth", model=queue) > 100, "it is busy to the end")
        num_before = len(floods[busy].waits_s)
        eventually(lambda: len(floods[busy].waits_s) > num_before, "and it goes on itself")
    for operation, flood in lone.items():
        assert not flood.failures, (operation, flood.failures)
        typical_s = sorted(flood.waits_s)[len(flood.waits_s) // 2]
        steps_s = (64 * COSTS_US[busy] + 8 * sum(COSTS_US[other] for other in others)) / 1e6
        queued_s = sorted(floods[busy].waits_s)[len(floods[busy].waits_s) // 2]  # as busy as the machine was
        allowed_s = max(2 * steps_s + 0.05, queued_s / 2)
        assert typical_s < allowed_s, f"{operation}: {typical_s:.3f} s where a round of steps is {steps_s:.3f}"
