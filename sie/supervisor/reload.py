"""Owns what SIGHUP does: reads the settings again and takes them over, or keeps the old ones and says why.

Reading happens on a thread: a slow disk must not stop the loop that watches the other processes.
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
from sie.supervisor.host_resources import StartError
from sie.supervisor.loads import Models
from sie.supervisor.notify import Herald

_log = get_logger(__name__)


class Reading(NamedTuple):
    """Everything that a start reads."""

    settings: Settings
    models: Models


class Reloader:
    """Runs one reload at a time; a request during one is followed by another."""

    def __init__(
        self, read: Callable[[], Reading], apply: Callable[[Plan, Models], tuple[str, ...]], herald: Herald
    ) -> None:
        """Read raises SettingsError or StartError; apply returns what it could not take over, in words."""
        self._read = read
        self._apply = apply
        self._herald = herald
        self._is_due = asyncio.Event()
        self.error = ""
        """Why the latest reload changed nothing; empty when it was taken over, or there was none."""

    def request(self) -> None:
        """Ask for a reload: what SIGHUP does."""
        self._is_due.set()

    async def run(self, running: Callable[[], Settings], on_done: Callable[[], None]) -> None:
        """Reload whenever it is asked for, for ever; running returns the settings in force."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            self._herald.reloading(time.monotonic())
            try:
                reading = await asyncio.to_thread(self._read)
            except (SettingsError, StartError) as error:
                self.error = str(error)
                _log.error("the settings in force stay: %s", error)  # the message is the whole story
            else:
                self.error = ""
                self._take_over(running(), reading)
            on_done()
            self._herald.reloaded()

    def _take_over(self, running: Settings, reading: Reading) -> None:
        plan = plan_reload(running, reading.settings)
        left = self._apply(plan, reading.models)
        _log.info("settings reloaded: %s", ", ".join(plan.changed) or "nothing changed")
        if waiting := [*plan.waiting, *left]:
            _log.warning("a restart is needed for: %s", ", ".join(waiting))
