"""Similar requests: read like any other, and refused if they do not fit their header."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest

from sie.shm.layout import ProtocolError
from sie.values.work import ArrayRef, TensorForm, TensorTask, WorkHeader
from sie.values.work_bytes import plan_arrays
from sie.workers.requests.readers import reader_of
from sie.workers.requests.worker_request import _read_inputs

TEXT = b"a text"


def request(
    arrays: list[tuple[str, np.ndarray]], operation: str = "encode", num_items: int = 1, **fields: object
) -> tuple[WorkHeader, dict[str, ArrayRef], memoryview]:
    """Return a request's header, its arrays by name, and its payload."""
    plan = plan_arrays([(name, array.dtype.str, array.shape) for name, array in arrays])
    payload = bytearray(plan.nbytes)
    for ref, (_, array) in zip(plan.refs, arrays, strict=True):
        payload[ref.offset : ref.offset + array.nbytes] = array.tobytes()
    header = WorkHeader("m", operation, num_items, plan.refs)
    header = msgspec.structs.replace(header, **fields) if fields else header
    return header, {ref.name: ref for ref in plan.refs}, memoryview(bytes(payload))


def bounds(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def text_request(costs: np.ndarray, text_bounds: np.ndarray) -> tuple[WorkHeader, dict[str, ArrayRef], memoryview]:
    text = np.frombuffer(TEXT, np.uint8)
    return request([("cu_seqlens", costs), ("text", text), ("text_offsets", text_bounds)])


def ids_request(costs: np.ndarray, count: int = 3) -> tuple[WorkHeader, dict[str, ArrayRef], memoryview]:
    return request([("cu_seqlens", costs), ("token_ids", np.arange(7, 7 + count, dtype=np.int32))])


def tensor_request(*sizes: int) -> tuple[WorkHeader, dict[str, ArrayRef], memoryview]:
    forms = tuple(TensorForm(f"INPUT{i}", "UINT8", (size,)) for i, size in enumerate(sizes))
    task = msgspec.msgpack.encode(TensorTask(forms, (), 5))
    arrays = [(str(i), np.arange(size, dtype=np.uint8)) for i, size in enumerate(sizes)]
    return request(arrays, "infer", output_types=("tensors",), task=task)


@pytest.mark.parametrize("made", [text_request(bounds(0, 2), bounds(0, 6)), ids_request(bounds(0, 3))])
def test_request_with_one_item_is_read_like_others(made):
    header, refs, payload = made
    read = reader_of(header, refs)
    assert read is not None
    (costs, inputs), (expected_costs, expected) = read(payload), _read_inputs(header, refs, payload)
    assert costs == expected_costs
    assert np.array_equal(inputs[0], expected[0])
    assert inputs[0].dtype == expected[0].dtype


@pytest.mark.parametrize("sizes", [(4,), (4, 0, 130), (0,)])
def test_tensors_are_read_as_any_others(sizes):
    header, refs, payload = tensor_request(*sizes)
    read = reader_of(header, refs)
    assert read is not None
    (costs, inputs), (expected_costs, expected) = read(payload), _read_inputs(header, refs, payload)
    assert costs == expected_costs == [5]
    assert inputs[0].task == expected[0].task
    assert all(map(np.array_equal, inputs[0].data, expected[0].data))
    assert len(inputs[0].data) == len(sizes)


@pytest.mark.parametrize(
    "made",
    [
        text_request(bounds(1, 2), bounds(0, 6)),
        text_request(bounds(0, -1), bounds(0, 6)),
        text_request(bounds(0, 2), bounds(1, 6)),
        text_request(bounds(0, 2), bounds(0, 5)),
        text_request(bounds(0, 2), bounds(0, 7)),
        ids_request(bounds(0, 2)),
        ids_request(bounds(0, 4)),
        ids_request(bounds(1, 3)),
    ],
)
def test_bounds_that_do_not_fit_are_a_fault_of_the_peer(made):
    header, refs, payload = made
    for read in (reader_of(header, refs), lambda payload: _read_inputs(header, refs, payload)):
        assert read is not None
        with pytest.raises(ProtocolError):
            read(payload)


@pytest.mark.parametrize(
    "made", [text_request(bounds(0, 2), bounds(0, 6)), ids_request(bounds(0, 3)), tensor_request(70)]
)
def test_arrays_beyond_the_extent_are_a_fault_of_the_peer(made):
    header, refs, payload = made
    read = reader_of(header, refs)
    assert read is not None
    for num_bytes in range(0, len(payload), 8):
        with pytest.raises(ProtocolError):
            read(payload[:num_bytes])


def test_what_is_of_another_kind_or_not_right_is_left_to_others():
    others = [
        request([("cu_seqlens", bounds(0, 1, 2)), ("token_ids", bounds(1, 2))], num_items=2),
        request([("cu_seqlens", bounds(0, 2)), ("token_ids", bounds(1, 2))], "score"),
        request([("cu_seqlens", bounds(0, 1, 2)), ("token_ids", bounds(1, 2))]),
        request([("token_ids", bounds(1, 2))]),
        request([("cu_seqlens", bounds(0, 2)), ("token_ids", np.array([1, 2], np.int64))]),
        request([("cu_seqlens", bounds(0, 0)), ("token_ids", bounds())]),
        request([("cu_seqlens", bounds(0, 1)), ("text", np.frombuffer(TEXT, np.uint8))]),
        request([], "infer", output_types=("tensors",), task=struct.pack("<Q", 1)),
        request([("0", bounds(1))], "infer", output_types=("tensors",), task=tensor_request(4)[0].task),
    ]
    assert [reader_of(header, refs) for header, refs, _ in others] == [None] * len(others)
