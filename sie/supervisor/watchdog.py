"""Kills processes that hang or do not start in time, and tells the frontends which workers are late."""

from __future__ import annotations

import signal

from sie.config import sections
from sie.runtime.logs import get_logger
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.hang_detector import HangDetector

_log = get_logger(__name__)


class Watchdog:
    """Applies the verdicts of a `HangDetector` to the children of one server."""

    def __init__(self, settings: sections.Supervisor, children: Children) -> None:
        self._settings = settings
        self._children = children
        self.hangs = HangDetector(settings.watchdog_s)

    def reconfigure(self, settings: sections.Supervisor) -> None:
        """Apply reloaded settings."""
        self._settings = settings
        self.hangs.watchdog_s = settings.watchdog_s

    def start(self, now_s: float) -> None:
        """Note when the ticks begin: the first interval can be late, too."""
        self.hangs.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Check every process."""
        late_s = self.hangs.tick(now_s)
        if not self._children.is_stopping:  # workers were told to end, and are killed soon
            for worker in self._children.workers:
                self._check_worker(worker, now_s, late_s)
        for child in (*self._children.frontends, *self._children.agents):
            self._check_answers(child, now_s, late_s)

    def hung(self, now_s: float, grace_s: float) -> list[str]:
        """Return the names of ready processes whose loop does not run, including those to be killed within grace_s."""
        timeout_s = self._settings.tick_timeout_s
        patience_s = timeout_s - min(grace_s, timeout_s / 2)
        workers = [child for child in self._children.workers if self.hangs.is_hung(child.slot, grace_s)]
        frontends = [child for child in self._children.frontends if now_s - child.pong_s > patience_s]
        return [child.name for child in (*workers, *frontends) if child.state == "ready"]

    def _check_worker(self, worker: Child, now_s: float, late_s: float) -> None:
        if worker.state == "starting":
            self._check_start(worker, now_s)
            return
        if worker.state != "ready":
            return
        attachments = self._children.attachments
        verdict = self.hangs.judge_worker(worker.slot, attachments.running(worker), now_s, late_s)
        is_late = self.hangs.is_late(worker.slot)
        if is_late:
            self.hangs.note_run_state(worker.slot, *worker.run_state(), now_s)
        if is_late != worker.is_late:
            text = "%s is late: other workers get its requests, too" if is_late else "%s is no longer late"
            _log.warning(text, worker.name)
        attachments.set_late(worker, is_late=is_late)
        if verdict == "abort":
            _log.error("%s hangs: its step exceeds its allowance by watchdog_s; aborting it", worker.name)
            worker.signal(signal.SIGABRT)
        elif verdict == "kill":
            worker.kill()

    def _check_answers(self, child: Child, now_s: float, late_s: float) -> None:
        """Kill a frontend or agent process that does not answer pings."""
        if child.state == "starting":
            self._check_start(child, now_s)
        elif child.state == "ready":
            child.pong_s += late_s
            if now_s - child.pong_s > self._settings.tick_timeout_s and not self._children.is_draining:
                _log.error("%s did not answer for tick_timeout_s; killing it", child.name)
                child.kill()

    def _check_start(self, child: Child, now_s: float) -> None:
        if now_s - child.started_s > self._settings.start_timeout_s:
            _log.error("%s did not start within start_timeout_s; killing it", child.name)
            child.kill_as_faulty()
