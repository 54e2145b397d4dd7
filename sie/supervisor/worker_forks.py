"""Forks workers from the template as long as that works. Without it, workers are started and import for themselves.

The template is given up when it cannot be started, is not ready in time, ends, or does not fork. It is never started
again (decisions/086).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from sie.runtime.logs import get_logger
from sie.supervisor.worker_template import Forked, TemplateError, WorkerTemplate

_log = get_logger(__name__)


class WorkerForks:
    """The template of one server while it is of use. Everything runs on the event loop."""

    def __init__(
        self,
        environment: Mapping[str, str],
        start_timeout_s: float,
        *,
        on_settled: Callable[[], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Start the template; environment is that of a worker with one thread.

        on_settled is called when the template is ready, and when it is given up later than here. is_stopping tells
        whether its end is expected.
        """
        self._on_settled = on_settled
        self._is_stopping = is_stopping
        self._loop = asyncio.get_running_loop()
        self._template: WorkerTemplate | None = None
        try:
            self._template = WorkerTemplate(environment)
        except OSError as error:
            _log.warning("the template of the workers cannot be started: %s", error)
            return
        self._loop.add_reader(self._template.fileno(), self._on_readable)
        self._loop.call_later(start_timeout_s, self._on_late)

    @property
    def is_starting(self) -> bool:
        """Whether the template may still become ready. Workers wait for it until then."""
        return self._template is not None and not self._template.is_ready

    def try_fork(self, launch: str, num_threads: int) -> Forked | None:
        """Return a forked worker. Without a template, or if it cannot fork, return None."""
        if self._template is None:
            return None
        try:
            return self._template.fork(launch, num_threads)
        except TemplateError as error:
            _log.warning("the template of the workers did not fork (%s); they import for themselves from now on", error)
            self.close()
            return None

    def close(self) -> None:
        """End the template. Its workers run on."""
        if self._template is not None:
            self._loop.remove_reader(self._template.fileno())
            self._template.close()
            self._template = None

    def _on_readable(self) -> None:
        if self._template is not None and not self._template.read():
            if not self._is_stopping():
                _log.warning("the template of the workers has ended; they import for themselves from now on")
            self.close()
        self._on_settled()

    def _on_late(self) -> None:
        if self.is_starting:
            _log.warning("the template of the workers was not ready within start_timeout_s; they import for themselves")
            self.close()
            self._on_settled()
