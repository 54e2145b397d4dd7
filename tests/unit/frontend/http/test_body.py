from __future__ import annotations

import asyncio
import time

import pytest

from sie.frontend.http.body import _WHOLE_BYTES, BodyReader, HeldBody
from sie.frontend.http.held_bytes import HeldBytes
from sie.values.errors import BadRequest, ClientGone, InputTooLong, Overloaded, SieError

MAX_BYTES = 1 << 20
IDLE_S = 10.0
NEVER_NS = 1 << 62
CHUNKED = {"transfer-encoding": "chunked"}


class Body:
    """What Granian hands over: a whole body when it is called, chunks when it is iterated."""

    def __init__(self, *chunks: bytes, stalls: bool = False, closes: bool = False) -> None:
        self.chunks = chunks
        self.num_read = 0
        self.stalls = stalls
        self.closes = closes

    async def __call__(self) -> bytes:
        await self._end()
        return b"".join(self.chunks)

    async def __aiter__(self):
        for chunk in self.chunks:
            self.num_read += 1
            yield chunk
        await self._end()

    async def _end(self) -> None:
        if self.closes:
            raise RuntimeError("protocol closed")
        if self.stalls:
            await asyncio.get_running_loop().create_future()


def read(headers: dict[str, str], body: Body) -> bytes:
    return asyncio.run(BodyReader(MAX_BYTES, IDLE_S).read(headers, body, NEVER_NS))


def length(num_bytes: int | str) -> dict[str, str]:
    return {"content-length": str(num_bytes)}


@pytest.mark.parametrize(
    ("headers", "chunks"),
    [
        (length(3), [b"abc"]),
        ({}, []),
        (length(0), []),
        (CHUNKED, [b"ab", b"", b"c"]),
        (CHUNKED, []),
        (length(_WHOLE_BYTES + 1), [b"x" * _WHOLE_BYTES, b"y", b""]),
        (length(MAX_BYTES), [b"x" * MAX_BYTES]),
        (CHUNKED, [b"x" * MAX_BYTES]),
    ],
)
def test_whole_body_is_returned(headers, chunks):
    assert read(headers, Body(*chunks)) == b"".join(chunks)


@pytest.mark.parametrize("announced", [MAX_BYTES + 1, 10**19, "9" * 400])
def test_announced_length_over_the_limit_is_refused_before_anything_is_read(announced):
    body = Body(b"x")
    with pytest.raises(InputTooLong, match="max_body_bytes") as caught:
        read(length(announced), body)
    assert caught.value.http_status == 413
    assert body.num_read == 0


def test_chunked_body_is_cut_off_at_the_limit_and_not_after_its_end():
    body = Body(*[b"x" * 65536] * 1000)
    with pytest.raises(InputTooLong) as caught:
        read(CHUNKED, body)
    assert caught.value.http_status == 413
    assert body.num_read == MAX_BYTES // 65536 + 1


@pytest.mark.parametrize("announced", ["", "-1", "+5", "1.0", "0x10", " 5", "5, 5", "\u0665", "five"])
def test_length_that_is_no_number_is_refused(announced):
    with pytest.raises(BadRequest):
        read(length(announced), Body(b"hello"))


def test_length_beside_a_transfer_encoding_is_refused():
    """Two lengths are how a request is smuggled past a proxy."""
    with pytest.raises(BadRequest, match="Transfer-Encoding"):
        read({**length(5), **CHUNKED}, Body(b"hello"))


@pytest.mark.parametrize("num_sent", [0, 5, _WHOLE_BYTES])
def test_large_body_that_was_cut_short_is_a_client_that_left(num_sent):
    with pytest.raises(ClientGone):
        read(length(_WHOLE_BYTES + 1), Body(b"x" * num_sent, b""))


def test_chunks_that_end_with_more_than_one_empty_one_are_cut_or_malformed():
    with pytest.raises(BadRequest, match="malformed"):
        read(CHUNKED, Body(b"abc", b"", b""))


def test_a_body_of_very_many_small_chunks_is_refused_and_one_of_larger_ones_is_not():
    assert len(read(CHUNKED, Body(*[b"x"] * 4000))) == 4000
    assert len(read(CHUNKED, Body(*[b"x" * 2048] * 500))) == 500 * 2048
    body = Body(*[b"x"] * 10_000)
    with pytest.raises(BadRequest, match="larger chunks"):
        read(CHUNKED, body)
    assert body.num_read < 4200


