"""Streams: order, how many requests are under way, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sie.frontend.grpc.streams import Streams
from sie.values.errors import Unavailable


async def several(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield b"%d" % number


def test_replies_are_in_the_order_of_the_requests_whichever_is_done_first():
    async def run() -> list[bytes]:
        written: list[bytes] = []
        gates = [asyncio.Event() for _ in range(20)]

        async def answer(message: bytes) -> bytes:
            number = int(message)
            if number + 1 < len(gates):
                await gates[number + 1].wait()
            gates[number].set()
            return message

        async def write(reply: bytes) -> None:
            written.append(reply)

        await Streams().run(several(20), answer, write)
        return written

    assert asyncio.run(run()) == [b"%d" % number for number in range(20)]


def test_no_more_than_32_requests_are_under_way_while_a_client_does_not_read():
    async def run() -> tuple[int, int]:
        num_read = 0
        stuck, go_on = asyncio.Event(), asyncio.Event()

        async def messages() -> AsyncIterator[bytes]:
            nonlocal num_read
            async for message in several(100):
                num_read += 1
                yield message

        async def answer(message: bytes) -> bytes:
            return message

        async def write(_: bytes) -> None:
            stuck.set()
            await go_on.wait()

        task = asyncio.create_task(Streams().run(messages(), answer, write))
        await stuck.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        while_stuck = num_read
        go_on.set()
        await task
        return while_stuck, num_read

    assert asyncio.run(run()) == (32, 100)


def test_a_stream_that_is_told_to_end_fails_after_its_last_reply_because_its_client_may_have_sent_more():
    async def run() -> list[bytes]:
        streams, written = Streams(), list[bytes]()
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def messages() -> AsyncIterator[bytes]:
            yield b"one"
            await asyncio.Event().wait()

        async def answer(message: bytes) -> bytes:
            asked.set()
            await may_answer.wait()
            return message

        async def write(reply: bytes) -> None:
            written.append(reply)

        task = asyncio.create_task(streams.run(messages(), answer, write))
        await asked.wait()
        streams.end()
        may_answer.set()
        for stream in (task, streams.run(messages(), answer, write)):  # one that begins now ends at once
            with pytest.raises(Unavailable, match="The server is stopping"):
                await asyncio.wait_for(stream, 60)
        return written

    assert asyncio.run(run()) == [b"one"]


def test_a_failure_ends_the_stream_and_the_requests_behind_it():
    async def run() -> bool:
        waits, is_cancelled = asyncio.Event(), False

        async def answer(message: bytes) -> bytes:
            nonlocal is_cancelled
            if message == b"0":
                await waits.wait()
                raise ValueError("no")
            waits.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                is_cancelled = True
                raise
            return b""

        async def write(_: bytes) -> None:
            raise AssertionError("nothing is to be written")

        with pytest.raises(ValueError, match="no"):
            await Streams().run(several(2), answer, write)
        await asyncio.sleep(0)
        return is_cancelled

    assert asyncio.run(run())
