"""Abandons the work of a gRPC call that is cancelled. Knows no service."""

from __future__ import annotations

from sie.frontend.engine.worker_link import Pending
from sie.frontend.process import FrontendProcess
from sie.values.errors import ClientGone


class Watched:
    """The submitted work of one request. It is abandoned when its call is cancelled, for example by the client."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._work: list[Pending] = []
        self.watch = self._work.append
        """Record work that was submitted to a worker."""

    def give_up(self) -> None:
        """Tell the workers not to run the work."""
        for pending in self._work:
            self._process.engine.abandon(pending, ClientGone("the client left before its answer was there"))
