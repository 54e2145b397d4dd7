"""Runs the requests of each stream concurrently, and writes their replies. Must keep the order of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

from sie.values.errors import Unavailable

_MAX_AT_ONCE: Final = 32
"""Requests of one stream under way. At this limit no more requests are read, which slows the client down."""


class Streams:
    """All open streams."""

    def __init__(self) -> None:
        self._readers: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def end(self) -> None:
        """Read no more requests. Each stream ends after its last reply, with an error: its client may have sent more."""
        self._is_ending = True
        for reader in self._readers:
            reader.cancel()

    async def run(
        self,
        messages: AsyncIterator[bytes],
        answer: Callable[[bytes], Coroutine[Any, Any, bytes]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Answer messages until the client ends the stream. Stops at, and raises, an error of answer.

        Raises Unavailable after the last reply if `end` was called before.
        """
        replies: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_AT_ONCE)

        async def read() -> None:
            await room.acquire()
            async for message in messages:
                replies.put_nowait(asyncio.create_task(answer(message)))
                await room.acquire()

        reader = asyncio.create_task(read())
        self._readers.add(reader)
        reader.add_done_callback(lambda _: replies.put_nowait(None))
        if self._is_ending:
            reader.cancel()
        try:
            while (reply := await replies.get()) is not None:
                await write(await reply)
                room.release()
            if reader.cancelled():
                raise Unavailable("The server is stopping", code="SHUTTING_DOWN")
            reader.result()
        finally:
            self._readers.discard(reader)
            reader.cancel()
            while not replies.empty():
                left = replies.get_nowait()
                if left is not None:
                    left.cancel()
