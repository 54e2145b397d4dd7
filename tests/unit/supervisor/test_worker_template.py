"""Workers that a template forks are children of the process that asked, look like workers, and outlive the template."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie.supervisor import worker_template
from sie.supervisor.child import child_environment
from sie.supervisor.worker_template import TemplateError, WorkerTemplate

WAIT_S = 60.0
TEMPLATE = """
import signal, sys
from sie.workers import template
template._import_libraries = lambda: None
def main():
    if sys.argv[1] == "stay":
        signal.pause()
    return int(sys.argv[1])
template.worker.main = main
sys.exit(template.main())
"""


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerTemplate]:
    """A template without torch. Its workers end with the status that they are given, or stay."""
    monkeypatch.setattr(worker_template, "run_module", lambda _: [sys.executable, "-c", TEMPLATE])
    made = WorkerTemplate(child_environment(1))
    try:
        assert select.select([made], [], [], WAIT_S)[0]
        assert made.read()
        yield made
    finally:
        made.close()


def test_workers_are_own_children_and_outlive_the_template(template: WorkerTemplate):
    assert template.fork("75", 1).wait() == 75
    worker = template.fork("stay", 1)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" in status
    os.kill(template.pid, signal.SIGKILL)
    assert select.select([template], [], [], WAIT_S)[0]
    assert not template.read(), "its end is noticed"
    with pytest.raises(TemplateError):
        template.fork("0", 1)
    assert worker.poll() is None
    worker.send_signal(signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL
    worker.send_signal(signal.SIGKILL)  # it has ended: no other process may get this
