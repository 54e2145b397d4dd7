"""The supervisor's tick: the status line and the watchdog's food agree on who answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sie.supervisor import server
from sie.supervisor.server import Supervisor

HANGS_AFTER_S = 5.0


class Reporter:
    """Notes what a service manager is told, and stops the ticks when that is enough."""

    grace_s = 0.0

    def __init__(self) -> None:
        self.told: list[str] = []

    def set_status(self, status: str) -> None:
        self.told.append(status)

    def feed_watchdog(self, _now_s: float) -> None:
        self.told.append("fed")


def supervisor(reporter: Reporter, hung: Callable[[float, float], list[str]]) -> Any:
    """Return as much of a supervisor as a tick uses, whose frontend does not answer from some time on."""

    def nothing(*_: Any) -> None:
        return None

    quiet = SimpleNamespace(tick=nothing, start=nothing)
    made = SimpleNamespace(
        _watchdog=SimpleNamespace(start=nothing, tick=nothing, hung=hung), _systemd=reporter, _history=quiet, _loads=quiet, _adapters=quiet,
        _children=SimpleNamespace(
            oom_kills=quiet, pages=None, workers=[], agents=[], frontends=[SimpleNamespace(state="ready")], send_all=nothing
        ),
        _settings=SimpleNamespace(supervisor=SimpleNamespace(tick_timeout_s=2.0)), _listener=SimpleNamespace(url="x"),
        _state=SimpleNamespace(reason=str, was_ready=True, num_loaded=1, tls_error=""), _key_file=None,
        _registry=SimpleNamespace(left_out=list), _reloader=SimpleNamespace(error=""),
    )  # fmt: skip
    made._status = lambda *now: Supervisor._status(made, *now)
    return made


@pytest.mark.parametrize("pause_s", [0.01, 0.3, 2.0])
def test_the_watchdog_is_not_fed_for_a_process_that_is_said_not_to_answer(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """However long the supervisor stands still within a tick: here for pause_s at each look at the clock."""
    now_s = 0.0

    def look() -> float:
        nonlocal now_s
        now_s += pause_s
        return now_s

    async def end_soon(_delay_s: float) -> None:
        if now_s > 2 * HANGS_AFTER_S:
            raise asyncio.CancelledError

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=look))
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=end_soon))
    reporter = Reporter()
    made = supervisor(reporter, lambda asked_s, _grace_s: ["frontend-0"] if asked_s > HANGS_AFTER_S else [])
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Supervisor._tick_forever(made))
    said = [number for number, text in enumerate(reporter.told) if "not answering: frontend-0" in text]
    assert said
    assert "fed" in reporter.told
    assert "fed" not in reporter.told[said[0] :]
