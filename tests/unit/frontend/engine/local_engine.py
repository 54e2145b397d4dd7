"""A second engine: functions of this process answer. It knows the interface and nothing of shared memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.frontend.engine.interface import Arrays, Pending
from sie.frontend.engine.request_layout import RequestLayout, lay_out
from sie.frontend.engine.token_stream import TokenStream
from sie.values.errors import ClientGone, SieError
from sie.values.generate import GenerateTask, GenerateTotals, TokenRecord
from sie.values.work import ReplyHeader, WorkHeader
from sie.values.work_bytes import array_view, extent_bytes, extent_head, plan_arrays, read_extent

Answer = Callable[[WorkHeader, Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]
"""Returns the arrays of a reply for those of a request. Raises SieErrors."""
Generate = Callable[[GenerateTask, list[int]], Iterator[TokenRecord]]
"""Yields records for a prompt."""

_encode: Final = msgspec.msgpack.Encoder().encode
_work_decoder: Final = msgspec.msgpack.Decoder(WorkHeader)
_task_decoder: Final = msgspec.msgpack.Decoder(GenerateTask)


class LocalReply:
    """Bytes that nobody else needs; a test counts the replies that are not released."""

    def __init__(self, engine: LocalEngine, pending: LocalPending, view: memoryview) -> None:
        self._engine = engine
        self.num_tokens = pending.num_tokens
        self.submitted_ns = pending.submitted_ns
        self.view = view
        engine.num_held += 1

    def release(self) -> None:
        assert len(self.view), "released once"
        self.view = memoryview(b"")
        self._engine.num_held -= 1


class LocalPending:
    def __init__(self, num_tokens: int, deadline_ns: int) -> None:
        self.num_tokens = num_tokens
        self.deadline_ns = deadline_ns
        self.submitted_ns = time.monotonic_ns()
        self.future: asyncio.Future[LocalReply] = asyncio.get_running_loop().create_future()
        self.stopped: set[int] = set()

    async def reply(self) -> LocalReply:
        try:
            return await self.future
        except BaseException:
            if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
                self.future.result().release()
            raise

    def stop(self, choice: int) -> None:
        self.stopped.add(choice)


class LocalEngine:
    """Answers each request in a later turn of the event loop, while its gate is open."""

    def __init__(self, answer: Answer, generate: Generate | None = None) -> None:
        self._answer = answer
        self._generate = generate
        self._tasks: set[asyncio.Task[None]] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_held = self.num_records = 0

    def submit(self, header: WorkHeader, arrays: Arrays, num_tokens: int, deadline_ns: int) -> LocalPending:
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in arrays]
        return self.submit_parts(lay_out(header, arrays), parts, num_tokens, deadline_ns)

    def submit_parts(
        self, layout: RequestLayout, parts: Sequence[bytes | memoryview], num_tokens: int, deadline_ns: int
    ) -> LocalPending:
        pending = LocalPending(num_tokens, deadline_ns)
        self._spawn(self._serve(pending, _join(layout, parts)))
        return pending

    async def submit_large(self, header: WorkHeader, arrays: Arrays, num_tokens: int, deadline_ns: int) -> LocalPending:
        return self.submit(header, arrays, num_tokens, deadline_ns)

    async def submit_stream(
        self, header: WorkHeader, arrays: Arrays, num_tokens: int, deadline_ns: int, stream: TokenStream
    ) -> LocalPending:
        pending = LocalPending(num_tokens, deadline_ns)
        stream.join(pending)
        self._spawn(self._write(pending, header, [int(token) for token in arrays[1][1]], stream))
        return pending

    def abandon(self, pending: Pending, error: SieError) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)

    def finish(self, pending: Pending) -> None:
        self.abandon(pending, ClientGone("nothing more is wanted"))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, pending: LocalPending, work: memoryview) -> None:
        await asyncio.sleep(0)
        await self.gate.wait()
        header, payload = read_extent(work, _work_decoder)
        try:
            arrays = self._answer(header, {ref.name: array_view(payload, ref) for ref in header.arrays})
        except SieError as error:
            self.abandon(pending, error)
            return
        arrays["times"] = np.array([time.monotonic_ns(), 1, 1], np.int64)
        plan = plan_arrays([(name, array.dtype.str, array.shape) for name, array in arrays.items()])
        self._end(pending, _pack(_encode(ReplyHeader(plan.refs)), plan.refs, arrays))

    async def _write(self, pending: LocalPending, header: WorkHeader, prompt: list[int], stream: TokenStream) -> None:
        assert self._generate is not None
        for record in self._generate(_task_decoder.decode(header.task), prompt):
            await asyncio.sleep(0)
            await self.gate.wait()
            if pending.future.done() or record.choice in pending.stopped:
                break
            self.num_records += 1
            stream.feed(record, time.monotonic_ns())
        self._end(pending, _pack(_encode(GenerateTotals(0, self.num_records, time.monotonic_ns())), (), {}))

    def _end(self, pending: LocalPending, view: memoryview) -> None:
        if not pending.future.done():
            pending.future.set_result(LocalReply(self, pending, view))


def _join(layout: RequestLayout, parts: Sequence[bytes | memoryview]) -> memoryview:
    work = bytearray(layout.nbytes)
    work[: len(layout.head)] = layout.head
    for place, part in zip(layout.places, parts, strict=True):
        work[place] = part
    return memoryview(work).toreadonly()


def _pack(header: bytes, refs: Sequence[Any], arrays: Mapping[str, NDArray[Any]]) -> memoryview:
    packed = bytearray(extent_head(header).ljust(extent_bytes(len(header), 0), b"\0"))
    start = len(packed)
    for ref in refs:
        packed = packed.ljust(start + ref.offset, b"\0") + arrays[ref.name].tobytes()
    return memoryview(packed).toreadonly()
