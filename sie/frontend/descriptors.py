"""Notices that the limit of open files was lowered on this process while it runs.

How many connections Granian takes was computed from the limit at the start (`sie.frontend.main`). Over the new one every
accept fails, and Granian tries again without pause, at the price of a core; another process would count anew.
"""

from __future__ import annotations

import os
import resource
import signal

from sie.logs import get_logger

_log = get_logger(__name__)


class DescriptorLimit:
    """The limit that this process began with; `slot_pid` is the process that ends it in good order on SIGTERM."""

    def __init__(self, slot_pid: int) -> None:
        self._slot_pid = slot_pid
        self._num_at_start = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._is_ending = False

    def check(self) -> None:
        """Raise the limit back as far as it may be raised; where that is not far enough, make room for a successor."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft >= self._num_at_start or self._is_ending:
            return
        if hard >= self._num_at_start:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._num_at_start, hard))
            return
        self._is_ending = True
        _log.error(
            "the limit of open files was lowered from %d to %d: finishing what was accepted, for a successor",
            self._num_at_start, hard,
        )  # fmt: skip
        os.kill(self._slot_pid, signal.SIGTERM)
