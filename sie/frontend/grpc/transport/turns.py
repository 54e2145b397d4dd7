"""Bounds the work for clients in one iteration of the event loop, a turn. The rest of the work waits for a later turn.

The least served connection goes first (start-time fair queueing over processor time), so a client with one small call
overtakes clients that send a flood. Nothing waits while the turn has time left, and it nearly always has.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Final

CALL_NS: Final = 50_000
"""Time that a turn counts for each call, or message of a stream, that it starts; their work runs after its frames."""
_SLICE_NS: Final = 500_000
"""Longest time for one waiting connection before the next is served; also the most by which a connection that begins to wait
is ahead of those that wait already."""
_MANY_LEAVING: Final = 1024


class Share:
    """The time that one connection has used of the turns in which others waited."""

    __slots__ = ("used_ns",)

    def __init__(self) -> None:
        self.used_ns = 0


class Turns:
    """The turns of one process."""

    def __init__(self) -> None:
        self.turn_ns = 0
        """Longest time for new bytes in a turn, and for waiting work; set from `grpc_turn_ms`."""
        self.end_ns = 0
        """The end of the time for new bytes in this turn, or 0 if none have come."""
        self._num_waits = 0
        self._leaving: deque[Callable[[], None]] = deque()
        self._waiting: list[tuple[int, int, Share, int, Callable[[], bool | None]]] = []
        self._order = itertools.count()
        self._served_ns = 0
        self._is_scheduled = False

    def begin(self, now_ns: int) -> bool:
        """Return whether this turn has time left. The first call in a turn starts its clock."""
        if now_ns <= self.end_ns:
            return True
        if self.end_ns:
            return False
        self.end_ns = now_ns + (self.turn_ns if len(self._leaving) < _MANY_LEAVING else self.turn_ns >> 2)
        self._schedule()
        return True

    def take_num_waits(self) -> int:
        """Return the number of waits since the last call, and reset it."""
        num_waits, self._num_waits = self._num_waits, 0
        return num_waits

    def begin_call(self) -> bool:
        """Return whether this turn has time for the work of a call, and count it."""
        has_time = self.begin(time.monotonic_ns())
        if has_time:
            self.end_ns -= CALL_NS
        return has_time

    def wait(self, share: Share, go_on: Callable[[], bool | None], *, used_ns: int = 0, cost_ns: int = 0) -> None:
        """Call go_on in a later turn, and again while it returns True.

        used_ns: the time that the connection has used of this turn. cost_ns: the time to count for the work that go_on
        starts.
        """
        self._num_waits += 1
        self._push(max(self._served_ns - _SLICE_NS, share.used_ns) + used_ns, share, cost_ns, go_on)

    def leave(self, cancel: Callable[[], None]) -> None:
        """Cancel the work of a call whose client has left, now or in a later turn.

        Such cancellations take up to three quarters of a turn, so that calls end faster than new ones can arrive.
        """
        if self.begin_call():
            cancel()
        else:
            self._leaving.append(cancel)

    def _cancel_some(self) -> int:
        """Cancel work of calls that have left. Return the time to count for it."""
        num = min(len(self._leaving), (self.turn_ns * 3 >> 2) // CALL_NS + 1)
        for _ in range(num):
            self._leaving.popleft()()
        return num * CALL_NS

    def _push(self, start_ns: int, share: Share, cost_ns: int, go_on: Callable[[], bool | None]) -> None:
        share.used_ns = start_ns + cost_ns
        heapq.heappush(self._waiting, (start_ns, next(self._order), share, cost_ns, go_on))
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.call_soon(self._next)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back in the next iteration of the event loop."""
        asyncio.get_running_loop().call_soon(callback)

    def _next(self) -> None:
        """Start a turn: serve the waiting connections, the least served first, for at most the time of a turn."""
        now_ns = time.monotonic_ns()
        left_ns = self.turn_ns - self._cancel_some()
        while self._waiting and left_ns > 0:
            start_ns, _, share, cost_ns, go_on = heapq.heappop(self._waiting)
            self._served_ns = max(self._served_ns, start_ns)
            self.end_ns = end_ns = now_ns + min(left_ns, _SLICE_NS)
            is_more = go_on()
            done_ns = time.monotonic_ns()
            # Each call that it began has moved the end of the turn. That time counts, too.
            used_ns = done_ns - now_ns + end_ns - self.end_ns
            left_ns -= used_ns + cost_ns
            share.used_ns += used_ns
            now_ns = done_ns
            if is_more:
                self._push(max(self._served_ns, share.used_ns), share, cost_ns, go_on)
            elif not self._waiting:
                self._served_ns = max(self._served_ns, share.used_ns)
        self.end_ns = 0
        self._is_scheduled = False
        if self._waiting or self._leaving:
            self._schedule()
