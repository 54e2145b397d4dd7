"""Reloads the settings on SIGHUP, or keeps the old ones and reports the reason.

The read runs on a thread, because a slow disk must not stop the loop that watches the other processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from sie.config.reloadable import Plan, plan_reload
from sie.config.settings import Settings
from sie.config.sources import SettingsError
from sie.runtime.logs import get_logger
from sie.supervisor.configured_models import Models
from sie.supervisor.host_resources import StartError
from sie.supervisor.notify import SystemdReporter

_log = get_logger(__name__)


class Reading(NamedTuple):
    """Everything that a start reads."""

    settings: Settings
    models: Models


class Reloader:
    """Runs one reload at a time. A request during a reload starts another one after it."""

    def __init__(
        self, read: Callable[[], Reading], apply: Callable[[Plan, Models], tuple[str, ...]], systemd: SystemdReporter,
        lock: asyncio.Lock,
    ) -> None:  # fmt: skip
        """`read` raises SettingsError or StartError; `apply` returns descriptions of the changes it could not make.

        lock is held from before `read` until after `apply`.
        """
        self._read = read
        self._apply = apply
        self._systemd = systemd
        self._lock = lock
        self._is_due = asyncio.Event()
        self.error = ""
        """The reason why the latest reload failed; empty after a success or before the first reload."""

    def request(self) -> None:
        """Ask for a reload, as SIGHUP does."""
        self._is_due.set()

    async def run(self, running: Callable[[], Settings], on_done: Callable[[], None]) -> None:
        """Run a reload for each request, without end; running returns the settings in force."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            self._systemd.reloading(time.monotonic())
            async with self._lock:
                await self._reload(running)
            on_done()
            self._systemd.reloaded()

    async def _reload(self, running: Callable[[], Settings]) -> None:
        try:
            reading = await asyncio.to_thread(self._read)
        except (SettingsError, StartError) as error:
            self.error = str(error)
            _log.error("the settings in force stay: %s", error)  # without a traceback: the message is enough
        else:
            self.error = ""
            self._take_over(running(), reading)

    def _take_over(self, running: Settings, reading: Reading) -> None:
        plan = plan_reload(running, reading.settings)
        left = self._apply(plan, reading.models)
        _log.info("settings reloaded: %s", ", ".join(plan.changed) or "nothing changed")
        if waiting := [*plan.waiting, *left]:
            _log.warning("a restart is needed for: %s", ", ".join(waiting))
