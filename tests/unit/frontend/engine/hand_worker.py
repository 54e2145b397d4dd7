"""A worker played by hand: the test reads what an engine submitted and writes records, replies and errors itself."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import msgspec

from sie.config.sections import Memory
from sie.config.settings import Settings
from sie.frontend.engine.engine import ShmEngine
from sie.ipc.messages import ModelEntry
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.extent import array_view, begin_extent, extent_bytes, is_cancelled, is_stopped, read_extent
from sie.shm.extent_headers import WorkHeader
from sie.shm.large import LargeBudget
from sie.shm.layout import ERROR, RELEASE, REPLY, SUBMIT, TOKENS, Descriptor
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.errors import SieError, to_wire
from sie.values.generate import GenerateTask, GenerateTotals, TokenFrame, TokenRecord

MIB = 1 << 20
CAPACITY = 64
_work_decoder = msgspec.msgpack.Decoder(WorkHeader)
_task_decoder = msgspec.msgpack.Decoder(GenerateTask)
_encode = msgspec.msgpack.Encoder().encode


def generator(model: str = "m", **facts: Any) -> ModelCard:
    """Return the card of a model that generates."""
    return ModelCard(id=model, kind="generator", outputs=("generate",), **facts)


class HandWorker:
    """The worker's end of one attachment."""

    def __init__(self, slot: int, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.space = OutboundSpace.create("reply", MIB, LargeBudget(0), large_extent_bytes=MIB)
        self.work: list[Descriptor] = []
        self.num_released = 0
        self.is_dead = False
        self._attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment:
        assert self._attachment is not None
        return self._attachment

    def meet(self, engine: ShmEngine, frontend_space: OutboundSpace) -> None:
        """Attach an engine and this worker to each other."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), self.generation, self.space, CAPACITY)
        theirs = PendingAttachment(ends[1], os.pidfd_open(os.getpid()), self.generation, frontend_space, CAPACITY)
        self._attachment = own.try_finish()
        attachment = theirs.try_finish()
        assert attachment is not None
        engine.attach(self.slot, attachment)

    def drain(self) -> None:
        """Take what the engine said."""
        for descriptor in self.attachment.drain():
            if descriptor.kind == SUBMIT:
                self.work.append(descriptor)
            elif descriptor.kind == RELEASE:
                self.space.end_released(descriptor.offset)
                self.num_released += 1

    def task(self, number: int = -1) -> tuple[WorkHeader, GenerateTask, list[int]]:
        """Return what a submitted request says: header, task, prompt."""
        header, payload = read_extent(self.view(number), _work_decoder)
        prompt = array_view(payload, header.arrays[1]).tolist()
        return header, _task_decoder.decode(header.task), prompt

    def view(self, number: int = -1) -> memoryview:
        return self.attachment.view(self.work[number])

    def is_cancelled(self, number: int = -1) -> bool:
        return is_cancelled(self.view(number))

    def stopped(self, number: int = -1) -> list[int]:
        return [choice for choice in range(64) if is_stopped(self.view(number), choice)]

    def tell(self, *records: TokenRecord) -> None:
        """Send one frame."""
        self._push(TOKENS, 0, _encode(TokenFrame(records)))

    def reply(self, request_id: int, **totals: int) -> None:
        """End a request."""
        facts = {"num_cached": 0, "num_generated": 0, "started_ns": 0, "prompt_ns": 0, "completion_ns": 0, **totals}
        self._push(REPLY, request_id, _encode(GenerateTotals(**facts)))

    def fail(self, request_id: int, error: SieError) -> None:
        """End a request with an error."""
        self._push(ERROR, request_id, _encode(to_wire(error)))

    def drop(self, request_id: int) -> None:
        """End a cancelled request."""
        assert self.attachment.push(ERROR, 0, request_id, 0, 0)

    def _push(self, kind: int, request_id: int, header: bytes) -> None:
        nbytes = extent_bytes(len(header), 0)
        lease = self.space.lease(nbytes)
        assert lease is not None
        begin_extent(lease.view, header)
        assert self.attachment.push(kind, 0, request_id, lease.address, nbytes)
        lease.hand_over(request_id)

    def close(self) -> None:
        self.attachment.close()
        self.space.close()


class HandRig:
    """One engine, its models and hand-played workers. Use inside a running event loop."""

    def __init__(self, settings: Settings | None = None) -> None:
        memory = Memory(
            request_segment_bytes=MIB, reply_segment_bytes=MIB, large_extent_bytes=MIB, ring_capacity=CAPACITY
        )
        self.settings = msgspec.structs.replace(settings or Settings(), memory=memory)
        self.space = OutboundSpace.create("request", MIB, LargeBudget(0), large_extent_bytes=MIB)
        self.entries: dict[str, ModelEntry] = {}
        self.sent: list[Any] = []
        self.engine = ShmEngine(self.settings, self.space, self.entries.get, self.sent.append)
        self.workers: list[HandWorker] = []

    def start_worker(self, card: ModelCard | None = None) -> HandWorker:
        """Start a worker that has a model, and attach it."""
        worker = HandWorker(len(self.workers), len(self.workers) + 1)
        self.workers.append(worker)
        worker.meet(self.engine, self.space)
        self.tell(card or generator(), (worker.slot,))
        return worker

    def tell(self, card: ModelCard, workers: tuple[int, ...], *, recovering: bool = False) -> None:
        """Say what the supervisor says of a model."""
        state = "loaded" if workers else "loading"
        self.entries[card.id] = ModelEntry(card=card, state=state, workers=workers, recovering=recovering)
        self.engine.place_held()

    def die(self, worker: HandWorker, card: ModelCard | None = None) -> None:
        """Let the engine hear that a worker is dead, and that its model comes back."""
        worker.is_dead = True
        self.tell(card or generator(), (), recovering=True)
        self.engine.bury(worker.slot, worker.generation, ())

    async def settle(self) -> None:
        """Turn the event loop until what is ready now has been handled, on both sides, with a tick in between."""
        for _ in range(6):
            await asyncio.sleep(0)
        for link in self.engine._links.values():
            link.give_back()
        await asyncio.sleep(0)
        for worker in self.workers:
            worker.drain()

    def close(self) -> None:
        for link in self.engine._all_links():
            self.engine.bury(link.slot, link.generation, ())
        for pending in list(self.engine._held.values()):
            pending.future.cancel()
        for worker in self.workers:
            worker.close()
        self.space.close()
