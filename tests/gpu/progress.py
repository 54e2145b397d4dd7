"""A pytest plugin that writes a line of JSON for each test as it ends, to the file that TEST_PROGRESS names.

So what has run is known even if the run is killed, and need not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu.stages import NOT_RUN


class Lines:
    """Writes the lines; one process of a run has it, the others report to that one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.passed else _reason(report)
            is_left_out = report.skipped and text.startswith(f"{NOT_RUN}: ")
            line = {
                "test": report.nodeid,
                "outcome": NOT_RUN if is_left_out else report.outcome,
                "seconds": round(report.duration, 2),
                "text": text.removeprefix(f"{NOT_RUN}: "),
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            line = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "text": str(report.longrepr)[-2000:]}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """Return the end of a failure, or why a test was skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext[-2000:]


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("TEST_PROGRESS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(Path(path)), "progress-lines")
