from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sie.shm.extent import set_cancelled, write_extent
from sie.shm.layout import ERROR, FLAG_ALONE, REPLY, Descriptor, ProtocolError
from sie.shm.pool import ExtentPool
from sie.values.errors import InputTooLong, WireError, from_wire
from sie.values.work import ReplyHeader, WorkHeader
from sie.values.work_bytes import array_view, extent_bytes, plan_arrays, read_extent
from sie.workers.requests.worker_request import read_request, reply_layout

_encode = msgspec.msgpack.Encoder().encode
BYTES = ("text", "pixels")


class MemoryLink:
    """A link over plain memory that keeps what was sent."""

    def __init__(self, extent: memoryview, reply_bytes: int = 4096) -> None:
        self.slot = 3
        self.extent = extent
        self.pool = ExtentPool(memoryview(bytearray(reply_bytes)))
        self.sent = []
        self.waiting = []

    def retry_later(self, try_send):
        self.waiting.append(try_send)

    def view(self, descriptor):
        return self.extent[: descriptor.length].toreadonly()

    def lease(self, nbytes):
        return self.pool.lease(nbytes)

    def can_hold(self, nbytes):
        return nbytes <= self.pool.free_bytes

    def reply(self, kind, request_id, lease, length):
        self.sent.append((kind, request_id, lease, length))
        if lease is not None:
            lease.hand_over(request_id)


def extent_of(num_items, **arrays):
    """Return the bytes of a request with these int32 (or uint8, for `text` and `pixels`) arrays."""
    values = {name: np.asarray(value, np.uint8 if name in BYTES else np.int32) for name, value in arrays.items()}
    plan = plan_arrays([(name, value.dtype.str, value.shape) for name, value in values.items()])
    header = _encode(WorkHeader("m", "encode", num_items, plan.refs))
    view = memoryview(bytearray(extent_bytes(len(header), plan.nbytes)))
    write_extent(view, header, plan.refs, list(values.values()))
    return view


def request_of(link, flags=0, deadline_ns=50):
    return read_request(link, Descriptor(1, flags, 1, 77, 0, len(link.extent), deadline_ns, 0, 0, 1))


@pytest.fixture
def link():
    return MemoryLink(extent_of(2, cu_seqlens=[0, 3, 5], token_ids=[1, 2, 3, 4, 5]))


def test_items_are_read_without_a_copy(link):
    request = request_of(link, flags=FLAG_ALONE)

    assert request.costs == [3, 2]
    assert [ids.tolist() for ids in request.inputs] == [[1, 2, 3], [4, 5]]
    assert not any(ids.flags.owndata or ids.flags.writeable for ids in request.inputs)
    assert (request.deadline_ns, request.is_alone, request.inflight_entry) == (50, True, (3, 77))


def test_text_comes_as_bytes_with_costs_of_its_own():
    text = "héllo wörld".encode()
    request = request_of(
        MemoryLink(extent_of(2, cu_seqlens=[0, 2, 4], text=list(text), text_offsets=[0, 7, len(text)]))
    )

    assert request.costs == [2, 2]
    assert [bytes(piece).decode() for piece in request.inputs] == ["héllo ", "wörld"]


@pytest.mark.parametrize(
    ("num_items", "arrays"),
    [
        (1, {"token_ids": [1]}),
        (1, {"cu_seqlens": [0, 1]}),
        (1, {"cu_seqlens": [1, 1], "token_ids": [1]}),
        (2, {"cu_seqlens": [0, 1], "token_ids": [1]}),
        (0, {"cu_seqlens": [0], "token_ids": [1]}),
        (-1, {"cu_seqlens": [], "token_ids": [1]}),
        (1, {"cu_seqlens": [[0, 1]], "token_ids": [1]}),
        (2, {"cu_seqlens": [0, 2, 1], "token_ids": [1]}),
        (1, {"cu_seqlens": [0, 2], "token_ids": [1]}),
        (1, {"cu_seqlens": [0, 1], "token_ids": [[1]]}),
        (1, {"cu_seqlens": [0, 1], "text": [65]}),
        (1, {"cu_seqlens": [0, 1], "text": [65], "text_offsets": [0, 2]}),
        (1, {"cu_seqlens": [0, 1], "text": [65], "text_offsets": [0]}),
        (1, {"cu_seqlens": [0, 1], "text": [[65]], "text_offsets": [0, 1]}),
    ],
)
def test_extent_that_contradicts_itself_is_a_protocol_error(num_items, arrays):
    with pytest.raises(ProtocolError):
        request_of(MemoryLink(extent_of(num_items, **arrays)))


