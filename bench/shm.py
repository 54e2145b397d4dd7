"""Measure the shared memory between two processes: ring, leases, extents, and the round trip of one descriptor.

Each figure is the distribution over many short blocks of the same call, so that a busy neighbour shows in p99 and not
in p50.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import click
import msgspec
import numpy as np

from bench.report import facts, print_facts, print_table
from sie.shm.attach import Attachment
from sie.shm.extent import write_extent
from sie.shm.large import LargeBudget
from sie.shm.layout import REPLY, SUBMIT
from sie.shm.ring import RingConsumer, RingProducer
from sie.shm.space import OutboundSpace
from sie.values.work import WorkHeader
from sie.values.work_bytes import array_view, extent_bytes, plan_arrays, read_extent

_SEGMENT_BYTES = 4 << 20
_CAPACITY = 1024
_NUM_BLOCKS = 400
_CALLS_A_BLOCK = 64
_NUM_ROUND_TRIPS = 4000
_TIMEOUT_S = 10.0
_PERCENTILES = (50, 99, 100)
_ARRAY_SIZES = (16, 512, 65536)


@click.command()
def main() -> None:
    """Measure rings, leases and extents."""
    known = facts(
        "Shared memory",
        f"{_NUM_BLOCKS} blocks of {_CALLS_A_BLOCK} calls each in one process; {_NUM_ROUND_TRIPS} round trips, one at a "
        "time, between two processes that wait in poll",
    )
    print_facts(known)
    rows = [*_ring_rows(), _lease_row(), *_extent_rows(), _round_trip_row()]
    print_table(("call", "p50 us", "p99 us", "max us"), rows)


def open_ring(capacity: int) -> tuple[RingProducer, RingConsumer]:
    """Return both ends of a ring, in this process; the caller closes them."""
    producer = RingProducer.create(capacity)
    ring_fd, bell, credit = (os.dup(fd) for fd in producer.fds)
    return producer, RingConsumer.open(ring_fd, bell, credit, capacity)


def _ring_rows() -> list[list[str]]:
    producer, consumer = open_ring(_CAPACITY)

    def push_drain() -> None:
        producer.push(SUBMIT, 0, 1, 1, 0, 64, 0, 0, 0, 1)
        consumer.drain()

    many = [(REPLY, number, 0, 64) for number in range(32)]

    def push_drain_many() -> None:
        producer.stage_extents(1, many)
        producer.publish()
        consumer.drain()

    rows = [_time("push and drain, 1 descriptor", push_drain), _time("push and drain, 32 descriptors", push_drain_many)]
    consumer.close()
    producer.close()
    return rows


def _lease_row() -> list[str]:
    space = OutboundSpace.create("bench", _SEGMENT_BYTES, LargeBudget(0))

    def lease_end() -> None:
        lease = space.lease(1024)
        assert lease is not None
        lease.end()

    row = _time("lease and end, 1 KiB", lease_end)
    space.close()
    return row


def _extent_rows() -> list[list[str]]:
    space = OutboundSpace.create("bench", _SEGMENT_BYTES, LargeBudget(0))
    encode, decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(WorkHeader)
    rows: list[list[str]] = []
    for size in _ARRAY_SIZES:
        array = np.arange(size, dtype=np.int32)
        plan = plan_arrays([("token_ids", "<i4", (size,))])
        header = encode(WorkHeader("model", "encode", 1, plan.refs))
        lease = space.lease(extent_bytes(len(header), plan.nbytes))
        assert lease is not None
        view = lease.view
        length = write_extent(view, header, plan.refs, [array])

        write = partial(write_extent, view, header, plan.refs, [array])
        rows.append(_time(f"write an extent, {array.nbytes:,} bytes", write))
        rows.append(_time("  and read it", partial(_read, view[:length], decoder)))
    space.close()
    return rows


def _read(view: memoryview, decoder: msgspec.msgpack.Decoder[WorkHeader]) -> None:
    header, payload = read_extent(view, decoder)
    array_view(payload, header.arrays[0])


def _round_trip_row() -> list[str]:
    """Send one descriptor with a 1 KiB extent, wait for the answer, release it; then the next."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    context = multiprocessing.get_context("spawn")
    pipe, their_pipe = context.Pipe()
    peer = context.Process(target=_echo, args=(their_pipe,))
    peer.start()
    assert peer.pid is not None
    send_handle(pipe, theirs.fileno(), peer.pid)
    theirs.close()
    space = OutboundSpace.create("request", _SEGMENT_BYTES, LargeBudget(0))
    link = Attachment.connect(ours, os.pidfd_open(peer.pid), 1, space, _CAPACITY, timeout_s=_TIMEOUT_S)
    bell = select.poll()
    bell.register(link.bell_fd, select.POLLIN)
    times_ns: list[int] = []
    for number in range(_NUM_ROUND_TRIPS):
        began_ns = time.perf_counter_ns()
        lease = space.lease(1024)
        assert lease is not None
        link.push(SUBMIT, 0, number, lease.address, 1024)
        lease.hand_over(number)
        if not bell.poll(_TIMEOUT_S * 1000):
            raise TimeoutError("the other process does not answer")
        for descriptor in link.drain():
            link.view(descriptor)
            lease.end()
            link.push_release([descriptor.offset])
        times_ns.append(time.perf_counter_ns() - began_ns)
    link.close()
    space.close()
    peer.join(_TIMEOUT_S)
    peer.kill()  # does nothing to one that has ended
    return _row("round trip between two processes", times_ns[len(times_ns) // 10 :])


def _echo(pipe: Connection) -> None:
    """Answer every request with an extent of the same size, until the other end closes."""
    sock = socket.socket(fileno=recv_handle(pipe))
    space = OutboundSpace.create("reply", _SEGMENT_BYTES, LargeBudget(0))
    parent = os.pidfd_open(os.getppid())
    link = Attachment.connect(sock, parent, 1, space, _CAPACITY, timeout_s=_TIMEOUT_S)
    wake = select.poll()
    wake.register(link.bell_fd, select.POLLIN)
    wake.register(link.sock_fd, select.POLLIN)
    while True:
        if not wake.poll(_TIMEOUT_S * 1000):
            return
        for descriptor in link.drain():
            if descriptor.kind != SUBMIT:
                space.end_released(descriptor.offset)
                continue
            lease = space.lease(descriptor.length)
            assert lease is not None
            link.push(REPLY, 0, descriptor.request_id, lease.address, descriptor.length)
            lease.hand_over(descriptor.request_id)
        if not link.read_socket():
            return


def _time(name: str, call: Callable[[], object]) -> list[str]:
    times_ns: list[float] = []
    for _ in range(_NUM_BLOCKS):
        began_ns = time.perf_counter_ns()
        for _ in range(_CALLS_A_BLOCK):
            call()
        times_ns.append((time.perf_counter_ns() - began_ns) / _CALLS_A_BLOCK)
    return _row(name, times_ns)


def _row(name: str, times_ns: list[int] | list[float]) -> list[str]:
    return [name, *(f"{value / 1e3:.2f}" for value in np.percentile(times_ns, _PERCENTILES))]
