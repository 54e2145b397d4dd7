from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest

from sie.shm.extent import begin_extent, is_cancelled, set_cancelled, write_extent, write_pieces
from sie.shm.layout import ProtocolError
from sie.shm.segment import Segment
from sie.values.work import ArrayRef, WorkHeader
from sie.values.work_bytes import MAX_HEADER_BYTES, array_view, extent_bytes, plan_arrays, read_extent

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkHeader)


def _view(nbytes: int = 4096) -> memoryview:
    return memoryview(bytearray(b"\xee" * nbytes))


def _header(*refs: ArrayRef, model: str = "m") -> bytes:
    return _encoder.encode(WorkHeader(model, "encode", 1, refs))


@pytest.mark.parametrize("name_length", [1, 20, 40, 100])
def test_arrays_come_out_as_they_went_in_whatever_the_header_length(name_length: int) -> None:
    arrays = [np.arange(7, dtype="<i4"), np.array([0, 7], "<i4"), np.arange(6, dtype="<f2").reshape(2, 3)]
    plan = plan_arrays((name, array.dtype.str, array.shape) for name, array in zip("abc", arrays, strict=True))
    header = _header(*plan.refs, model="m" * name_length)
    view = _view()

    length = write_extent(view, header, plan.refs, arrays)
    decoded, payload = read_extent(view[:length].toreadonly(), _decoder)

    assert length == extent_bytes(len(header), plan.nbytes)
    assert decoded.model == "m" * name_length
    assert (len(view) - len(_view()) + length - len(payload)) % 64 == 0
    for ref, array in zip(decoded.arrays, arrays, strict=True):
        np.testing.assert_array_equal(array_view(payload, ref), array)


@pytest.mark.parametrize("piece_bytes", [1, 7, 24, 10_000])
def test_piece_by_piece_the_same_bytes_are_written(piece_bytes: int) -> None:
    arrays = [np.arange(7, dtype="<i4"), np.empty(0, "|u1"), np.arange(6, dtype="<f2").reshape(2, 3)]
    plan = plan_arrays((name, array.dtype.str, array.shape) for name, array in zip("abc", arrays, strict=True))
    header = _header(*plan.refs)
    whole, pieces = _view(), _view()
    length = write_extent(whole, header, plan.refs, arrays)
    num_pieces = sum(1 for _ in write_pieces(pieces, header, plan.refs, arrays, piece_bytes))
    assert bytes(pieces[:length]) == bytes(whole[:length])
    assert num_pieces == sum(-(-array.nbytes // piece_bytes) for array in arrays)


def test_arrays_are_aligned_in_a_real_segment() -> None:
    segment = Segment.create("t", 4096)
    plan = plan_arrays([("a", "<i4", (3,)), ("b", "<f8", (2, 2))])
    payload = begin_extent(segment.view[64:], _header(*plan.refs))

    for ref in plan.refs:
        assert array_view(payload, ref).ctypes.data % 64 == 0
    segment.close()


def test_bytes_after_the_prologue_are_those_of_the_drawing() -> None:
    view = _view(256)
    payload = begin_extent(view, b"h" * 50)

    assert bytes(view[:16]) == b"\0\0\0\0" + struct.pack("<I", 50) + bytes(8)
    assert bytes(view[16:66]) == b"h" * 50
    assert len(payload) == 256 - 128


def test_array_written_in_place_is_what_the_peer_reads() -> None:
    view = _view()
    plan = plan_arrays([("dense", "<f4", (2, 3))])
    array_view(begin_extent(view, _header(*plan.refs)), plan.refs[0])[:] = [[1, 2, 3], [4, 5, 6]]
    header, payload = read_extent(view.toreadonly(), _decoder)

    array = array_view(payload, header.arrays[0])
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not array.flags.writeable


@pytest.mark.parametrize("shape", [(0,), (0, 384), (3, 0, 2)])
def test_empty_array_keeps_its_shape(shape: tuple[int, ...]) -> None:
    plan = plan_arrays([("a", "<f4", shape)])

    assert plan.nbytes == 0
    assert array_view(memoryview(b""), plan.refs[0]).shape == shape


def test_cancel_is_one_byte_that_a_new_extent_clears() -> None:
    view = _view()
    begin_extent(view, b"")
    assert not is_cancelled(view)
    set_cancelled(view)
    assert is_cancelled(view.toreadonly())
    begin_extent(view, b"")

    assert not is_cancelled(view)


@pytest.mark.parametrize(("nbytes", "header_bytes"), [(64, 49), (15, 0), (1 << 21, MAX_HEADER_BYTES + 1)])
def test_header_that_does_not_fit_is_refused_by_the_writer(nbytes: int, header_bytes: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        begin_extent(_view(nbytes), bytes(header_bytes))


def test_array_of_another_shape_than_planned_is_refused_by_the_writer() -> None:
    plan = plan_arrays([("a", "<i4", (3,))])
    with pytest.raises(ValueError, match="planned as"):
        write_extent(_view(), b"", plan.refs, [np.arange(4, dtype="<i4")])


@pytest.mark.parametrize("nbytes", [0, 1, 15])
def test_extent_without_room_for_a_prologue_is_a_protocol_error(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="no prologue"):
        read_extent(_view(nbytes), _decoder)


@pytest.mark.parametrize("header_bytes", [49, 2**31, 2**32 - 1])
def test_header_beyond_its_extent_is_a_protocol_error(header_bytes: int) -> None:
    view = _view(64)
    struct.pack_into("<B3xI8x", view, 0, 0, header_bytes)
    with pytest.raises(ProtocolError, match="a header of"):
        read_extent(view, _decoder)


@pytest.mark.parametrize(
    "header",
    [b"", b"\xc1", _encoder.encode(["m"]), _encoder.encode([1, 2, 3, 4]), b"\x91" * 2000, b"\xa4\xff\xff\xff\xff"],
    ids=["empty", "unused-byte", "too-short", "wrong-types", "too-deep", "not-utf-8"],
)
def test_header_that_cannot_be_decoded_is_a_protocol_error(header: bytes) -> None:
    view = _view()
    begin_extent(view, header)
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        read_extent(view, _decoder)


@pytest.mark.parametrize(
    "ref",
    [
        ArrayRef("a", "<f4", (257,), 0),
        ArrayRef("a", "<f4", (1,), 1024),
        ArrayRef("a", "<f4", (1,), 4),
        ArrayRef("a", "<f4", (1,), -64),
        ArrayRef("a", "<f4", (-1,), 0),
        ArrayRef("a", "<f4", (-2, -2), 0),
        ArrayRef("a", "<f4", (2**32, 2**32), 0),
        ArrayRef("a", "<f4", (2**62, 4), 2**64 - 64),
        ArrayRef("a", "<f4", (0, 2**64 - 1), 0),
        ArrayRef("a", "<f4", (0, 2**62, 2**62), 0),
        ArrayRef("a", "<f4", (1,) * 9, 0),
        ArrayRef("a", "|O", (1,), 0),
        ArrayRef("a", ">f4", (1,), 0),
        ArrayRef("a", "|V999999999", (1,), 0),
        ArrayRef("a", "", (1,), 0),
    ],
)
def test_ref_outside_its_payload_is_a_protocol_error(ref: ArrayRef) -> None:
    with pytest.raises(ProtocolError, match="an array"):
        array_view(_view(1024), ref)
