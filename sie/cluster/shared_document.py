"""Keeps a copy of one document that all gateways and hosts share, and changes it by compare and set.

The document is one key of a bucket in NATS's key-value store, on disk, so a restart of NATS loses nothing. Every change
is published to all followers. If a message is lost, a slow poll finds the change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
from nats.aio.msg import Msg

from sie.cluster.connection import Connection, WrongRevisionError
from sie.cluster.payloads import decode, encode
from sie.runtime.logs import get_logger
from sie.values.errors import ProtocolError, SieError, Unavailable

_log = get_logger(__name__)
_POLL_S: Final = 10.0
_RETRY_S: Final = 0.5
_MAX_TRIES: Final = 20
_GATHER_S: Final = 0.02

ValueT = TypeVar("ValueT", bound=msgspec.Struct)


class SharedDocument(Generic[ValueT]):
    """One shared document. `value` is this process's copy, which may be a moment old."""

    def __init__(
        self, connection: Connection, key: str, decoder: msgspec.msgpack.Decoder[ValueT], empty: ValueT,
        on_change: Callable[[ValueT], None],
    ) -> None:  # fmt: skip
        """Start with the value `empty`, which a document has that nobody has written. on_change gets each new value."""
        self._connection = connection
        self._key = key
        self._decoder: Any = decoder
        self._on_change = on_change
        self.value = empty
        self.revision = 0
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Keep the copy up to date for as long as the process runs."""
        await self._connection.subscribe_key(self._key, self._on_message)
        while True:
            try:
                await self._read()
                wait_s = _POLL_S
            except SieError as error:
                _log.debug("the document '%s' cannot be read: %s", self._key, error.message)
                wait_s = _RETRY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
                await asyncio.sleep(_GATHER_S)  # several changes make one read
            self._news.clear()

    def read_soon(self) -> None:
        """Read again, after a reconnect."""
        self._news.set()

    async def _on_message(self, _message: Msg) -> None:
        self._news.set()  # a refused change is heard, too, so the stored value must be read

    async def _read(self) -> None:
        data, revision = await self._connection.read_key(self._key)
        if data is None or revision == self.revision:
            self.revision = revision  # 0 after NATS has lost its disk: the next change writes what this copy knows
            return
        try:
            value = decode(data, self._decoder)
        except ProtocolError as error:
            _log.error("the document '%s' is refused: %s", self._key, error)
            return
        self._take(value, revision)

    def _take(self, value: ValueT, revision: int) -> None:
        self.value, self.revision = value, revision
        try:
            self._on_change(value)
        except Exception:  # the process lives on, and takes the next value
            _log.exception("the document '%s' has a value that this process cannot take", self._key)

    async def change(self, edit: Callable[[ValueT], ValueT]) -> ValueT:
        """Apply edit to the present value, and again if somebody was faster. Returns the new value.

        edit is pure; a value equal to the old one is not written. Raises the SieErrors of edit for the stored value, and
        Unavailable.
        """
        for _ in range(_MAX_TRIES):
            try:
                value = edit(self.value)
            except SieError:
                known = self.revision
                await self._read()
                if self.revision == known:
                    raise
                continue  # the copy was old: a client may have changed the document at another gateway just now
            if value == self.value and self.revision:
                return value
            try:
                revision = await self._connection.write_key(self._key, encode(value), self.revision)
                if revision > self.revision:  # else a later value was read meanwhile
                    self._take(value, revision)
                return value
            except WrongRevisionError:
                await self._read()
        raise Unavailable("Too many others change the same document; try again", retry_after_s=1)
