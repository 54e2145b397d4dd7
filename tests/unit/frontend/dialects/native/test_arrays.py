from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sie.frontend.dialects.native.arrays import array_header, array_prefix, bin_header


def pack_array(array):
    return array_prefix(array.dtype.str, array.shape, array.nbytes) + array.tobytes()


def test_leading_bytes_are_those_of_the_reference():
    expected = bytes.fromhex(
        "85 c402 6e64 c3 c404 74797065 a3 3c6634 c404 6b696e64 c400 c405 7368617065 91 cd0180 c404 64617461 c50600"
    )
    assert array_prefix("<f4", (384,), 1536) == expected


@pytest.mark.parametrize("length", [0, 15, 16, 65_535, 65_536])
def test_headers_equal_a_msgpack_encoders(length):
    assert msgspec.msgpack.encode([None] * length) == array_header(length) + b"\xc0" * length
    assert msgspec.msgpack.encode(b"x" * length) == bin_header(length) + b"x" * length


@pytest.mark.parametrize("length", [255, 256, 70_000])
def test_bin_headers_grow_with_the_length(length):
    assert msgspec.msgpack.encode(b"x" * length) == bin_header(length) + b"x" * length


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "|i1", "|u1"])
@pytest.mark.parametrize("shape", [(1,), (384,), (3, 4), (70_000,)])
def test_other_decoders_read_the_same_array(dtype, shape):
    array = (np.arange(np.prod(shape)) % 100).reshape(shape).astype(dtype)
    packed = pack_array(array)
    plain = msgspec.msgpack.decode(packed, type=dict[bytes, object])
    assert list(plain) == [b"nd", b"type", b"kind", b"shape", b"data"]
    assert (plain[b"nd"], plain[b"type"], plain[b"kind"]) == (True, dtype, b"")
    assert plain[b"shape"] == list(shape)
    assert plain[b"data"] == array.tobytes()


@pytest.mark.parametrize("shape", [(384,), (3, 4)])
def test_msgpack_numpy_reads_the_array(shape):
    msgpack = pytest.importorskip("msgpack")
    msgpack_numpy = pytest.importorskip("msgpack_numpy")
    array = np.random.default_rng(1).random(shape, np.float32)
    assert pack_array(array) == msgpack.packb(array, default=msgpack_numpy.encode)
    decoded = msgpack.unpackb(pack_array(array), object_hook=msgpack_numpy.decode)
    np.testing.assert_array_equal(decoded, array)
