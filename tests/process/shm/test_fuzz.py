"""Random and nearly correct bytes from a peer: each gives a typed refusal or a view inside the peer's own segment."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.extent import begin_extent
from sie.shm.large import LargeBudget
from sie.shm.layout import DESCRIPTOR, Descriptor, ProtocolError
from sie.shm.space import OutboundSpace
from sie.values.work import ArrayRef, WorkHeader
from sie.values.work_bytes import PROLOGUE_BYTES, array_view, plan_arrays, read_extent

_SEGMENT_BYTES = 64 * 1024
_CAPACITY = 64
_NUM_DESCRIPTORS = 40_000
_NUM_HEADERS = 20_000
_NUM_REFS = 40_000
_PATTERN = 0xA7

_decoder = msgspec.msgpack.Decoder(WorkHeader)
_encoder = msgspec.msgpack.Encoder()


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("SIE_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"SIE_TEST_SEED={seed}")
    return random.Random(seed)


def _edge(rng: random.Random, bits: int) -> int:
    """Return a number that a bounds check is likely to get wrong."""
    base = rng.choice([0, 1, 15, 16, 63, 64, _SEGMENT_BYTES, 1 << 31, 1 << 32, 1 << 48, 1 << 62, 1 << 63, 1 << 64])
    value = rng.choice([base, base - 1, base + 1, base - 64, base + 64, rng.randrange(_SEGMENT_BYTES), 64 * base])
    return value % (1 << bits)


def _random_descriptor(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(64)
    offset = rng.choice([64 * rng.randrange(_SEGMENT_BYTES // 64), _edge(rng, 64)])
    length = rng.choice([rng.randrange(_SEGMENT_BYTES), _edge(rng, 64)])
    return DESCRIPTOR.pack(rng.randrange(1, 6), 0, rng.choice([1, 1, 1, 2]), 9, offset, length, 0, 0, 0, 1)


def _attach() -> tuple[Attachment, Attachment, Callable[[], None]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    spaces = [OutboundSpace.create(name, _SEGMENT_BYTES, LargeBudget(0)) for name in "fw"]
    pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), 1, spaces[0], _CAPACITY)
    worker = Attachment.connect(ends[1], os.pidfd_open(os.getpid()), 1, spaces[1], _CAPACITY, timeout_s=60)
    frontend = pending.try_finish()
    assert frontend is not None
    lease = spaces[0].lease(_SEGMENT_BYTES)
    assert lease is not None
    lease.view[:] = bytes([_PATTERN]) * _SEGMENT_BYTES

    def close() -> None:
        for part in (frontend, worker, *spaces):
            part.close()

    return frontend, worker, close


def test_fuzzed_descriptors_never_leave_the_peers_segment(rng: random.Random) -> None:
    frontend, worker, close = _attach()
    num_seen = num_stale = num_views = num_refused = 0
    while num_seen < _NUM_DESCRIPTORS:
        num = rng.randrange(1, _CAPACITY + 1)
        producer = frontend._producer
        for _ in range(num):
            # Straight into the ring's memory: a peer that is broken, not one that uses `push`.
            producer._view[producer._tail : producer._tail + 64] = _random_descriptor(rng)
            producer._tail = (producer._tail + 64) % (_CAPACITY * 64)
        os.eventfd_write(producer.fds[1], num)
        num_seen += num
        try:
            drained = worker.drain()
        except ProtocolError:
            num_refused += 1
            continue
        num_stale += num - len(drained)
        for descriptor in drained:
            try:
                view = worker.view(descriptor)
            except ProtocolError:
                num_refused += 1
                continue
            num_views += 1
            assert view.readonly
            assert len(view) == descriptor.length <= _SEGMENT_BYTES - descriptor.offset
            assert view[0] == view[-1] == _PATTERN

    assert min(num_stale, num_views, num_refused) > 100
    close()


def _good_extent() -> tuple[bytearray, int]:
    plan = plan_arrays([("token_ids", "<i4", (50,)), ("cu_seqlens", "<i4", (3,))])
    header = _encoder.encode(WorkHeader("model", "encode", 2, plan.refs))
    extent = bytearray(1024)
    begin_extent(memoryview(extent), header)
    return extent, PROLOGUE_BYTES + len(header)


def test_fuzzed_headers_are_refused_or_give_arrays_inside_the_extent(rng: random.Random) -> None:
    good, end = _good_extent()
    num_read = num_refused = 0
    for _ in range(_NUM_HEADERS):
        extent = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            extent[rng.randrange(4, end)] = rng.randrange(256)
        if rng.random() < 0.1:
            struct.pack_into("<I", extent, 4, _edge(rng, 32))
        view = memoryview(extent)[: rng.choice([1024, 1024, rng.randrange(1024)])].toreadonly()
        try:
            header, payload = read_extent(view, _decoder)
            for ref in header.arrays:
                _assert_inside(array_view(payload, ref), view)
            num_read += 1
        except ProtocolError:
            num_refused += 1

    assert min(num_read, num_refused) > 100


def _assert_inside(array: np.ndarray, view: memoryview) -> None:
    if array.size:
        start = array.ctypes.data - np.frombuffer(view, np.uint8).ctypes.data
        assert start >= 0
        assert start + array.nbytes <= len(view)
        assert not array.flags.writeable
        array.sum()  # reads every byte


def test_fuzzed_refs_are_refused_or_lie_inside_the_payload(rng: random.Random) -> None:
    payload = memoryview(bytearray(_SEGMENT_BYTES)).toreadonly()
    num_views = num_refused = 0
    for _ in range(_NUM_REFS):
        shape = tuple(rng.choice([_edge(rng, 64), -_edge(rng, 63), rng.randrange(64)]) if rng.random() < 0.3
                      else rng.randrange(40) for _ in range(rng.randrange(10)))  # fmt: skip
        dtype = rng.choice(["<f4", "<f2", "|i1", "|u1", "<i4", "<i8", "|b1", "|O", ">f4", "<U9", "", "x" * 99])
        offset = rng.choice([64 * rng.randrange(1024), _edge(rng, 64), -_edge(rng, 32)])
        try:
            array = array_view(payload, ArrayRef("a", dtype, shape, offset))
        except ProtocolError:
            num_refused += 1
            continue
        num_views += 1
        assert array.shape == shape
        _assert_inside(array, payload)

    assert min(num_views, num_refused) > 100


def test_fuzzed_socket_messages_are_refused_and_leave_no_descriptor_open(
    rng: random.Random, new_fds: Callable[[], set[tuple[str, str]]]
) -> None:
    num_refused = 0
    for _ in range(300):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        space = OutboundSpace.create("f", 4096, LargeBudget(0))
        offered = bytearray(_encoder.encode([1, 1, 1, 4096, 8]))
        for _ in range(rng.randrange(3)):
            offered[rng.randrange(len(offered))] = rng.randrange(256)
        fds = [space.fd, *(rng.choice([space.fd, ours.fileno(), 2]) for _ in range(rng.randrange(6)))]
        socket.send_fds(theirs, [bytes(offered) or b"x"], fds)
        theirs.close()
        with pytest.raises((ProtocolError, ConnectionError)):
            Attachment.connect(ours, os.pidfd_open(os.getpid()), 1, space, 8, timeout_s=60)
        num_refused += 1
        space.close()

    assert num_refused == 300
    assert not new_fds()


def test_descriptor_that_changes_after_the_drain_changes_nothing(rng: random.Random) -> None:
    frontend, worker, close = _attach()
    assert frontend.push(1, 0, 9, 64, 128)
    (descriptor,) = worker.drain()
    frontend._producer._view[:64] = rng.randbytes(64)

    assert descriptor == Descriptor(1, 0, 1, 9, 64, 128, 0, 0, 0, 1)
    assert len(worker.view(descriptor)) == 128
    close()