def test_the_largest_of_too_many_bytes_is_refused_while_it_is_read():
    async def run() -> None:
        held = HeldBytes(100_000)
        reader = BodyReader(MAX_BYTES, IDLE_S, held=held)
        kept = [HeldBody() for _ in range(3)]
        tasks = [
            asyncio.ensure_future(reader.read(CHUNKED, Body(b"x" * nbytes, stalls=True), NEVER_NS, held=mine))
            for nbytes, mine in zip((30_000, 50_000, 40_000), kept, strict=True)
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        assert held.num_bytes == 120_000
        held.tick()
        with pytest.raises(Overloaded, match="max_held_bytes"):
            await tasks[1]
        assert held.num_bytes == 70_000
        assert not tasks[0].done()
        assert not tasks[2].done()
        for task, mine in zip(tasks, kept, strict=True):
            task.cancel()
            reader.release(mine)
        assert held.num_bytes == 0

    asyncio.run(run())


def test_whole_bodies_count_until_their_requests_are_answered_and_are_not_cut():
    held, mine = HeldBytes(100), HeldBody()
    reader = BodyReader(MAX_BYTES, IDLE_S, held=held)
    asyncio.run(reader.read(length(3000), Body(b"x" * 3000), NEVER_NS, held=mine))
    held.tick()
    assert held.num_bytes == 3000
    reader.release(mine)
    assert held.num_bytes == 0


@pytest.mark.parametrize("headers", [length(5), length(_WHOLE_BYTES + 1), CHUNKED])
def test_closed_connection_is_a_client_that_left(headers):
    with pytest.raises(ClientGone):
        read(headers, Body(b"abc", closes=True))


async def _read_ending_at(
    now_ns: int, headers: dict[str, str], deadline_ns: int = NEVER_NS, wait_s: float = 60
) -> bytes:
    """Start to read a body that stalls, and let the clock say what time it is."""
    reader = BodyReader(MAX_BYTES, IDLE_S)
    task = asyncio.ensure_future(reader.read(headers, Body(b"abc", stalls=True), deadline_ns))
    for _ in range(3):
        await asyncio.sleep(0)
    reader.end_stalled(now_ns)
    reader.end_stalled(now_ns)
    async with asyncio.timeout(wait_s):
        return await task


@pytest.mark.parametrize("headers", [length(5), length(_WHOLE_BYTES + 1), CHUNKED])
@pytest.mark.parametrize("by_deadline", [False, True])
def test_body_that_stalls_or_misses_the_deadline_is_a_408(headers, by_deadline):
    now_ns = time.monotonic_ns()
    late_ns, deadline_ns = (now_ns + 10**9, now_ns + 1) if by_deadline else (now_ns + int(1e9 * (IDLE_S + 1)), NEVER_NS)
    with pytest.raises(SieError) as caught:
        asyncio.run(_read_ending_at(late_ns, headers, deadline_ns))
    assert (caught.value.http_status, caught.value.code) == (408, "REQUEST_TIMEOUT")


def test_body_that_still_has_time_is_waited_for():
    with pytest.raises(TimeoutError):
        asyncio.run(_read_ending_at(time.monotonic_ns() + int(1e9 * (IDLE_S - 1)), CHUNKED, wait_s=0.05))


@pytest.mark.parametrize(("num_bytes", "is_late"), [(1000, True), (3000, False)])
def test_body_that_is_slower_than_the_least_rate_is_a_408(num_bytes, is_late):
    """Judged only after the longest pause: 11 s at 100 bytes a second are 1,100 bytes."""

    async def run() -> None:
        reader = BodyReader(MAX_BYTES, IDLE_S, 100)
        task = asyncio.ensure_future(reader.read(CHUNKED, Body(b"x" * num_bytes, stalls=True), NEVER_NS))
        for _ in range(3):
            await asyncio.sleep(0)
        (reading,) = reader._readings
        reader.end_stalled(reading.began_ns + int(1e9 * (IDLE_S - 1)))
        assert reading.error is None
        reading.last_ns = reading.began_ns + int(1e9 * (IDLE_S + 1))
        reader.end_stalled(reading.last_ns)
        assert (reading.error is not None) is is_late
        task.cancel()
        with pytest.raises(SieError if is_late else asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_each_chunk_restarts_the_idle_time():
    async def run() -> bytes:
        reader = BodyReader(MAX_BYTES, 0.0)
        began_ns = time.monotonic_ns()
        more = asyncio.Event()

        class Slow:
            async def __aiter__(self):
                await more.wait()
                yield b"late"

        task = asyncio.ensure_future(reader.read(CHUNKED, Slow(), NEVER_NS))
        await asyncio.sleep(0)
        (reading,) = reader._readings
        reader.end_stalled(began_ns)  # no later than it started
        more.set()
        body = await task
        assert reading.last_ns > began_ns
        reader.end_stalled(began_ns + 10**12)  # nobody is reading any more
        return body

    assert asyncio.run(run()) == b"late"


def test_cancellation_from_elsewhere_stays_one():
    async def run() -> None:
        reader = BodyReader(MAX_BYTES, IDLE_S)
        task = asyncio.ensure_future(reader.read(CHUNKED, Body(stalls=True), NEVER_NS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reader.end_stalled(time.monotonic_ns() + 10**12)

    asyncio.run(run())


def test_task_can_go_on_after_its_body_stalled():
    """The error boundary answers in the same task: a cancellation left behind would end it in its next await."""

    async def run() -> str:
        reader = BodyReader(MAX_BYTES, IDLE_S)

        async def handler() -> str:
            with pytest.raises(SieError):
                await reader.read(CHUNKED, Body(stalls=True), NEVER_NS)
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
            return "answered"

        task = asyncio.ensure_future(handler())
        await asyncio.sleep(0)
        reader.end_stalled(time.monotonic_ns() + 10**12)
        return await task

    assert asyncio.run(run()) == "answered"


# --- bodies that are passed on ----------------------------------------------------------------------------------------


def test_body_is_passed_on_in_pieces_and_only_a_piece_is_held():
    held = HeldBytes(1 << 40)
    reader = BodyReader(1 << 30, IDLE_S, held=held)
    given: list[int] = []
    most = 0

    async def take(piece: bytes) -> None:
        nonlocal most
        most = max(most, held.num_bytes)
        given.append(len(piece))

    body = Body(*[b"x" * 100_000] * 30, b"end")
    assert asyncio.run(reader.pass_on(CHUNKED, body, NEVER_NS, take)) == sum(given) == 3_000_003
    assert len(given) > 8
    assert 0 < most < 400_000
    assert held.num_bytes == 0


def test_small_and_empty_bodies_are_passed_on_once():
    async def run(headers: dict[str, str], *chunks: bytes) -> list[bytes]:
        given: list[bytes] = []

        async def take(piece: bytes) -> None:
            given.append(piece)

        await BodyReader(MAX_BYTES, IDLE_S).pass_on(headers, Body(*chunks), NEVER_NS, take)
        return given

    assert asyncio.run(run(length(3), b"abc")) == [b"abc"]
    assert asyncio.run(run(length(0))) == [b""]


@pytest.mark.parametrize(("limit", "chunks"), [(100, [b"x" * 101]), (100, [b"x" * 60, b"y" * 60])])
def test_body_that_is_passed_on_has_the_same_limits(limit: int, chunks: list[bytes]):
    async def take(_piece: bytes) -> None:
        pass

    with pytest.raises(InputTooLong):
        asyncio.run(BodyReader(limit, IDLE_S).pass_on(CHUNKED, Body(*chunks), NEVER_NS, take))
    with pytest.raises(ClientGone):
        asyncio.run(BodyReader(MAX_BYTES, IDLE_S).pass_on(length(9), Body(b"cut"), NEVER_NS, take))


def test_slow_disk_is_not_a_slow_client():
    """While a piece is passed on, the client waits for us: no stall, and no cut, ends the read."""

    async def run() -> int:
        held = HeldBytes(1)
        reader = BodyReader(MAX_BYTES, 0.001, held=held)

        async def take(_piece: bytes) -> None:
            reader.end_stalled(time.monotonic_ns() + 10**12)
            held.tick()
            await asyncio.sleep(0)

        return await reader.pass_on(CHUNKED, Body(b"x" * 300_000, b"y"), NEVER_NS, take)

    assert asyncio.run(run()) == 300_001
