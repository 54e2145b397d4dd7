"""A frontend's engine and the step loops of its workers, attached through real shared memory in one process.

Nothing runs by itself: a test turns the event loop (`Rig.settle`) and each worker's loop (`Worker.turn`) when it wants,
so that every order of events can be made. A worker "dies" by no longer being turned. `Rig.start_hand_worker` starts one
without a step loop, whose part the test plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.config.sections import Memory, Scheduler
from sie.config.settings import Settings
from sie.frontend.engine.engine import ShmEngine
from sie.frontend.engine.worker_link import ShmPending, ShmReply
from sie.ipc import messages as control_messages
from sie.ipc.channel import Channel
from sie.ipc.messages import CacheRoom, ModelEntry
from sie.shm import segment
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.pages import CounterPage
from sie.shm.segment import ReservationError
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.work import ReplyHeader, WorkHeader
from sie.values.work_bytes import array_view, read_extent
from sie.workers.loading.hosting import Host
from sie.workers.loop import Loop
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.scheduling.waiting import Budget
from sie.workers.telemetry import WorkerMetrics
from tests.unit.frontend.engine.hand_worker import HandWorker, generator

MIB = 1 << 20
DIMS = {"wide": 65536}
"""Width of a model's rows, 4 for those that are not here; three replies of a `wide` row fill a segment of 1 MiB."""
FAR_NS = 1 << 62
DEADLINE_S = 60.0
_reply_decoder = msgspec.msgpack.Decoder(ReplyHeader)


