"""Elements of tensors as JSON: what numpy and json write and read is the oracle; what does not fit is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.frontend.dialects.kserve.tensor_json import elements_from_json, elements_to_json
from sie.values.bytes_tensor import frame_elements, split_elements
from sie.values.errors import BadRequest
from sie.values.tensor import DATATYPES

INTEGERS = ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]


def read(text: str | bytes, datatype: str, num_elements: int) -> bytes:
    raw = msgspec.Raw(text.encode() if isinstance(text, str) else text)
    return elements_from_json(raw, "X", datatype, num_elements)


def refusal(text: str, datatype: str, num_elements: int) -> str:
    with pytest.raises(BadRequest) as caught:
        read(text, datatype, num_elements)
    return caught.value.message


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), (6, 1)])
@pytest.mark.parametrize("datatype", ["FP32", "FP64", *INTEGERS])
def test_flat_and_nested_lists_are_the_same_elements(datatype: str, shape: tuple[int, ...], indent: int | None):
    dtype = np.dtype(DATATYPES[datatype])
    values = np.arange(6).astype(dtype).reshape(shape) * (1 if datatype in INTEGERS else dtype.type(-1.25e-3))
    assert read(json.dumps(values.tolist(), indent=indent), datatype, 6) == values.tobytes()


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_cover_the_whole_range_and_not_one_more(datatype: str):
    bounds = np.iinfo(DATATYPES[datatype])
    values = [int(bounds.min), int(bounds.max)]
    assert read(json.dumps(values), datatype, 2) == np.array(values, DATATYPES[datatype]).tobytes()
    for value in (bounds.min - 1, bounds.max + 1, 10**30, -(10**30)):
        assert refusal(f"[0, {value}]", datatype, 2) == f"a value of input 'X' does not fit into {datatype}"


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_floats_are_rounded_as_numpy_rounds_and_never_infinite(datatype: str):
    rng = np.random.default_rng(3)
    values = np.concatenate(
        [rng.standard_normal(1000) * 10.0 ** rng.integers(-30, 30, 1000), [0.0, -0.0, 1e-46, 5e-324]]
    )
    text = json.dumps(values.tolist())
    assert read(text, datatype, len(values)) == values.astype(DATATYPES[datatype]).tobytes()
    assert "does not fit" in refusal("[1e400]", datatype, 1)
    assert "does not fit" in refusal("[-1e39, 1e309]", datatype, 2)


@pytest.mark.parametrize("count", [1, 64, 65])
def test_few_floats_are_read_and_refused_as_many_are(count: int):
    """3.4028235677973366e38 is the first number that float32 rounds to infinity."""
    most = np.nextafter(3.4028235677973366e38, 0)
    values = np.concatenate([np.random.default_rng(count).standard_normal(count - 1), [most]])
    assert read(json.dumps(values.tolist()), "FP32", count) == values.astype(np.float32).tobytes()
    for beyond in (3.4028235677973366e38, -3.4028235677973366e38):
        values[-1] = beyond
        assert "does not fit" in refusal(json.dumps(values.tolist()), "FP32", count)
        assert read(json.dumps(values.tolist()), "FP64", count) == values.tobytes()


def test_a_long_list_is_read_in_chunks():
    values = np.arange(400_000, dtype=np.float64) / 7
    text = json.dumps(values.tolist())
    assert len(text) > 4 << 20
    assert read(text, "FP64", len(values)) == values.tobytes()


def test_booleans_and_strings():
    assert read("[true, [false], true]", "BOOL", 3) == b"\1\0\1"
    texts = ["", "a", 'b,"c]', "\N{PILE OF POO}", "\u0000"]
    assert split_elements(memoryview(read(json.dumps(texts), "BYTES", 5))) == [text.encode() for text in texts]
    assert split_elements(memoryview(read(json.dumps([texts[:2], texts[2:4]]), "BYTES", 4))) == [
        t.encode() for t in texts[:4]
    ]


@pytest.mark.parametrize(
    ("text", "datatype"), [("[]", "FP32"), ("[[], []]", "INT8"), ("[]", "BYTES"), ("[[]]", "BOOL")]
)
def test_no_elements(text: str, datatype: str):
    assert read(text, datatype, 0) == b""


@pytest.mark.parametrize(
    ("text", "datatype", "words"),
    [
        ("[1, 0]", "BOOL", "true or false"), ('["1", "2"]', "INT32", "integers"), ("[1, 2.0]", "INT32", "integers"),
        ("[1e3, 2]", "INT64", "integers"), ("[true, false]", "FP32", "numbers"), ("[null, 1]", "FP32", "numbers"),
        ('[{"a": 1}, 1]', "FP64", "numbers"), ('["a", [null, "b"]]', "BYTES", "strings"), ("[1, -2]", "UINT8", "does not fit"),
        ("[[], [1, 2]]", "INT32", "nested as its shape is"), ("[[1, 2], []]", "FP32", "nested as its shape is"),
        ("3", "INT32", "Expected `array`"), ('{"a": [1, 2]}', "INT32", "Expected `array`"), ("null", "FP32", "Expected `array`"),
        ('"ab"', "BYTES", "Expected `array`"),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused(text: str, datatype: str, words: str):
    assert words in refusal(text, datatype, 2)


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
@pytest.mark.parametrize("num_elements", [0, 2, 4, 1 << 62])
def test_another_number_than_the_shapes_is_refused_before_anything_is_allocated(datatype: str, num_elements: int):
    text = {"BOOL": "[true, true, true]", "BYTES": '["a", "b", "c"]'}.get(datatype, "[1, 2, 3]")
    assert "Shape does not match true shape of 'data' field" in refusal(text, datatype, num_elements)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_are_binary_only(datatype: str):
    assert "Please use the binary data format" in refusal("[1]", datatype, 1)
    with pytest.raises(BadRequest, match="Please use the binary data format for output 'X'"):
        elements_to_json(memoryview(b"\0\0"), "X", datatype)


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("FP16", "BF16", "BYTES")])
def test_a_reply_reads_back_as_it_was(datatype: str):
    dtype = np.dtype(DATATYPES[datatype])
    values: Any = (
        np.array([0, 1, 1, 0], dtype) if datatype == "BOOL" else np.array([0, 1, 100, 7], dtype) / dtype.type(1)
    )
    values = values.astype(dtype)
    text = elements_to_json(memoryview(values.tobytes()), "X", datatype)
    np.testing.assert_array_equal(np.array(json.loads(text), dtype), values)


def test_many_numbers_are_written_like_few_ones():
    values = np.arange(-70_000, 70_000, dtype="<i4")
    assert (
        elements_to_json(memoryview(values.tobytes()), "X", "INT32")
        == json.dumps(values.tolist(), separators=(",", ":")).encode()
    )


def test_what_json_cannot_hold_is_told_and_never_sent():
    assert json.loads(elements_to_json(memoryview(frame_elements([b"a", "\N{SNOWMAN}".encode()])), "X", "BYTES")) == [
        "a",
        "\N{SNOWMAN}",
    ]
    with pytest.raises(BadRequest, match="not UTF-8"):
        elements_to_json(memoryview(frame_elements([b"\xff"])), "X", "BYTES")
    for value in (np.nan, np.inf):
        with pytest.raises(BadRequest, match="not finite"):
            elements_to_json(memoryview(np.array([value], "<f4").tobytes()), "X", "FP32")


@pytest.mark.parametrize(
    "data", [b"\1", b"\1\0\0\0", b"\xff\xff\xff\xffab", frame_elements([b"ab"])[:-1], frame_elements([b"a"]) + b"\0"]
)
def test_lengths_that_do_not_lead_to_the_end_are_refused(data: bytes):
    with pytest.raises(ValueError, match="length"):
        split_elements(memoryview(data))