def test_every_changed_byte_of_a_header_is_read_or_refused(link):
    """A frontend's memory may hold anything: reading it ends in a request or in ProtocolError, never in a crash."""
    num_refused = 0
    for position in range(1, 64):
        for value in (0, 1, 0x7F, 0x80, 0xC1, 0xFF):
            extent = memoryview(bytearray(link.extent))
            extent[position] = value
            try:
                request = request_of(MemoryLink(extent))
            except ProtocolError:
                num_refused += 1
            else:
                assert len(request.costs) == len(request.inputs) == request.num_left
    assert num_refused > 50


def test_reply_holds_rows_in_their_places_and_the_times(link):
    request = request_of(link)
    assert request.try_reserve(reply_layout(2, "<f4", 2), now_ns=1000)
    request.inference_ns, request.postprocessing_ns = 20, 3
    request.put_rows(1, 1, memoryview(np.array([3, 4], np.float32)).cast("B"))
    assert request.num_left == 1
    request.put_rows(0, 1, memoryview(np.array([1, 2], np.float32)).cast("B"))
    assert request.try_reply()

    ((kind, request_id, lease, length),) = link.sent
    assert (kind, request_id, request.ended) == (REPLY, 77, True)
    header, payload = read_extent(lease.view[:length], msgspec.msgpack.Decoder(ReplyHeader))
    times, rows = (array_view(payload, ref) for ref in header.arrays)
    assert times.tolist() == [1000, 20, 3]
    assert rows.tolist() == [[1, 2], [3, 4]]


def test_replies_of_one_shape_have_the_same_bytes_before_their_payload():
    assert reply_layout(2, "<f4", 8) is reply_layout(2, "<f4", 8)
    assert reply_layout(2, "<f4", 8).head != reply_layout(3, "<f4", 8).head


def test_no_room_for_the_reply_changes_nothing(link):
    whole = link.pool.lease(4096)
    request = request_of(link)
    assert not request.try_reserve(reply_layout(2, "<f4", 2), now_ns=1)
    assert not request.may_run
    whole.end()
    assert request.try_reserve(reply_layout(2, "<f4", 2), now_ns=2)


def test_cancelled_request_is_acknowledged_and_its_reply_memory_freed(link):
    request = request_of(link)
    assert not request.is_cancelled
    set_cancelled(link.extent)
    assert request.is_cancelled
    assert request.try_reserve(reply_layout(2, "<f4", 2), now_ns=1)
    request.cancel()

    assert link.sent == [(ERROR, 77, None, 0)]
    assert (request.ended, link.pool.num_leased) == (True, 0)


def test_error_crosses_whole_and_frees_the_reply_memory(link):
    request = request_of(link)
    assert request.try_reserve(reply_layout(2, "<f4", 2), now_ns=1)
    request.fail(InputTooLong("too long", extras={"items": [1]}))

    ((kind, _, lease, length),) = link.sent
    wire, _ = read_extent(lease.view[:length], msgspec.msgpack.Decoder(WireError))
    error = from_wire(wire)
    assert (kind, type(error), error.message, error.extras) == (ERROR, InputTooLong, "too long", {"items": [1]})
    assert link.pool.num_leased == 1, "the error's own extent"


def test_error_without_room_for_its_text_is_put_off_and_told_later(link):
    whole = link.pool.lease(4096)
    request = request_of(link)
    request.fail(InputTooLong("too long"))
    assert request.ended
    (try_send,) = link.waiting
    assert (try_send(), link.sent) == (False, [])
    whole.end()
    assert try_send()
    (_, _, lease, length) = link.sent[0]
    wire, _ = read_extent(lease.view[:length], msgspec.msgpack.Decoder(WireError))
    assert from_wire(wire).message == "too long"
