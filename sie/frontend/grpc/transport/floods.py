"""Owns how many frames that bring no message a client may send: each costs us more than it costs him."""

from __future__ import annotations

import time
from typing import Final

from sie.frontend.grpc.transport.frames import Code, ConnectionFault

_BURST_S: Final = 10
_PER_SENT: Final = 8
"""Frames that an answer, or a part of one, may bring: room for more, and some clients measure the way with a ping for each."""


class Allowance:
    """What one connection has left. Source: RFC 9113, section 10.5."""

    __slots__ = ("_left", "_num_paid", "_rate", "_since_ns", "num_sent")

    def __init__(self, rate: int) -> None:
        """Rate: frames a second, on average; ten seconds of them may come at once."""
        self._rate = rate
        self._left: float = _BURST_S * rate
        self._since_ns = time.monotonic_ns()
        self._num_paid = 0
        self.num_sent = 0
        """Answers, and parts of such, that were sent to the client."""

    def spend(self) -> None:
        """Pay for one frame. Raises ConnectionFault when a client sends little else."""
        self._left -= 1
        if self._left >= 0:
            return
        now_ns = time.monotonic_ns()
        earned = (now_ns - self._since_ns) / 1e9 * self._rate + _PER_SENT * (self.num_sent - self._num_paid)
        self._left = min(_BURST_S * self._rate, self._left + earned)
        self._since_ns, self._num_paid = now_ns, self.num_sent
        if self._left < 0:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that bring no message")
