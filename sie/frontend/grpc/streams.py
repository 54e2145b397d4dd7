"""Owns the streams of one process: requests of a stream run side by side, and are answered in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

_MAX_AT_ONCE: Final = 32
"""Requests of one stream under way; the next is read when there is room, and so the client is slowed down."""


class Streams:
    """Every stream that is open."""

    def __init__(self) -> None:
        self._readers: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def end(self) -> None:
        """Read no more requests; each stream ends when its last reply is written."""
        self._is_ending = True
        for reader in self._readers:
            reader.cancel()

    async def run(
        self,
        messages: AsyncIterator[bytes],
        answer: Callable[[bytes], Coroutine[Any, Any, bytes]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Answer what comes until the client has no more, or `end` is called. Raises what answer raises, and stops."""
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
            if not reader.cancelled():
                reader.result()
        finally:
            self._readers.discard(reader)
            reader.cancel()
            while not replies.empty():
                left = replies.get_nowait()
                if left is not None:
                    left.cancel()
