"""Counts the answers that their clients have not read yet. Must cost nothing for a small answer.

A complete answer is given to Granian at once; only the kernel knows how much of it was read (`Backlog`). Until all of it
is read, it counts towards `max_held_bytes`, and its request towards its key's `max_concurrent`. Granian hands over a
connection's next request only after the previous answer has left it. So the number of connections bounds the answers
under MIN_BYTES. The kernel limits how long a client may read nothing (`limit_unread_time`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sie.frontend.access.key_use import KeyHolder
from sie.frontend.http.backlog import Backlog, Sockets, has_address
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.held_bytes import HeldBytes
from sie.frontend.http.unix_backlog import UnixBacklog, settle

MIN_BYTES: Final = 16 * 1024
"""A smaller answer is not counted."""
_NO_LIMIT: Final = 1 << 62
_SOON_S: Final = 0.002
"""After this time most clients have read an answer, and may send the next request of their key."""
_WATCH_S: Final = 0.05
_CHECK_NS: Final = 100_000_000
_MIN_REST: Final = 20
"""After a check of all answers follows a pause of at least this many times its duration."""


class Unread:
    """The unread bytes of one answer, or of a stream. See `HeldBytes`."""

    def __init__(self, held: HeldBytes, backlog: Backlog | UnixBacklog) -> None:
        self._held = held
        self._backlog = backlog
        self.num_held = 0
        self.is_cut = False
        self.key: KeyHolder | None = None

    @property
    def can_be_cut(self) -> bool:
        """Whether the client has unread bytes."""
        return not self._backlog.is_moving

    @property
    def may_be_read(self) -> bool:
        """Whether its connection is not known yet, over a Unix socket."""
        return isinstance(self._backlog, UnixBacklog) and self._backlog.is_moving

    def add(self, num_bytes: int) -> bool:
        """Count more bytes of the answer. Return whether it is over its own limit."""
        is_over = self._backlog.add(num_bytes)
        self._held.put(self, self._backlog.num_bytes)
        return is_over

    def measure(self) -> int:
        """Return the unread bytes."""
        return self._backlog.measure()

    def cut(self) -> None:
        """End the connection."""
        self._backlog.cut()

    def update(self) -> bool:
        """Measure, and return whether anything may be unread.

        The request ends for its key as soon as the kernel has little more to send.
        """
        self._held.put(self, self.measure())
        if self._backlog.is_nearly_read or not self.num_held:
            self._end_key()
        return self.num_held > 0

    def end(self) -> None:
        """Stop counting the answer, and end its request for its key."""
        self._held.put(self, 0)
        self._end_key()

    def _end_key(self) -> None:
        key, self.key = self.key, None
        if key is not None:
            key.end()


class UnreadAnswers:
    """The unread answers of one process, at most one for each connection."""

    def __init__(self, held: HeldBytes, loop: asyncio.AbstractEventLoop) -> None:
        self._held = held
        self._loop = loop
        self._sockets = Sockets()
        self._answers: dict[str, Unread] = {}
        self._unix: dict[UnixBacklog, Unread] = {}
        """Answers over a Unix socket. They do not count for a key: their client's next request may come before a look."""
        self._check_ns = 0
        self._watched: set[KeyHolder] = set()

    def open_stream(self, client: str, limit_bytes: int) -> Unread:
        """Return the counter of an answer that comes in parts, with its own limit. `keep` or `end` must follow."""
        self._sockets.expire()  # its connection may be newer than the last scan
        return Unread(self._held, Backlog(client, limit_bytes, self._sockets))

    def add(self, exchange: Exchange, num_bytes: int, *, is_error: bool = False) -> None:
        """Count an answer that was just sent. Its request ends for its key when the answer is read.

        is_error: the request has ended, or was never admitted, so its key stays as it is.
        """
        if not has_address(exchange.scope.client):
            backlog = UnixBacklog()
            self._unix[backlog] = unread = Unread(self._held, backlog)
            unread.add(num_bytes)
            return
        unread = Unread(self._held, Backlog(exchange.scope.client, _NO_LIMIT, self._sockets))
        unread.add(num_bytes)
        self.keep(exchange, unread, is_error=is_error)

    def keep(self, exchange: Exchange, unread: Unread, *, is_error: bool = False) -> None:
        """Count the rest of an answer that was sent. Its request ends for its key when the answer is read."""
        if unread.num_held < MIN_BYTES:
            unread.end()
            return
        client: str = exchange.scope.client
        key = None
        if not is_error:
            key, exchange.holder = exchange.holder, None
            unread.key = key
        before = self._answers.pop(client, None)
        if before is not None:
            before.end()
        self._answers[client] = unread
        if key is not None and key.key.max_concurrent is not None and key not in self._watched:
            self._watched.add(key)
            self._loop.call_later(_SOON_S, self._watch, key, _SOON_S)

    def settle(self, key: KeyHolder) -> None:
        """End the requests of a key whose answers are read by now."""
        self._update([client for client, unread in self._answers.items() if unread.key is key])

    def _watch(self, key: KeyHolder, delay_s: float) -> None:
        """Settle a key repeatedly, because other processes count its requests, too."""
        self.settle(key)
        if any(unread.key is key for unread in self._answers.values()):
            delay_s = min(2 * delay_s, _WATCH_S)
            self._loop.call_later(delay_s, self._watch, key, delay_s)
        else:
            self._watched.discard(key)

    def tick(self, now_ns: int) -> None:
        """Check from time to time which answers were read. The process's tick calls this.

        Over the limit, answers over a Unix socket are checked at each call: one without a connection cannot be cut.
        """
        if not (self._answers or self._unix):
            return
        if now_ns >= self._check_ns:
            self._update(list(self._answers))
            self._update_unix()
            took_ns = time.monotonic_ns() - now_ns
            self._check_ns = now_ns + max(_CHECK_NS, _MIN_REST * took_ns)
        elif self._held.is_over:
            self._update_unix()

    def _update_unix(self) -> None:
        if self._unix:
            settle(self._unix)
            self._unix = {backlog: unread for backlog, unread in self._unix.items() if unread.update()}

    def _update(self, clients: list[str]) -> None:
        self._sockets.expire()
        for client in clients:
            if not self._answers[client].update():
                del self._answers[client]
