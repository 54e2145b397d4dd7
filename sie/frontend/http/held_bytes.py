"""Bounds the bytes that one process holds for its clients: bodies that arrive, and answers that wait to be read.

Over the limit the connection that holds most is cut first. The bytes of a request that a worker runs count, too, but its
connection is not cut, because the answer frees them. The sum may be out of date, so each holding is measured again before
a cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sie.runtime.free_memory import release_free_memory
from sie.runtime.logs import get_logger

_log = get_logger(__name__)


class Holding(Protocol):
    """The bytes of one body or answer. They are all of its connection, because HTTP/1.1 has one at a time."""

    num_held: int
    is_cut: bool

    @property
    def can_be_cut(self) -> bool:
        """Whether the client keeps the bytes waiting."""
        ...

    @property
    def may_be_read(self) -> bool:
        """Whether it is not known yet if the client has read them. Such bytes count, but do not cause a cut."""
        ...

    def measure(self) -> int:
        """Return the bytes that are still held."""
        ...

    def cut(self) -> None:
        """Release the bytes: refuse the body, or end the connection."""
        ...


class HeldBytes:
    """The budget of one process. on_cut is called for each connection that is cut."""

    def __init__(self, max_bytes: int, on_cut: Callable[[], None] = lambda: None) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._on_cut = on_cut
        self._warn_s = 0.0
        self._has_cut = False
        self._trim_s = 0.0
        self._holdings: set[Holding] = set()

    @property
    def is_over(self) -> bool:
        """Whether more is held than the limit, by the sizes that are known."""
        return self.num_bytes > self.max_bytes

    def put(self, holding: Holding, num_bytes: int) -> None:
        """Record that a holding has num_bytes now."""
        if holding.is_cut:
            return
        self.num_bytes += num_bytes - holding.num_held
        holding.num_held = num_bytes
        if num_bytes:
            self._holdings.add(holding)
        else:
            self._holdings.discard(holding)

    def tick(self) -> None:
        """Cut holdings until the rest is within the limit. The process's tick calls this."""
        if self._has_cut:
            self._trim()
        if not self.is_over:
            return
        for holding in list(self._holdings):
            self.put(holding, min(holding.num_held, holding.measure()))
        waiting = [holding for holding in self._holdings if holding.can_be_cut]
        waiting.sort(key=lambda holding: holding.num_held)
        unsure = sum(holding.num_held for holding in self._holdings if holding.may_be_read)
        while waiting and self.num_bytes - unsure > self.max_bytes:
            largest = waiting.pop()
            self._warn(largest)
            self.put(largest, 0)
            largest.is_cut = True
            largest.cut()
            self._on_cut()
            self._has_cut = True

    def _trim(self) -> None:
        """Release the memory of what was cut: large bodies of many sizes leave gaps. At most four times a second."""
        now_s = time.monotonic()
        if now_s >= self._trim_s:
            self._has_cut, self._trim_s = False, now_s + 0.25
            release_free_memory()

    def _warn(self, holding: Holding) -> None:
        """Log a cut, at most once a second: a client decides how many there are."""
        now_s = time.monotonic()
        if now_s >= self._warn_s:
            self._warn_s = now_s + 1.0
            _log.warning("max_held_bytes: cutting connections; the first one holds %d bytes", holding.num_held)
