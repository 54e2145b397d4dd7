"""Limits work without messages that costs the server more than the client. Must not slow honest clients down."""

from __future__ import annotations

import time
from typing import Final

from sie.frontend.grpc.transport.frames import Code, ConnectionFault

_BURST_S: Final = 10
_PER_SENT: Final = 8
"""Units allowed for each sent answer or part of one: for window updates, and for pings that measure delay."""
SMALL_PART_BYTES: Final = 64
"""A smaller part of a message or answer costs mainly the work for its frame."""
TINY_MESSAGE_BYTES: Final = 16
"""A smaller message of a stream cannot be a real request."""
_ENTRIES: Final = 32
_BLOCK_BYTES: Final = 2048
_SETTINGS_BYTES: Final = 64
_WINDOWS: Final = 8


def work_of_block(num_bytes: int, num_entries: int) -> int:
    """Return the units of work for a header block that was decoded. Repeated blocks are not decoded."""
    return num_bytes // _BLOCK_BYTES + num_entries // _ENTRIES


def work_of_settings(num_bytes: int, num_windows: int) -> int:
    """Return the units of work for SETTINGS that change the windows of num_windows calls."""
    return 1 + num_bytes // _SETTINGS_BYTES + num_windows // _WINDOWS


class Allowance:
    """The remaining work of one connection. A unit is the cost of a small frame. Source: RFC 9113, section 10.5.

    Time earns units, except while bytes of the client wait for their turn. Otherwise a server that reads a flood slowly,
    because it is busy, would never end it.
    """

    __slots__ = ("_is_behind", "_left", "_num_paid", "_rate", "_since_ns", "num_sent")

    def __init__(self, rate: int) -> None:
        """Allow rate units a second on average. The units of ten seconds may come at once."""
        self._rate = rate
        self._left: float = _BURST_S * rate
        self._since_ns = time.monotonic_ns()
        self._is_behind = False
        self._num_paid = 0
        self.num_sent = 0
        """Answers, and parts of answers that are not small, that were sent to the client."""

    def spend(self, num_units: int = 1) -> None:
        """Count work. Raises ConnectionFault if the client causes too much."""
        self._left -= num_units
        if self._left >= 0:
            return
        self._earn()
        if self._left < 0:
            raise ConnectionFault(
                Code.ENHANCE_YOUR_CALM, "too much work without a message (max_grpc_idle_frames_per_s)"
            )

    def set_behind(self, is_behind: bool) -> None:
        """Record whether bytes of the client wait for their turn from now on."""
        self._earn()
        self._is_behind = is_behind

    def _earn(self) -> None:
        now_ns = time.monotonic_ns()
        earned_ns = 0 if self._is_behind else now_ns - self._since_ns
        earned = earned_ns / 1e9 * self._rate + _PER_SENT * (self.num_sent - self._num_paid)
        self._left = min(_BURST_S * self._rate, self._left + earned)
        self._since_ns, self._num_paid = now_ns, self.num_sent
