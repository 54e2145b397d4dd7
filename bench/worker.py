"""Measure what a worker's own code costs: the step loop from doorbell to reply, with a model that computes nothing.

The loop runs in this process, and its peer's part runs between its iterations, outside of the measurement.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import click
import numpy as np

from bench.report import facts, print_facts, print_table, save
from sie.config.settings import Settings
from sie.frontend.engine.request_layout import lay_out
from sie.ipc.channel import Channel
from sie.ipc.messages import Attach, Load
from sie.runtime.child_setup import calm_collector
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.extent import write_extent
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.layout import REPLY, SUBMIT
from sie.shm.pages import CounterPage
from sie.shm.pool import Lease
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.work import WorkHeader
from sie.workers.loading.hosting import Host
from sie.workers.loop import Loop
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.packed.batch import pack_sequences
from sie.workers.scheduling.waiting import Budget
from sie.workers.telemetry import WorkerMetrics

_DIM: Final = 384
_MAX_ITEMS: Final = 512
_SEGMENT_BYTES: Final = 64 << 20
_FAR_NS: Final = 1 << 62
_CROWDS: Final = ((1, 1), (8, 1), (32, 1), (64, 1), (1, 8), (8, 8), (1, 32), (4, 32), (64, 32))
"""Requests that arrive together, and texts a request. The last crowd takes several steps."""
_TEXTS_A_CASE: Final = 20_000
_LEAST_CROWDS: Final = 60


class _NoModel:
    """Answers each text with a row that exists already."""

    memory_bytes = 0

    def __init__(self, card: ModelCard, *, packs: bool) -> None:
        self.card = card
        self._packs = packs
        self._rows = np.ones((_MAX_ITEMS, _DIM), np.float32)

    def run(self, step: RowStep) -> StepOutputs:
        """Return a row for each input, and pack the token ids first if asked to."""
        if self._packs:
            pack_sequences(step.inputs)
        return StepOutputs(self._rows[: len(step.inputs)])


class _Bench(NamedTuple):
    """A step loop and its frontend's end of the rings."""

    loop: Loop
    attachment: Attachment
    space: OutboundSpace


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Measurements of each crowd.")
@click.option("--packs", is_flag=True, help="Also pack the token ids of each step, as an encoder does first.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(rounds: int, packs: bool, is_saved: bool) -> None:
    """Measure a worker's own processor time for each text."""
    known = facts(
        "A worker's own code",
        f"token ids of texts of 8 to 16 tokens, {_DIM} dimensions in float32, no arithmetic of a model"
        f"{', but steps are packed' if packs else ''}; steps of at most {_MAX_ITEMS} texts; processor time of the loop's "
        f"thread; {rounds} rounds",
    )
    print_facts(known)
    found: dict[tuple[int, int], list[float]] = {}
    with _open(packs=packs) as bench:
        calm_collector()
        for (num_requests, num_texts), _ in itertools.product(_CROWDS, range(rounds)):
            times_us = _measure(bench, num_requests, num_texts)
            found.setdefault((num_requests, num_texts), []).extend(times_us)
    rows = [[str(requests), str(texts), *(f"{value:.2f}" for value in np.percentile(times_us, (0, 50, 99)))]
            for (requests, texts), times_us in found.items()]  # fmt: skip
    print_table(("requests", "texts a request", "us a text, least", "p50", "p99"), rows)
    if is_saved:
        save("worker", known, {"crowds": [{"requests": requests, "texts": texts, "p50_us": float(np.median(times_us))}
                                          for (requests, texts), times_us in found.items()]})  # fmt: skip


@contextmanager
def _open(*, packs: bool) -> Iterator[_Bench]:
    """Start a step loop that has the model `m`, and attach a frontend to it."""
    settings = Settings()
    ours, theirs = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    page, counters = InflightPage.create(2 * _MAX_ITEMS), CounterPage.create(1 << 18)
    host = Host("cpu", lambda card, _progress, _room: _model(card, packs=packs), theirs.send)
    loop = Loop(
        settings, channel=theirs, host=host, page=page, metrics=WorkerMetrics(counters, "0"), large=LargeBudget(0),
        budget=Budget(max_tokens=1 << 30, max_items=_MAX_ITEMS, max_age_ns=1 << 40), on_loaded=lambda _card: None,
    )  # fmt: skip
    ours.send(Load(ModelCard(id="m", kind="encoder", dims={"dense": _DIM})))
    while not host.runner("m"):
        loop.run_once(0.01)
    space = OutboundSpace.create("bench", _SEGMENT_BYTES, LargeBudget(0))
    attachment = _attach(loop, ours, space, settings.memory.ring_capacity)
    yield _Bench(loop, attachment, space)
    attachment.close()
    space.close()


def _model(card: ModelCard, *, packs: bool) -> Any:
    return _NoModel(card, packs=packs)


def _attach(loop: Loop, supervisor: Channel, space: OutboundSpace, capacity: int) -> Attachment:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), 1, space, capacity)
    pidfd = os.pidfd_open(os.getpid())
    supervisor.send(Attach(0, 1), [ends[1].fileno(), pidfd])
    ends[1].close()
    os.close(pidfd)
    while (attachment := pending.try_finish()) is None:
        loop.run_once(0.01)
    loop.run_once(0.01)
    return attachment


def _measure(bench: _Bench, num_requests: int, num_texts: int) -> list[float]:
    """Return the microseconds of each text in many crowds of the same requests."""
    requests = [_request(bench.space, num_texts, seed) for seed in range(num_requests)]
    num_crowds = max(_LEAST_CROWDS, _TEXTS_A_CASE // (num_requests * num_texts))
    times_ns = [_answer(bench, requests) for _ in range(num_crowds + 10)]
    for lease, _ in requests:
        lease.end()
    return [time_ns / 1e3 / (num_requests * num_texts) for time_ns in times_ns[10:]]


def _request(space: OutboundSpace, num_texts: int, seed: int) -> tuple[Lease, int]:
    """Return a request's extent and its length."""
    random = np.random.default_rng(seed)
    bounds = np.cumsum([0, *random.integers(8, 17, num_texts)], dtype=np.int32)
    arrays = [("cu_seqlens", bounds), ("token_ids", random.integers(1, 30000, bounds[-1]).astype(np.int32))]
    layout = lay_out(WorkHeader("m", "encode", num_texts, ()), arrays)
    lease = space.lease(layout.nbytes)
    assert lease is not None
    return lease, write_extent(lease.view, layout.header, layout.refs, [array for _, array in arrays])


def _answer(bench: _Bench, requests: list[tuple[Lease, int]]) -> int:
    """Submit requests together, and release their replies; return the loop's processor time in nanoseconds."""
    loop, attachment, _ = bench
    for number, (lease, length) in enumerate(requests):
        assert attachment.stage(SUBMIT, 0, number, lease.address, length, _FAR_NS)
    attachment.publish()
    num_left, spent_ns = len(requests), 0
    while num_left:
        began_ns = time.thread_time_ns()
        loop.run_once(0.0)
        spent_ns += time.thread_time_ns() - began_ns
        replies = attachment.drain()
        assert all(reply.kind == REPLY for reply in replies)
        attachment.push_release([reply.offset for reply in replies])
        num_left -= len(replies)
    return spent_ns
