"""A worker played by hand: the test reads what an engine submitted and writes records, replies and errors itself."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from sie.frontend.engine.engine import ShmEngine
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.extent import begin_extent, is_cancelled, is_stopped
from sie.shm.large import LargeBudget
from sie.shm.layout import ERROR, RELEASE, REPLY, SUBMIT, TOKENS, Descriptor
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.errors import SieError, to_wire
from sie.values.generate import GenerateTask, GenerateTotals, TokenFrame, TokenRecord
from sie.values.work import WorkHeader
from sie.values.work_bytes import array_view, extent_bytes, read_extent

MIB = 1 << 20
_work_decoder = msgspec.msgpack.Decoder(WorkHeader)
_task_decoder = msgspec.msgpack.Decoder(GenerateTask)
_encode = msgspec.msgpack.Encoder().encode


def generator(model: str = "m", **facts: Any) -> ModelCard:
    """Return the card of a model that generates."""
    return ModelCard(id=model, kind="generator", outputs=("generate",), **facts)


class HandWorker:
    """The worker's end of one attachment. `Rig.start_hand_worker` makes it."""

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

    def meet(self, engine: ShmEngine, frontend_space: OutboundSpace, capacity: int) -> None:
        """Attach an engine and this worker to each other."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), self.generation, self.space, capacity)
        theirs = PendingAttachment(ends[1], os.pidfd_open(os.getpid()), self.generation, frontend_space, capacity)
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
        facts = {"num_cached": 0, "num_generated": 0, "started_ns": 0, **totals}
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
