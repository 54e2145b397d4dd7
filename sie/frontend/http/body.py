"""Reads request bodies, with limits on size, stalls and rate. Handlers must read bodies only through `BodyReader`.

Granian limits neither the size nor the time, nor the number of chunks. It does not say why a body ended. If the body
was cut or malformed, it hands over an empty chunk, and another one at the end. Trailers, which are never read, give the
same result.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Protocol

from sie.config.limits import Limits
from sie.frontend.http.held_bytes import HeldBytes
from sie.values.errors import BadRequest, ClientGone, InputTooLong, Overloaded, SieError, untied

_WHOLE_BYTES = 256 * 1024
"""A body of known length up to this size is read in one call, a larger one in chunks."""
_FREE_CHUNKS = 4096
_MIN_CHUNK_BYTES = 1024
"""Each chunk wakes the event loop. A body may have _FREE_CHUNKS, and one more for each _MIN_CHUNK_BYTES of its size."""
_PIECE_BYTES = 256 * 1024
"""A body that is passed on goes in pieces of about this size."""
_NO_LIMIT = 1 << 62
Take = Callable[[bytes], Awaitable[None]]
"""Takes the next piece of a body; the client waits until it is done."""


class Headers(Protocol):
    """The methods of Granian's header map that are used here."""

    def get(self, name: str, /) -> str | None: ...


class HttpProtocol(Protocol):
    """The methods of Granian's RSGI protocol that are used here."""

    def __call__(self) -> Any: ...
    def __aiter__(self) -> Any: ...


class Body(Protocol):
    """The methods of Granian's body future that are used here."""

    def done(self) -> bool: ...
    def result(self) -> bytes: ...
    def __await__(self) -> Any: ...


def body_limits(limits: Limits) -> tuple[int, float, int]:
    """Return the settings for a `BodyReader`: maximum bytes, longest stall, slowest rate."""
    return limits.max_body_bytes, limits.body_idle_timeout_s, limits.min_body_bytes_per_s


class HeldBody:
    """A body that a request holds, from its first bytes until the request is answered. See `HeldBytes`."""

    __slots__ = ("is_cut", "num_held", "reading")
    may_be_read = False

    def __init__(self) -> None:
        self.num_held = 0
        self.is_cut = False
        self.reading: Reading | None = None
        """The read in progress, or None when the body is complete."""

    @property
    def can_be_cut(self) -> bool:
        """Whether we wait for the client to send more of the body."""
        return self.reading is not None and not self.reading.is_paused

    def measure(self) -> int:
        """Return the bytes received."""
        return self.num_held

    def cut(self) -> None:
        """Refuse the request."""
        if self.reading is not None:
            text = "The server holds too many bytes (max_held_bytes), and this body was the largest"
            self.reading.end(Overloaded(text, retry_after_s=1))


class Reading:
    """One body that is being read: the waiting task, the time of its last chunk, and the bytes received.

    A body that is read in one call shows no progress, so it must be complete within the longest stall. While a piece of
    it is passed on, the client waits for us: the read is paused, and must not be ended.
    """

    __slots__ = ("began_ns", "deadline_ns", "error", "is_paused", "last_ns", "num_bytes", "task")

    def __init__(self, task: asyncio.Task[Any], now_ns: int, deadline_ns: int) -> None:
        self.task = task
        self.began_ns = self.last_ns = now_ns
        self.num_bytes = 0
        self.deadline_ns = deadline_ns
        self.error: SieError | None = None
        self.is_paused = False

    def end(self, error: SieError) -> None:
        """Make the read raise an error. Must not be called by the reading task."""
        if self.error is None:
            self.error = error
            self.task.cancel()


