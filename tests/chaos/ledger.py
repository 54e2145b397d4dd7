"""Keeps the figures of the chaos rows: each is compared with its demand and kept for the report.

CI runs each row short: a tenth of the faults, and times may be `SLACK` times as long, since its machines are slow and
shared. `CHAOS=long` runs the whole of it and allows no slack; `make chaos` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.chaos.history import History

IS_LONG = os.environ.get("CHAOS") == "long"
SEED = int(os.environ.get("CHAOS_SEED", "20260"))
SLACK = 1.0 if IS_LONG else 4.0
REPORT_DIR = os.environ.get("CHAOS_REPORT", "")

_T = TypeVar("_T")


def pick(short: _T, long: _T) -> _T:
    """Return what a run of this length uses."""
    return long if IS_LONG else short


def _in_short(allowed: float, limit: float) -> str:
    """Say what a short run lets pass, where that is more: a reader sees the figure beside it."""
    return "" if allowed == limit else f" (short run: {allowed:.3g})"


class Row:
    """One row of the fault table while it runs."""

    def __init__(self, row_id: str, fault: str) -> None:
        self.row_id = row_id
        self.fault = fault
        self.figures: list[dict[str, Any]] = []
        self.plots: list[dict[str, Any]] = []

    def equals(self, name: str, value: float, wanted: float, seen: str = "") -> None:
        """Assert a figure that has only one right value; seen tells more of another one."""
        self._note(name, value, f"= {wanted:g}", "", value == wanted, seen)

    def all_right(self, name: str, *histories: History) -> None:
        """Assert that each request of these loads was answered rightly; say how the others ended, if not."""
        failed = [ask for history in histories for ask in history.failed()]
        self._note(name, len(failed), "= 0", "", not failed, "; ".join(history.failures() for history in histories))

    def at_most(self, name: str, value: float, limit: float, unit: str, slack: float = SLACK) -> None:
        """Assert a figure that must not be over its limit; slack is what CI allows."""
        allowed = limit * pick(slack, 1.0)
        self._note(name, value, f"<= {limit:g} {unit}{_in_short(allowed, limit)}", unit, value <= allowed)

    def at_least(self, name: str, value: float, limit: float, unit: str, slack: float = 1.0) -> None:
        """Assert a figure that must not be under its limit; slack is what CI allows."""
        allowed = limit / pick(slack, 1.0)
        self._note(name, value, f">= {limit:g} {unit}{_in_short(allowed, limit)}", unit, value >= allowed)

    def tell(self, name: str, value: float, unit: str) -> None:
        """Keep a figure of which nothing is demanded."""
        self._note(name, value, "", unit, is_met=True)

    def plot(self, title: str, points: list[tuple[float, float]], marks: list[float], axes: tuple[str, str]) -> None:
        """Keep points (x, y) and the times of faults for the report."""
        self.plots.append({"title": title, "points": points, "marks": marks, "axes": axes})

    def _note(self, name: str, value: float, demand: str, unit: str, is_met: bool, seen: str = "") -> None:
        """Keep a figure; fail if its demand is not met, with what was seen of it."""
        figure = {"name": name, "value": value, "unit": unit, "demand": demand, "is_met": is_met}
        self.figures.append(figure)
        print(f"{self.row_id} {name}: {value:g} {unit} {f'(demanded {demand})' if demand else ''}")
        assert is_met, f"{self.row_id} {name}: {value:g} {unit}, demanded {demand}{seen and f': {seen}'}"

    def save(self, outcome: str, reason: str, took_s: float) -> None:
        """Write what is known to the report's folder, if there is to be one."""
        if not REPORT_DIR:
            return
        folder = Path(REPORT_DIR)
        folder.mkdir(parents=True, exist_ok=True)
        entry = {
            "row": self.row_id, "fault": self.fault, "outcome": outcome, "reason": reason, "took_s": took_s,
            "figures": self.figures, "plots": self.plots,
        }  # fmt: skip
        with (folder / "rows.jsonl").open("a") as out:
            out.write(json.dumps(entry) + "\n")
