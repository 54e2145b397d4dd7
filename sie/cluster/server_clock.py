"""Translates between the clock of the NATS server and this process's monotonic clock.

Clocks of hosts differ, so a deadline crosses hosts on the one clock that all of them can read: that of the server which
leads the pool's stream. This host's wall clock is not used at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

_STAMP: Final = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)$")
_DRIFT_PER_S: Final = 1e-4
"""How fast two clocks may part: an old measurement of the offset gets worse by this."""
MEASURE_S: Final = 5.0
"""How often to measure. The server's clock may be set, and another server may lead: requests come to their hosts as expired
until both know."""


class ServerClock:
    """The offset between the server's clock and the local monotonic one, with its possible error."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """now_ns is the local monotonic clock in nanoseconds."""
        self._now_ns = now_ns
        self._offset_ns = 0
        self._error_ns = 0
        self._measured_ns: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether the offset was ever measured."""
        return self._measured_ns is not None

    def measure(self, sent_ns: int, received_ns: int, server_ns: int) -> None:
        """Take in a server's time that was requested at sent_ns and received at received_ns (local).

        The server read its clock at some time between the two. A measurement replaces one with a larger possible error, and
        one that cannot be true any more: the server's clock was set, or another server leads the stream.
        """
        error_ns, offset_ns = (received_ns - sent_ns) // 2, server_ns - (sent_ns + received_ns) // 2
        if self._measured_ns is not None:
            old_error_ns = self._error_ns + int((received_ns - self._measured_ns) * _DRIFT_PER_S)
            if error_ns > old_error_ns and abs(offset_ns - self._offset_ns) <= error_ns + old_error_ns:
                return
        self._offset_ns, self._error_ns, self._measured_ns = offset_ns, error_ns, received_ns

    def forget(self) -> None:
        """Take the next measurement whatever its error: another server may lead the stream now."""
        self._error_ns = 1 << 62

    def to_server(self, local_ns: int) -> int:
        """Return a local time on the server's clock."""
        return local_ns + self._offset_ns

    def to_local(self, server_ns: int) -> int:
        """Return a server's time on the local clock."""
        return server_ns - self._offset_ns

    def left_ns(self, server_ns: int) -> int:
        """Return the time until a server's time; negative if it has passed."""
        return self.to_local(server_ns) - self._now_ns()


def parse_stamp(text: str) -> int:
    """Return a time of the server's API (RFC 3339, up to nanoseconds) as nanoseconds since 1970. Raises ValueError."""
    matched = _STAMP.match(text)
    if matched is None:
        raise ValueError(f"not a time: {text[:40]!r}")
    whole, fraction, zone = matched.groups()
    when = datetime.fromisoformat(whole + ("+00:00" if zone == "Z" else zone)).astimezone(UTC)
    return int(when.timestamp()) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
