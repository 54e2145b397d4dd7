"""Builds the status frames of one frontend process, and holds their senders. A frame is built only while somebody watches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from sie.config.settings import Settings
from sie.frontend.access.gate import Access
from sie.frontend.models.model_table import ModelTable
from sie.frontend.telemetry.metrics import count_watchers, merge
from sie.frontend.telemetry.status_frame import StatusInputs, add_history, build_status, encode_frame, server_facts
from sie.frontend.telemetry.status_hub import StatusHub
from sie.ipc.messages import HISTORY_POINTS, Launch, LoadPoint
from sie.shm.pages import CounterPage
from sie.values.errors import SieError

_CLUSTER_FRAME_S: Final = 1.0


class ProcessStatus:
    """The status of one frontend process and of its server, for `/ws/status` and `/ws/cluster-status`."""

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        pages: list[CounterPage],
        models: ModelTable,
        *,
        access: Access | None,
        is_draining: Callable[[], bool],
        check_open: Callable[[], None],
        publish_watchers: Callable[[int], None],
        cluster_frame: Callable[[], str] | None = None,
    ) -> None:
        """check_open raises SieError while the process takes no more requests; cluster_frame as for `cluster_hub`."""
        self._max_watchers = settings.status.max_watchers
        self._facts = server_facts(settings, launch)
        self._started_s = launch.started_s
        self._pages = pages
        self._models = models
        self._access = access
        self._is_draining = is_draining
        self._check_open = check_open
        self._publish_watchers = publish_watchers
        self._history: deque[LoadPoint] = deque(maxlen=HISTORY_POINTS)
        self.hub = self._make_hub(self._frame, settings.status.interval_ms / 1e3, self._with_history)
        """The sender of this server's frames."""
        self.cluster_hub = self._make_hub(cluster_frame, _CLUSTER_FRAME_S) if cluster_frame is not None else None
        """The sender of frames about all hosts, of a process without workers."""

    @property
    def is_ready(self) -> bool:
        """Whether `/readyz` is green."""
        return self._models.is_ready and not self._is_draining()

    @property
    def uptime_s(self) -> float:
        """Seconds since the server started, on a monotonic clock."""
        return time.monotonic() - self._started_s

    def extend_history(self, points: Iterable[LoadPoint]) -> None:
        """Add points, oldest first, to the history that each watcher gets with its first frame."""
        self._history.extend(points)

    def close(self) -> None:
        """End the connections of all watchers."""
        for hub in filter(None, (self.hub, self.cluster_hub)):
            hub.close()

    def _make_hub(
        self, frame: Callable[[], str], interval_s: float, first: Callable[[str], str] | None = None
    ) -> StatusHub:
        return StatusHub(
            frame,
            first=first,
            interval_s=interval_s,
            max_watchers=self._max_watchers,
            watchers_on_host=self._count_watchers,
            publish_watchers=self._publish_watchers,
        )

    def _frame(self) -> str:
        models = self._models
        inputs = StatusInputs(
            server=self._facts,
            uptime_s=self.uptime_s,
            ready=self.is_ready,
            models=tuple(models.entries.values()),
            workers=models.workers,
            metrics=merge(self._pages),
            saturated=self._is_saturated(),
            reason="draining" if self._is_draining() else models.reason,
            keys_error=self._access.problem if self._access is not None else "",
            config_error=models.config_error,
            tls_error=models.tls_error,
        )
        return encode_frame(build_status(inputs, time.time()))

    def _with_history(self, frame: str) -> str:
        return add_history(frame, self._history)

    def _is_saturated(self) -> bool:
        try:
            self._check_open()
        except SieError:
            return True
        return False

    def _count_watchers(self) -> int:
        return count_watchers(self._pages)