def checksum(ids: Sequence[int], width: int = 4) -> list[float]:
    """Return the row that `SumRunner` answers for one item."""
    return [float(sum(ids)), float(len(ids)), float(ids[0]), float(ids[-1])] * (width // 4)


def card(model: str) -> ModelCard:
    return ModelCard(id=model, kind="encoder", dims={"dense": DIMS.get(model, 4)})


class SumRunner:
    """Answer each item with its checksum, and remember what was asked. `raises` maps a first token id to an error."""

    memory_bytes = 7

    def __init__(self, model: ModelCard) -> None:
        self.card = model
        self.steps: list[list[list[int]]] = []
        self.raises: dict[int, Exception] = {}
        self.on_step: Callable[[], None] = lambda: None

    def run(self, step: RowStep) -> StepOutputs:
        return StepOutputs(self.run_tokens(step.inputs))

    def run_tokens(self, token_ids: Any) -> Any:
        items = [ids.tolist() for ids in token_ids]
        self.steps.append(items)
        self.on_step()
        for ids in items:
            if ids[0] in self.raises:
                raise self.raises[ids[0]]
        return np.array([checksum(ids, self.card.dims["dense"]) for ids in items], np.float32)


class Worker:
    """One step loop with its supervisor's end of the control channel."""

    def __init__(self, slot: int, settings: Settings, budget: Budget, max_large_bytes: int) -> None:
        self.slot = slot
        self.generation = 0
        self.is_dead = False
        ours, theirs = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.supervisor, self._channel = ours, theirs
        self.frontends: list[Attachment] = []
        self.runners: dict[str, Any] = {}
        self.build: Callable[[ModelCard], Any] = SumRunner
        self.host = Host("cpu", self._build, theirs.send)
        self.page = InflightPage.create(2 * settings.scheduler.max_step_items)
        self.counters = CounterPage.create(1 << 16)
        self.loop = Loop(
            settings,
            channel=theirs,
            host=self.host,
            page=self.page,
            metrics=WorkerMetrics(self.counters, str(slot)),
            budget=budget,
            large=LargeBudget(max_large_bytes),
            on_loaded=lambda _card: None,
        )

    def _build(self, model: ModelCard, _progress: Callable[[float, str], None], _room: CacheRoom) -> Any:
        runner = self.runners[model.id] = self.build(model)
        return runner

    def publish(self) -> None:
        """End the turn of every frontend's event loop, as far as this worker hears of it."""
        for attachment in self.frontends:
            attachment.publish()

    def poll(self) -> None:
        """Take in what came, and run nothing."""
        self.publish()
        self.loop._poll(0.0)

    def turn(self, times: int = 1) -> None:
        """Turn the step loop without waiting."""
        self.publish()
        for _ in range(times):
            self.loop.run_once(0.0)

    def turn_until(self, is_done: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        self.publish()
        while not is_done():
            assert time.monotonic() < deadline_s, "the worker did not get there in time"
            self.loop.run_once(0.01)

    def load(self, model: str, model_card: ModelCard | None = None) -> None:
        self.supervisor.send(control_messages.Load(model_card or card(model)))
        self.turn_until(lambda: self.host.runner(model))

    def heard(self) -> list[control_messages.Message]:
        """Return what the supervisor's end received."""
        messages: list[control_messages.Message] = []
        while (received := self.supervisor.try_receive()) is not None:
            messages.append(received[0])
        return messages

    def states(self) -> list[tuple[str, str]]:
        """Return (model, state) of the reports that the supervisor's end received."""
        return [
            (report.model, report.state) for report in self.heard() if isinstance(report, control_messages.ModelReport)
        ]

    @property
    def ran(self) -> list[list[list[int]]]:
        """The steps of all models, as lists of token lists."""
        return [step for runner in self.runners.values() for step in runner.steps]

    def close(self) -> None:
        for link in list(self.loop._links.values()):
            self.loop._detach(link)
        self.supervisor.close()
        self._channel.close()
        self.loop._epoll.close()
        for loads in (self.host._loads, self.loop._adapters._loads):
            loads.join()
            if not loads._is_busy:  # its thread would signal a stranger's descriptor
                os.close(loads.event_fd)
        compiler = self.loop._generators._compiler
        if not compiler.num_threads:
            os.close(compiler.event_fd)
        self.page.close()
        self.counters.close()


class Rig:
    """One engine and its workers. Use inside a running event loop."""

    def __init__(self, budget: Budget | None = None, *, max_large_bytes: int = 0, **memory: int) -> None:
        sizes = {
            "request_segment_bytes": MIB,
            "reply_segment_bytes": MIB,
            "large_extent_bytes": MIB,
            "ring_capacity": 64,
        }
        self.settings = Settings(memory=Memory(**{**sizes, **memory}), scheduler=Scheduler(max_step_items=64))
        self.budget = budget or Budget(max_tokens=1000, max_items=64, max_age_ns=10**9)
        self.space = OutboundSpace.create(
            "request",
            self.settings.memory.request_segment_bytes,
            LargeBudget(max_large_bytes),
            large_extent_bytes=self.settings.memory.large_extent_bytes,
        )
        self.entries: dict[str, ModelEntry] = {}
        self.sent: list[Any] = []
        self.engine = ShmEngine(self.settings, self.space, self.entries.get, self.sent.append)
        self.max_large_bytes = max_large_bytes
        self.workers: list[Worker] = []
        self.hand_workers: list[HandWorker] = []
        self._num_generations = 0

    def start_worker(self, *models: str, slot: int | None = None, attach: bool = True) -> Worker:
        """Start a worker that has these models, and attach it."""
        slot = len(self.workers) if slot is None else slot
        worker = Worker(slot, self.settings, self.budget, self.max_large_bytes)
        self.workers.append(worker)
        for model in models:
            worker.load(model)
            known = self.entries.get(model)
            workers = {*(known.workers if known else ()), slot}
            self.tell(model, workers=tuple(sorted(workers)))
        if attach:
            self.attach(worker)
        return worker

    def start_hand_worker(self, model_card: ModelCard | None = None) -> HandWorker:
        """Start a worker that the test plays, which has a model (one that generates), and attach it."""
        self._num_generations += 1
        worker = HandWorker(len(self.workers) + len(self.hand_workers), self._num_generations)
        self.hand_workers.append(worker)
        worker.meet(self.engine, self.space, self.settings.memory.ring_capacity)
        known = model_card or generator()
        self.entries[known.id] = ModelEntry(card=known, state="loaded", workers=(worker.slot,))
        self.engine.place_held()
        return worker

    def attach(self, worker: Worker, frontend: int = 0, frontend_pid: int | None = None) -> None:
        """Attach the engine, as the frontend of this slot and process, to a worker."""
        self._num_generations += 1
        generation = worker.generation = self._num_generations
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        capacity = self.settings.memory.ring_capacity
        pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), generation, self.space, capacity)
        pidfd = os.pidfd_open(frontend_pid or os.getpid())
        worker.supervisor.send(control_messages.Attach(frontend, generation), [ends[1].fileno(), pidfd])
        ends[1].close()
        os.close(pidfd)
        worker.turn(2)  # it sends its offer, then reads ours
        attachment = pending.try_finish()
        assert attachment is not None
        self.engine.attach(worker.slot, attachment)
        worker.frontends.append(attachment)

    def tell(self, model: str, *, workers: tuple[int, ...] = (), recovering: bool = False) -> None:
        """Say what the supervisor says of a model."""
        state, known = "loaded" if workers else "loading", self.entries.get(model)
        made = known.card if known else card(model)
        self.entries[model] = ModelEntry(card=made, state=state, recovering=recovering, workers=workers)

    def die(
        self, worker: Worker | HandWorker, suspects: tuple[int, ...] = (), recovering: tuple[str, ...] = ("m",)
    ) -> None:
        """Let the engine hear from the supervisor that a worker is dead, and that these models come back."""
        worker.is_dead = True
        for model in list(self.entries):
            left = tuple(slot for slot in self.entries[model].workers if slot != worker.slot)
            self.tell(model, workers=left, recovering=not left and model in recovering)
        self.engine.fail_over(worker.slot, worker.generation, suspects)
        self.engine.place_held()

    def submit(self, *items: Sequence[int], model: str = "m", deadline_ns: int = FAR_NS, **header: Any) -> ShmPending:
        """Submit one request of token lists."""
        lengths = [len(ids) for ids in items]
        arrays = [
            ("cu_seqlens", np.cumsum([0, *lengths], dtype=np.int32)),
            ("token_ids", np.array([token for ids in items for token in ids], np.int32)),
        ]
        work = WorkHeader(model, "encode", len(items), (), **header)
        return self.engine.submit(work, arrays, sum(lengths), deadline_ns)

    async def settle(self) -> None:
        """Turn the event loop until what is ready now has been handled, with a tick of the process's in between."""
        for _ in range(4):
            await asyncio.sleep(0)
        for link in self.engine._links.values():
            link.give_back()
        for _ in range(4):
            await asyncio.sleep(0)
        for worker in self.hand_workers:
            worker.drain()

    async def rows(self, pending: ShmPending) -> list[list[float]]:
        """Return the rows of a request that was answered, and release its reply."""
        async with asyncio.timeout(DEADLINE_S):
            reply = await pending.future
        values = read_rows(reply)
        reply.release()
        await self.settle()
        return values

    async def error(self, pending: ShmPending) -> Exception:
        """Return the error of a request that failed."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                reply = await pending.future
            except Exception as error:
                return error
        raise AssertionError(f"answered with {read_rows(reply)}")

    async def serve(self, worker: Worker) -> None:
        """Let a worker do all it has, and the engine hear of it."""
        worker.turn(4)
        while worker.loop._state or worker.loop._steps.begun_model is not None:
            worker.turn()
        await self.settle()

    def assert_all_given_back(self) -> None:
        """Assert that no request extent and, after the live workers' next turn, no reply extent is under a lease."""
        assert self.engine.num_extents == self.engine.num_pending == self.engine.queued_tokens == 0
        for worker in self.workers:
            if worker.is_dead:
                continue
            worker.turn()
            assert not any(link.num_leased for link in worker.loop._links.values())
        assert all(worker.is_dead or not worker.space.num_leased for worker in self.hand_workers)

    def close(self) -> None:
        for link in self.engine._workers:
            self.engine.fail_over(link.slot, link.generation, ())
        for pending in self.engine._held:
            pending.future.cancel()
        for worker in (*self.workers, *self.hand_workers):
            worker.close()
        self.space.close()


def read_rows(reply: ShmReply) -> list[list[float]]:
    """Return a copy of a reply's rows."""
    header, payload = read_extent(reply.view, _reply_decoder)
    return array_view(payload, header.arrays[1]).tolist()


@contextlib.contextmanager
def no_memory() -> Iterator[list[int]]:
    """Refuse each reservation of shared memory; yield the sizes of those that were refused."""
    refused: list[int] = []

    def refuse(nbytes: int) -> None:
        refused.append(nbytes)
        raise ReservationError(f"shared memory needs {nbytes} bytes, but the test leaves none", nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "check_reservation", refuse)
        yield refused


def in_rig(**options: Any) -> Callable[[Callable[[Rig], Any]], Callable[[], None]]:
    """Make a test of an async function that takes a rig; at its end every lease must have ended."""

    def decorate(test: Callable[[Rig], Any]) -> Callable[[], None]:
        async def main() -> None:
            rig = Rig(**options)
            try:
                await test(rig)
                await rig.settle()
                rig.assert_all_given_back()
            finally:
                rig.close()

        def run() -> None:
            asyncio.run(main())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