class BodyReader:
    """Reads bodies for one process, and cancels reads that stall."""

    def __init__(
        self, max_body_bytes: int, idle_timeout_s: float, min_bytes_per_s: int = 0, setting: str = "max_body_bytes",
        held: HeldBytes | None = None,
    ) -> None:  # fmt: skip
        """Take the limits. setting is the name of the setting behind max_body_bytes; error texts quote it."""
        self._setting = setting
        self._held = held if held is not None else HeldBytes(_NO_LIMIT)
        self._readings: set[Reading] = set()
        self._others: list[BodyReader] = []
        self.reconfigure(max_body_bytes, idle_timeout_s, min_bytes_per_s)

    def reconfigure(self, max_body_bytes: int, idle_timeout_s: float, min_bytes_per_s: int) -> None:
        """Apply reloaded limits, also to bodies that are being read."""
        self._max_bytes = max_body_bytes
        self._min_bytes_per_s = min_bytes_per_s
        self._idle_ns = int(idle_timeout_s * 1e9)
        self._idle_s = idle_timeout_s
        for other in self._others:
            other.reconfigure(other._max_bytes, idle_timeout_s, min_bytes_per_s)

    def with_limit(self, section: object, setting: str, more_bytes: int = 0) -> BodyReader:
        """Return a reader with its own size limit: a setting of section, and more_bytes for the form around the content.

        `end_stalled` covers its reads, too.
        """
        other = BodyReader(
            getattr(section, setting) + more_bytes, self._idle_s, self._min_bytes_per_s, setting, self._held
        )
        other._readings = self._readings
        self._others.append(other)
        return other

    def take(self, body: Body) -> bytes:
        """Return a body that has arrived. Raises InputTooLong and ClientGone as `read` does."""
        try:
            data = body.result()
        except RuntimeError as error:
            raise _client_gone() from error
        if len(data) > self._max_bytes:
            raise self._too_long()
        return data

    def release(self, held: HeldBody) -> None:
        """Stop counting the bytes of a body; its request is answered."""
        self._held.put(held, 0)

    async def read(
        self, headers: Headers, protocol: HttpProtocol, deadline_ns: int, body: Body | None = None,
        held: HeldBody | None = None,
    ) -> bytes:  # fmt: skip
        """Return the complete body. body is Granian's future of a small body that was requested before.

        held counts the bytes of the body; the caller must `release` it. Without held, the bytes count until the read
        ends.

        Raises InputTooLong (413) over max_body_bytes. Raises BadRequest for malformed length headers, and for chunks
        that are cut, malformed or too many. Raises SieError 408 when the body stalls for body_idle_timeout_s, is slower
        than min_body_bytes_per_s, or misses the request's deadline. Raises Overloaded when all bodies and answers
        together are too large, and this is the largest. Raises ClientGone when the client left or cut the body short.
        """
        if body is not None and body.done():
            return self.take(body)
        length = self._announced(headers)
        with self._reading(deadline_ns, held) as (reading, kept):
            if body is None and (length is None or length > _WHOLE_BYTES):
                whole = bytearray()
                async for chunk in self._chunks(reading, protocol, length):
                    whole += chunk
                    self._held.put(kept, len(whole))
                return bytes(whole)
            data: bytes = await (protocol() if body is None else body)
            self._held.put(kept, len(data))  # counted only on arrival: announced bytes must not cut other connections
            return data

    async def pass_on(
        self, headers: Headers, protocol: HttpProtocol, deadline_ns: int, take: Take, body: Body | None = None
    ) -> int:
        """Give a body to `take`, piece by piece, and return its size. Only the present piece is in memory, and counts.

        Raises as `read` does, and as take does; then the rest of the body is not read.
        """
        if body is not None:
            data = await self.read(headers, protocol, deadline_ns, body)
            await take(data)
            return len(data)
        length = self._announced(headers)
        with self._reading(deadline_ns, None) as (reading, kept):
            piece = bytearray()
            async for chunk in self._chunks(reading, protocol, length):
                piece += chunk
                self._held.put(kept, len(piece))
                if len(piece) >= _PIECE_BYTES:
                    await self._give(reading, take, bytes(piece))
                    piece.clear()
                    self._held.put(kept, 0)
            await self._give(reading, take, bytes(piece))
            return reading.num_bytes

    async def _give(self, reading: Reading, take: Take, piece: bytes) -> None:
        reading.is_paused = True
        try:
            await take(piece)
        finally:
            reading.is_paused, reading.last_ns = False, time.monotonic_ns()

    @contextlib.contextmanager
    def _reading(self, deadline_ns: int, held: HeldBody | None) -> Generator[tuple[Reading, HeldBody]]:
        """Watch a read in the block; raise the error that ended it."""
        task = asyncio.current_task()
        assert task is not None
        reading = Reading(task, time.monotonic_ns(), deadline_ns)
        self._readings.add(reading)
        kept = held if held is not None else HeldBody()
        kept.reading = reading
        try:
            yield reading, kept
        except asyncio.CancelledError:
            if reading.error is None:
                raise
            task.uncancel()
            raise untied(reading.error) from None
        except RuntimeError as error:  # Granian's ProtocolClosed: the client closed its connection
            raise _client_gone() from error
        finally:
            kept.reading = None
            self._readings.discard(reading)
            if held is None:
                self.release(kept)

    def end_stalled(self, now_ns: int) -> None:
        """Cancel reads that stalled, are too slow, or passed their deadline. The process's tick calls this."""
        for reading in self._readings:
            if self._is_overdue(reading, now_ns):
                text = (
                    f"the request body made no progress for {self._idle_s:g} s (body_idle_timeout_s), was slower than "
                    f"{self._min_bytes_per_s} bytes/s (min_body_bytes_per_s), or missed the deadline"
                )
                reading.end(SieError(text, code="REQUEST_TIMEOUT", http_status=408))

    def _is_overdue(self, reading: Reading, now_ns: int) -> bool:
        if reading.is_paused:
            return False
        if now_ns - reading.last_ns > self._idle_ns or now_ns > reading.deadline_ns:
            return True
        elapsed_ns = now_ns - reading.began_ns
        # A body may begin with its longest stall, so the rate counts only after that time.
        return elapsed_ns > self._idle_ns and reading.num_bytes * 10**9 < self._min_bytes_per_s * elapsed_ns

    def _announced(self, headers: Headers) -> int | None:
        """Return Content-Length, or None for a chunked body. Raises InputTooLong, and BadRequest if ambiguous."""
        announced = headers.get("content-length")
        if announced is None:
            return None if headers.get("transfer-encoding") is not None else 0
        if headers.get("transfer-encoding") is not None:
            raise BadRequest("Content-Length and Transfer-Encoding cannot both be given")
        if not announced.isascii() or not announced.isdigit():
            raise BadRequest("Content-Length is not a number")
        length = int(announced) if len(announced) < 20 else self._max_bytes + 1  # 2^64 has 20 digits
        if length > self._max_bytes:
            raise self._too_long()
        return length

    async def _chunks(self, reading: Reading, protocol: HttpProtocol, length: int | None) -> AsyncGenerator[bytes]:
        """Yield the chunks of a body as they arrive, within the limits."""
        num_chunks = num_empty = 0
        async for chunk in protocol:
            if not chunk:
                num_empty += 1
                continue
            reading.last_ns = time.monotonic_ns()
            reading.num_bytes = num_bytes = reading.num_bytes + len(chunk)
            num_chunks += 1
            if num_bytes > self._max_bytes:
                raise self._too_long()
            if num_chunks > _FREE_CHUNKS + num_bytes // _MIN_CHUNK_BYTES:
                raise BadRequest(f"The request body has {num_chunks} chunks for {num_bytes} bytes: send larger chunks")
            yield chunk
        if length is not None and reading.num_bytes != length:
            raise _client_gone()
        if num_empty > 1:
            raise BadRequest("The request body is cut, its chunks are malformed, or trailers follow it")

    def _too_long(self) -> InputTooLong:
        return InputTooLong(f"The request body is over {self._setting} ({self._max_bytes})", http_status=413)


def _client_gone() -> ClientGone:
    return ClientGone("the client closed its connection before its body was complete")
