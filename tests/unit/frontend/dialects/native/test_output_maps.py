"""Sparse and multivector items: byte for byte from the wire's rules, and as `sie-sdk` reads them."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from sie.frontend.dialects.native import encode_reply
from sie.frontend.operations.resolve import resolve_encode
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.inference import EncodeReply, EncodeRequest, RaggedRows, RowArray, Timing

INDICES = np.array([1, 300, 2], "<i4")
VALUES = np.array([0.5, 1.0, 2.0], "<f4")
ROWS = np.arange(6, dtype="<f4").reshape(3, 2)


def as_bytes(array):
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def make_reply(dense=None, sparse=None, rows=None, *, ids=(), output_dtype="float32", num_items=2):
    return EncodeReply(
        model="m",
        ids=list(ids),
        num_items=num_items,
        values=memoryview(b"") if dense is None else as_bytes(dense),
        dtype="<f4" if dense is None else dense.dtype.str,
        width=0 if dense is None else dense.shape[1],
        dims=2,
        output_dtype=output_dtype,
        input_tokens=3,
        timing=Timing(total_ms=1.0),
        ragged={name: own for name, own in (("sparse", sparse), ("multivector", rows)) if own is not None},
    )


def make_sparse(values=VALUES):
    return sparse_rows(30522, [0, 2, 3], INDICES, values)


def sparse_rows(dims, offsets, indices, values):
    return RaggedRows(dims, offsets, (RowArray("<i4", as_bytes(indices)), RowArray(values.dtype.str, as_bytes(values))))


def make_rows(rows=ROWS, dims=2):
    return RaggedRows(dims, [0, 1, len(rows)], (RowArray(rows.dtype.str, as_bytes(rows), rows.shape[1]),))


def test_items_byte_for_byte():
    body = encode_reply.encode_reply(make_reply(sparse=make_sparse(), rows=make_rows(), ids=["x", None]), True)
    array = "85 c402 6e64 c3 c404 74797065 a3 {} c404 6b696e64 c400 c405 7368617065 {} c404 64617461 c4 {}"
    float32 = "3c6634"
    expected = (
        "84 a5 6d6f64656c a1 6d a5 6974656d73 92"
        "83 a2 6964 a1 78"
        "a6 737061727365 84 a4 64696d73 cd 773a a5 6474797065 a7 666c6f61743332"
        "a7 696e6469636573" + array.format("3c6934", "91 02", "08 01000000 2c010000")
        + "a6 76616c756573" + array.format(float32, "91 02", "08 0000003f 0000803f")
        + "ab 6d756c7469766563746f72 84 aa 746f6b656e5f64696d73 02 aa 6e756d5f746f6b656e73 01"
        "a5 6474797065 a7 666c6f61743332 a6 76616c756573" + array.format(float32, "92 01 02", "08 00000000 0000803f")
        + "82"
        "a6 737061727365 84 a4 64696d73 cd 773a a5 6474797065 a7 666c6f61743332"
        "a7 696e6469636573" + array.format("3c6934", "91 01", "04 02000000")
        + "a6 76616c756573" + array.format(float32, "91 01", "04 00000040")
        + "ab 6d756c7469766563746f72 84 aa 746f6b656e5f64696d73 02 aa 6e756d5f746f6b656e73 02"
        "a5 6474797065 a7 666c6f61743332 a6 76616c756573"
        + array.format(float32, "92 02 02", "10 00000040 00004040 00008040 0000a040")
    )  # fmt: skip
    assert body[: len(bytes.fromhex(expected))] == bytes.fromhex(expected)
    assert body[len(bytes.fromhex(expected)) :].startswith(b"\xa6timing")


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_sdk_reads_every_output(dtype):
    unpackb = pytest.importorskip("sie_sdk._msgpack").unpackb
    parse = pytest.importorskip("sie_sdk.client._shared").parse_encode_results
    dense = np.array([[1, 2], [3, 4]], "<f4")
    reply = make_reply(dense, make_sparse(VALUES.astype(dtype)), make_rows(ROWS.astype(dtype)), ids=["a", "b"])
    first, second = parse(unpackb(encode_reply.encode_reply(reply, True), numeric_arrays=True)["items"])
    assert (first["id"], second["id"]) == ("a", "b")
    np.testing.assert_array_equal(first["dense"], [1, 2])
    np.testing.assert_array_equal(first["sparse"]["indices"], [1, 300])
    np.testing.assert_array_equal(second["sparse"]["values"], [2.0])
    assert second["sparse"]["values"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(first["multivector"], ROWS[:1])
    np.testing.assert_array_equal(second["multivector"], ROWS[1:])


def test_item_without_entries_or_rows_is_empty_and_still_there():
    unpackb = pytest.importorskip("sie_sdk._msgpack").unpackb
    empty = np.empty(0, "<f4")
    sparse = sparse_rows(9, [0, 0, 0], INDICES[:0], empty)
    reply = make_reply(sparse=sparse, rows=RaggedRows(2, [0, 0, 0], (RowArray("<f4", memoryview(b""), 2),)))
    for item in unpackb(encode_reply.encode_reply(reply, True), numeric_arrays=True)["items"]:
        assert item["sparse"]["indices"].shape == (0,)
        assert (item["multivector"]["num_tokens"], item["multivector"]["values"].shape) == (0, (0, 2))
    for item in json.loads(encode_reply.encode_reply(reply, False))["items"]:
        assert (item["sparse"]["values"], item["multivector"]["values"]) == ([], [])


def test_json_holds_plain_lists():
    body = json.loads(
        encode_reply.encode_reply(make_reply(sparse=make_sparse(), rows=make_rows(), ids=["x", None]), False)
    )
    assert list(body) == ["model", "items", "timing", "usage"]
    assert body["items"] == [
        {
            "id": "x",
            "sparse": {"dims": 30522, "dtype": "float32", "indices": [1, 300], "values": [0.5, 1.0]},
            "multivector": {"token_dims": 2, "num_tokens": 1, "dtype": "float32", "values": [[0.0, 1.0]]},
        },
        {
            "sparse": {"dims": 30522, "dtype": "float32", "indices": [2], "values": [2.0]},
            "multivector": {"token_dims": 2, "num_tokens": 2, "dtype": "float32", "values": [[2.0, 3.0], [4.0, 5.0]]},
        },
    ]


@pytest.mark.parametrize("output_dtype", ["binary", "ubinary"])
def test_packed_rows_keep_the_models_width(output_dtype):
    rows = make_rows(np.array([[0x80], [0xFF], [0x01]], np.uint8), dims=7)
    reply = make_reply(sparse=make_sparse(), rows=rows, output_dtype=output_dtype)
    item = json.loads(encode_reply.encode_reply(reply, False))["items"][1]
    assert item["multivector"] == {"token_dims": 7, "num_tokens": 2, "dtype": "binary", "values": [[255], [1]]}
    assert item["sparse"]["dtype"] == "float32"


def test_missing_output_is_refused_with_its_reason():
    card = ModelCard(id="m", kind="encoder", missing_outputs={"sparse": "sparse_linear.pt is pickled"})
    with pytest.raises(BadRequest, match=r"'sparse' \(sparse_linear\.pt is pickled\)\. Available: \['dense'\]"):
        resolve_encode(EncodeRequest(model="m", texts=[""], output_types=("sparse",)), card)


@pytest.mark.parametrize("has_ragged", [False, True])
def test_json_takes_little_more_memory_than_its_text_twice(has_ragged):
    values = np.linspace(0, 1, 1 << 17, dtype="<f4").reshape(64, -1)
    multi = RaggedRows(2, list(range(0, 65 * 64, 64)), (RowArray("<f4", as_bytes(values), 32),)) if has_ragged else None
    reply = make_reply(values, rows=multi, num_items=64)
    tracemalloc.start()
    try:
        body = encode_reply.encode_reply(reply, False)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(json.loads(body)["items"]) == 64
    assert peak_bytes < 2.5 * len(body), "the numbers of all items were objects at a time"
