"""Whatever goes wrong with the template, it is given up once, and workers are told to start without it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sie.supervisor import worker_forks
from sie.supervisor.worker_forks import WorkerForks
from sie.supervisor.worker_template import TemplateError

WAIT_S = 60.0


class FakeTemplate:
    """A template whose word `ready` and whose end come through a pipe."""

    def __init__(self, _environment: object = None) -> None:
        self.reader, self.writer = os.pipe()
        self.is_ready = self.is_closed = False
        self.fault: Exception | None = None

    def fileno(self) -> int:
        return self.reader

    def read(self) -> bool:
        self.is_ready = os.read(self.reader, 16) == b"ready"
        return self.is_ready

    def fork(self, launch: str, num_threads: int) -> tuple[str, int]:
        if self.fault is not None:
            raise self.fault
        return launch, num_threads

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed, self.is_ready = True, False
        os.close(self.reader)

    def end(self) -> None:
        os.close(self.writer)


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTemplate]:
    made = FakeTemplate()
    monkeypatch.setattr(worker_forks, "WorkerTemplate", lambda _: made)
    yield made
    if not made.is_closed:
        made.close()


def _run(steps: Callable[[WorkerForks, asyncio.Event], Any], start_timeout_s: float = WAIT_S) -> None:
    async def run() -> None:
        settled = asyncio.Event()
        forks = WorkerForks({}, start_timeout_s, on_settled=settled.set, is_stopping=lambda: False)
        async with asyncio.timeout(WAIT_S):
            await steps(forks, settled)
        forks.close()

    asyncio.run(run())


def test_workers_are_forked_once_the_template_is_ready(template: FakeTemplate):
    async def steps(forks: WorkerForks, settled: asyncio.Event) -> None:
        assert forks.is_starting
        os.write(template.writer, b"ready")
        await settled.wait()
        assert not forks.is_starting
        assert forks.try_fork("launch", 2) == ("launch", 2)
        template.end()

    _run(steps)
    assert template.is_closed


def test_a_template_that_ends_is_given_up(template: FakeTemplate, caplog: pytest.LogCaptureFixture):
    async def steps(forks: WorkerForks, settled: asyncio.Event) -> None:
        template.end()
        await settled.wait()
        assert not forks.is_starting
        assert forks.try_fork("launch", 1) is None

    _run(steps)
    assert template.is_closed
    assert "has ended" in caplog.text


def test_a_template_that_is_not_ready_in_time_is_given_up(template: FakeTemplate):
    async def steps(forks: WorkerForks, settled: asyncio.Event) -> None:
        await settled.wait()
        assert not forks.is_starting
        assert forks.try_fork("launch", 1) is None

    _run(steps, start_timeout_s=0.0)
    template.end()
    assert template.is_closed


def test_a_template_that_does_not_fork_is_given_up(template: FakeTemplate, caplog: pytest.LogCaptureFixture):
    async def steps(forks: WorkerForks, settled: asyncio.Event) -> None:
        os.write(template.writer, b"ready")
        await settled.wait()
        template.fault = TemplateError("no process")
        assert forks.try_fork("launch", 1) is None
        assert template.is_closed
        assert forks.try_fork("launch", 1) is None

    _run(steps)
    template.end()
    assert "no process" in caplog.text


def test_a_template_that_cannot_be_started_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch):
    def fail(_environment: object) -> None:
        raise OSError("no memory")

    async def steps(forks: WorkerForks, settled: asyncio.Event) -> None:
        assert not forks.is_starting
        assert forks.try_fork("launch", 1) is None
        assert not settled.is_set()

    monkeypatch.setattr(worker_forks, "WorkerTemplate", fail)
    _run(steps)
