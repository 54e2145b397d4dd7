"""Runs the lives of a state machine, and asserts that they came to all that its test is about."""

from __future__ import annotations

from collections import Counter
from typing import Final

from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_reached: Counter[str] = Counter()
_MOST_RUNS: Final = 8


def note(name: str, count: int = 1) -> None:
    """Count what a life came to."""
    event(name)
    _reached[name] += count


def live(machine: type[RuleBasedStateMachine], *wanted: str, lives: int, steps: int, times: int = 1) -> None:
    """Run so many lives of so many steps. A run that rarely comes to what is wanted proves little of it: then there is another one.

    times: how often the lives have to come to each.
    """
    _reached.clear()
    # Each run has other lives, also where hypothesis finds that it runs in CI.
    options = settings(max_examples=lives, stateful_step_count=steps, deadline=None, derandomize=False)
    for _ in range(_MOST_RUNS):
        run_state_machine_as_test(machine, settings=options)
        if all(_reached[name] >= times for name in wanted):
            return
    rare = {name: _reached[name] for name in wanted if _reached[name] < times}
    raise AssertionError(f"{machine.__name__} rarely came to {rare} in {_MOST_RUNS} runs")
