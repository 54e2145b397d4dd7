"""Records what a load saw, and checks it: one outcome for each request, the right answer, none too late."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.ledger import pick
from tests.process.harness import WAIT_S, Server, is_timed

_CLIENT = Path(__file__).with_name("client.py")
_LATE_S = pick(5.0, 1.0)
_TIMEOUT_S = 20.0
_UNTIMED_S = 90.0
"""The deadline of requests where no time is measured: a server at idle priority may stand still for half a minute."""

_MOST_TOLD = 5


class Ask(NamedTuple):
    """One request: when it was due, sent and over on the monotonic clock, how, and which frontend it was given to.

    sent_s is 0 if it never was. outcome is `right`, `wrong`, a status with its code (`503 QUEUE_FULL`), `closed`, `refused: ...` or `none`.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    outcome: str
    instance: str
    retry_after_s: int

    @property
    def took_s(self) -> float:
        """Time from when it was due: a stall of ours or of the server's counts for each request that it held up."""
        return self.ended_s - self.due_s


class Probe(NamedTuple):
    """One question to the control plane; status 0 is no answer."""

    path: str
    due_s: float
    ended_s: float
    status: int


class History:
    """Everything one load saw."""

    def __init__(self, raw: dict[str, Any], latest_s: float) -> None:
        self.asks = [Ask(*row) for row in raw["asks"]]
        self.probes = [Probe(*row) for row in raw["probes"]]
        self._num_unasked: int = raw["num_unasked"]
        self._latest_s = latest_s

    def outcomes(self) -> Counter[str]:
        """Count the requests by outcome."""
        return Counter(ask.outcome for ask in self.asks)

    def failed(self) -> list[Ask]:
        """Return the requests that were not answered rightly."""
        return [ask for ask in self.asks if ask.outcome != "right"]

    def failures(self) -> str:
        """Tell how the requests that were not answered rightly ended, and of the first ones when and at which frontend."""
        failed, began_s = self.failed(), self.asks[0].due_s
        kinds = ", ".join(f"{count} x {outcome}" for outcome, count in Counter(ask.outcome for ask in failed).items())
        first = ", ".join(
            f"request {ask.index} at {ask.due_s - began_s:.2f} s for {ask.took_s:.2f} s ({ask.outcome}; {ask.instance or 'no'} frontend)"
            for ask in failed[:_MOST_TOLD]
        )
        return (
            f"of {len(self.asks)} requests {kinds}; first {first}" if failed else f"none of {len(self.asks)} requests"
        )

    def latencies_s(self, asks: Iterable[Ask] | None = None) -> list[float]:
        """Return how long right answers took, ascending."""
        return sorted(ask.took_s for ask in (self.asks if asks is None else asks) if ask.outcome == "right")

    def check(self) -> None:
        """Assert what holds whatever happened to the server."""
        outcomes = self.outcomes()
        assert self.asks, "the load asked nothing"
        assert not outcomes["wrong"], f"{outcomes['wrong']} wrong answers: {outcomes}"
        assert not outcomes["none"], f"{outcomes['none']} requests without an outcome: {outcomes}"
        assert not self._num_unasked, f"{self._num_unasked} responses that nobody asked for"
        latest_s = max(ask.took_s for ask in self.asks)
        assert latest_s <= self._latest_s, f"an outcome after {latest_s:.2f} s"


class Load:
    """A load that runs; its history is there after its end."""

    def __init__(self, process: subprocess.Popen[str], latest_s: float) -> None:
        self._process = process
        self._latest_s = latest_s
        self._history: History | None = None

    @property
    def history(self) -> History:
        assert self._history is not None, "the load still runs"
        return self._history

    def end(self) -> History:
        """Let it finish what is on its way, and return what it saw, checked."""
        if self._history is None:
            out, _ = self._process.communicate(timeout=self._latest_s + 20.0)
            self._history = History(json.loads(out), self._latest_s)
        return self._history


@contextlib.contextmanager
def open_loop(
    server: Server,
    rate: float,
    *,
    seed: int,
    model: str = "stub/a",
    dense: int = 16,
    timeout_s: float | None = None,
    max_items: int = 3,
    num_chars: int = 40,
    min_connections: int = 16,
    max_connections: int = 512,
    probes: bool = True,
) -> Iterator[Load]:
    """Yield a load of `rate` requests a second; at the end take its history and check it.

    Each request has 1 to max_items texts of num_chars characters, and timeout_s as its deadline, or one that suits
    the test. min_connections are open all the time, and take turns, so that each frontend has some.
    """
    timeout_s = timeout_s or (_TIMEOUT_S if is_timed() else _UNTIMED_S)
    late_s = _LATE_S if is_timed() else WAIT_S
    config = {
        "port": server.port, "rate": rate, "seed": seed, "model": model, "dense": dense, "timeout_s": timeout_s,
        "late_s": late_s, "max_items": max_items, "num_chars": num_chars, "min_connections": min_connections,
        "max_connections": max_connections, "probes": probes,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(_CLIENT), json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        load = Load(process, timeout_s + late_s)
        yield load
        load.end().check()
    finally:
        process.kill()
        process.wait(WAIT_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def quantile(ascending: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; NaN when there are none."""
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)] if ascending else math.nan
