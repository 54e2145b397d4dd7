"""Limits frames without a message, which cost the server more than the client. Must not slow honest clients down."""

from __future__ import annotations

import time
from typing import Final

from sie.frontend.grpc.transport.frames import Code, ConnectionFault

_BURST_S: Final = 10
_PER_SENT: Final = 8
"""Frames allowed for each sent answer or part of one: window updates, and the pings by which some clients measure delay."""


class Allowance:
    """The remaining frames of one connection. Source: RFC 9113, section 10.5."""

    __slots__ = ("_left", "_num_paid", "_rate", "_since_ns", "num_sent")

    def __init__(self, rate: int) -> None:
        """Allow rate frames a second on average. The frames of ten seconds may come at once."""
        self._rate = rate
        self._left: float = _BURST_S * rate
        self._since_ns = time.monotonic_ns()
        self._num_paid = 0
        self.num_sent = 0
        """Answers, and parts of answers, that were sent to the client."""

    def spend(self) -> None:
        """Count one frame. Raises ConnectionFault if the client sends too many."""
        self._left -= 1
        if self._left >= 0:
            return
        now_ns = time.monotonic_ns()
        earned = (now_ns - self._since_ns) / 1e9 * self._rate + _PER_SENT * (self.num_sent - self._num_paid)
        self._left = min(_BURST_S * self._rate, self._left + earned)
        self._since_ns, self._num_paid = now_ns, self.num_sent
        if self._left < 0:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that bring no message")
