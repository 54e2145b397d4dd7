"""The time limit of the prepare helper, with programs in its place that report what a test wants."""

from __future__ import annotations

import asyncio
import io
import sys

import msgspec
import pytest

from sie.catalog.prepare import Failed, Report
from sie.catalog.spec import ModelSpec
from sie.config.settings import Settings
from sie.runtime.progress import Progress
from sie.supervisor import card_helper
from sie.values.errors import Internal, WireError, to_wire

SPEC = ModelSpec(id="org/model")
REPORT = msgspec.json.encode(Report(0.5, "downloading")) + b"\n"
FAILED = msgspec.json.encode(Failed(to_wire(Internal("the end"))))


def prepare(program: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the message of the failure of a helper that runs this program, with a limit of two seconds."""
    monkeypatch.setattr(card_helper, "run_module", lambda _: [sys.executable, "-SIc", program])
    models = msgspec.structs.replace(Settings().models, load_timeout_s=2.0)
    settings = msgspec.structs.replace(Settings(), models=models)
    preparer = card_helper.Preparer(settings, Progress(io.StringIO(), "json"))
    result = asyncio.run(preparer.prepare(SPEC))
    assert isinstance(result, WireError)
    return result.message


def test_a_slow_download_that_makes_progress_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = f"import os, time\nfor _ in range(16):\n os.write(1, {REPORT!r})\n time.sleep(0.2)\nos.write(1, {FAILED!r})"
    assert prepare(slow, monkeypatch) == "the end"


def test_a_download_without_progress_is_ended_and_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = f"import os, time\nos.write(1, {REPORT!r})\ntime.sleep(60)"
    message = prepare(stuck, monkeypatch)
    assert message == (
        "Model 'org/model' cannot be loaded: its download or preparation made no progress within load_timeout_s (2 s)"
    )
