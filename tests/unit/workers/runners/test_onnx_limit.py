"""When a run of an ONNX model that does not end is ended."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from sie.workers.runners import onnx
from sie.workers.runners.onnx import OnnxRunner, RunLimit

S = 1_000_000_000
EVERY_S = 0.125


class Clock:
    """A clock by which each sleep may last longer than it should: the process is stopped meanwhile."""

    def __init__(self, sleeps_s: list[float]) -> None:
        self.now_ns = 0
        self._sleeps_s = iter(sleeps_s)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, _seconds: float) -> None:
        seconds = next(self._sleeps_s, None)
        if seconds is None:
            raise StopIteration
        self.now_ns += int(seconds * S)


def is_ended(monkeypatch: pytest.MonkeyPatch, sleeps_s: list[float]) -> bool:
    """Return whether a run that began at 0 is ended, after its process has slept so."""
    clock, options = Clock(sleeps_s), SimpleNamespace(terminate=False)
    runner: Any = OnnxRunner.__new__(OnnxRunner)
    runner._running, runner._stood, runner._run_limit = (0, options), (None, 0), RunLimit(1.0)
    monkeypatch.setattr(onnx, "time", clock)
    with pytest.raises(StopIteration):
        onnx._end_long_runs(weakref.ref(runner), EVERY_S)
    return options.terminate


@pytest.mark.parametrize(
    ("sleeps_s", "expected"),
    [
        ([EVERY_S] * 7, False),
        ([EVERY_S] * 10, True),
        ([EVERY_S, 60.0, EVERY_S], False),  # stopped by a signal for a minute
        ([EVERY_S, 60.0, 60.0, *[EVERY_S] * 4], False),
        ([EVERY_S, 60.0, *[EVERY_S] * 9], True),
    ],
)
def test_time_in_which_the_process_stood_does_not_count(
    monkeypatch: pytest.MonkeyPatch, sleeps_s: list[float], expected: bool
):
    assert is_ended(monkeypatch, sleeps_s) is expected
