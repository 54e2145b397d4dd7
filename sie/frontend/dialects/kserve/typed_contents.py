"""Reads the typed contents of KServe v2 gRPC inputs. Pure.

A message class keeps the interpreter lock: 15 million empty strings took 0.4 s of all other clients. So the contents of a
large message are left out of it, and read in pieces between which other threads run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, Final

import numpy as np

from sie.frontend.dialects.kserve.protobuf_wire import (
    BYTES,
    MAX_FIELDS,
    append_bytes,
    parse,
    too_many_fields,
    wire_field,
    wire_fields,
)
from sie.proto import message_class
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest
from sie.values.tensor import DATATYPES

INPUTS: Final = 5
_CONTENTS: Final = 5
_BYTES_CONTENTS: Final = 8
_BYTES_TAG: Final = _BYTES_CONTENTS << 3 | BYTES
_FIXED: Final = (6, 7)
"""`fp32_contents` and `fp64_contents`, whose elements all have one size."""
_PIECE_BYTES: Final = 1 << 14
_LONG_BYTES: Final = 128
"""From this length on, a string's field costs as much to find as one of another kind; its bytes pay for it."""
_NARROW: Final = frozenset({"INT8", "INT16", "UINT8", "UINT16"})
_TYPED: Final = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_MESSAGE: Final = message_class("kserve", "inference.InferTensorContents")


def cut_contents(request: bytes) -> tuple[bytes, list[list[memoryview]]]:
    """Return a ModelInferRequest with empty contents, and views of the contents of each input. Raises MalformedMessage."""
    view = memoryview(request)
    rest: list[bytes | memoryview] = []
    contents: list[list[memoryview]] = []
    for field in wire_fields(view):
        if (field.number, field.wire_type) != (INPUTS, BYTES):
            rest.append(view[field.start : field.end])
            continue
        kept, found = _cut_input(view[field.value_start : field.end])
        rest.append(append_bytes(b"", INPUTS, [kept]))
        contents.append(found)
    return b"".join(rest), contents


def _cut_input(tensor: memoryview) -> tuple[bytes, list[memoryview]]:
    kept: list[bytes | memoryview] = []
    found: list[memoryview] = []
    for field in wire_fields(tensor):
        if (field.number, field.wire_type) == (_CONTENTS, BYTES):
            found.append(tensor[field.value_start : field.end])
        else:
            kept.append(tensor[field.start : field.end])
    if found:
        kept.append(append_bytes(b"", _CONTENTS, [b""]))  # an input must not have them beside raw contents
    return b"".join(kept), found


def pieces_of(contents: Iterable[memoryview]) -> Iterator[Any]:
    """Yield the elements of contents as InferTensorContents of some 16 KiB.

    Raises MalformedMessage, also for many numbers that are not packed.
    """
    for view in contents:
        start = position = 0
        num_left = MAX_FIELDS + len(view) // _LONG_BYTES
        while position < len(view):
            num_left -= 1
            if num_left < 0:
                raise too_many_fields()
            field = wire_field(view, position)
            is_packed = field.wire_type == BYTES and field.number != _BYTES_CONTENTS
            if is_packed and field.end - position > _PIECE_BYTES:
                yield parse(_MESSAGE, view[start:position])
                values = view[field.value_start : field.end]
                for part in _parts_of(values, is_fixed=field.number in _FIXED):
                    yield parse(_MESSAGE, append_bytes(b"", field.number, [part]))
                start = position = field.end
                continue
            position = _end_of_strings(view, field.end, start + _PIECE_BYTES)
            if position - start >= _PIECE_BYTES:
                yield parse(_MESSAGE, view[start:position])
                start = position
        yield parse(_MESSAGE, view[start:position])


def _end_of_strings(view: memoryview, position: int, stop: int) -> int:
    """Return where the short strings at position end, or the first of them that ends at stop or after it."""
    # No string is read beyond its end, because the longest of them has fewer bytes than are left out here.
    data, at = bytes(view[position : min(stop, len(view))]), 0
    last = len(data) - _LONG_BYTES
    while at < last and data[at] == _BYTES_TAG and data[at + 1] < _LONG_BYTES:
        at += 2 + data[at + 1]
    return position + at


def _parts_of(values: memoryview, *, is_fixed: bool) -> Iterator[memoryview]:
    """Yield whole elements of a packed list, some 16 KiB at a time."""
    start = 0
    while start < len(values):
        end = min(start + _PIECE_BYTES, len(values))
        while not is_fixed and end < len(values) and values[end - 1] >= 0x80 and end - start < 2 * _PIECE_BYTES:
            end += 1
        yield values[start:end]
        start = end


def read_typed(tensor: Any, pieces: Iterable[Any], max_values: int) -> memoryview:
    """Return the elements of an input's typed contents in the raw form.

    pieces are its InferTensorContents, with whole elements in their order. Raises BadRequest.
    """
    name, datatype = tensor.name, tensor.datatype
    if datatype not in DATATYPES:
        raise BadRequest(f"invalid datatype '{datatype[:32]}' for input {name}")
    field = _TYPED.get(datatype)
    if field is None:
        if tensor.HasField("contents"):
            raise BadRequest(f"input '{name}' of datatype {datatype} must be sent in raw_input_contents")
        return memoryview(b"")
    count = -1 if any(size < 0 for size in tensor.shape) else prod(tensor.shape)
    num_values, parts = 0, list[bytes]()
    for piece in pieces:
        values = _values_of(piece, field, name, datatype)
        num_values += len(values)
        if num_values > min(count, max_values):
            break
        parts.append(frame_elements(values) if datatype == "BYTES" else _packed(values, name, datatype))
    if num_values != count and num_values <= max_values:
        raise BadRequest(
            f"Shape does not match true shape of '{field}': input '{name}' has {num_values} elements{_or_more(pieces)} and "
            f"its shape is {list(tensor.shape)[:32]}"
        )
    if num_values > max_values:
        raise BadRequest(
            f"the typed elements of a request are over max_tensor_values; send '{name}' in raw_input_contents"
        )
    return memoryview(b"".join(parts))


def _or_more(pieces: Iterable[Any]) -> str:
    """Return words for a number of elements that were not all counted."""
    return " or more" if isinstance(pieces, Iterator) and next(pieces, None) is not None else ""


def _values_of(piece: Any, field: str, name: str, datatype: str) -> Any:
    for other, _ in piece.ListFields():
        if other.name != field:
            raise BadRequest(f"input '{name}' of datatype {datatype} must be sent in {field}, not in {other.name}")
    return getattr(piece, field)


def _packed(values: Any, name: str, datatype: str) -> bytes:
    dtype = np.dtype(DATATYPES[datatype])
    if datatype not in _NARROW:
        return np.array(values[:], dtype).tobytes()
    wide, bounds = np.array(values[:], np.int64), np.iinfo(dtype)
    if wide.size and (wide.min() < bounds.min or wide.max() > bounds.max):
        raise BadRequest(f"a value of input '{name}' does not fit into {datatype}")
    return wide.astype(dtype).tobytes()
