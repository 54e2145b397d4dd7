"""Reads an ONNX file's inputs, outputs and weight files before a runtime loads it.

It scans the protobuf wire format in a mapping of the file and skips the weights. So a file of many gigabytes costs only
its structure. Field numbers: onnx.proto3 of ONNX 1.x.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_MAX_DEPTH: Final = 100
_MAX_TEXT_BYTES: Final = 65536
_MAX_FUNCTION_NODES: Final = 100_000
"""Nodes that a model's calls of its own functions may stand for: the runtime needs 0.2 ms and more for each."""
_DATATYPES: Final = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip
"""The tensor protocols' names of TensorProto.DataType."""
_PARTS: Final[dict[str, dict[int, str]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""The message fields that may lead to a tensor, by kind of message and field number."""


class OnnxError(Exception):
    """The file is not an ONNX model, or cannot be served; the text gives the reason."""


class OnnxValue(NamedTuple):
    """One input or output; shape is None for an unknown rank. A free dimension is its name, or -1 without a name."""

    name: str
    datatype: str
    shape: tuple[int | str, ...] | None


class OnnxFile(NamedTuple):
    """The facts in a file; locations are the external files that it names, without duplicates, spelled as there."""

    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    locations: tuple[str, ...]


def read_onnx(path: Path) -> OnnxFile:
    """Read an ONNX file. Raises OnnxError, or OSError when it cannot be opened."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise OnnxError("the file is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        # Not closed here: an error's traceback may still hold views. The last view to go unmaps the file.
        return _read_model(memoryview(mapped))
    except (IndexError, ValueError) as error:
        raise OnnxError(f"not an ONNX model: {error}") from None


def _read_model(data: memoryview) -> OnnxFile:
    graphs = [value for number, value in _messages(data) if number == 7]
    if len(graphs) != 1:
        raise OnnxError("not an ONNX model: it has no graph")
    initializers: set[str] = set()
    inputs: list[OnnxValue] = []
    outputs: list[OnnxValue] = []
    for number, value in _messages(graphs[0]):
        if number == 5:
            initializers.add(_text(value, 8))
        elif number in (11, 12):
            (inputs if number == 11 else outputs).append(_read_value(value))
    locations: dict[str, None] = {}
    _find_locations("model", data, locations, 0)
    _check_functions(data, graphs[0])
    inputs = [value for value in inputs if value.name not in initializers]
    _check(inputs, outputs)
    return OnnxFile(tuple(inputs), tuple(outputs), tuple(locations))


def _check(inputs: list[OnnxValue], outputs: list[OnnxValue]) -> None:
    if not outputs:
        raise OnnxError("not an ONNX model: it has no outputs")
    for values in (inputs, outputs):
        names = [value.name for value in values]
        if len(set(names)) != len(names) or not all(names):
            raise OnnxError("an input or output has no name, or the name of another one")


def _read_value(data: memoryview) -> OnnxValue:
    name = _text(data, 1)
    types = [value for number, value in _messages(data) if number == 2]
    tensors = [value for one in types for number, value in _messages(one) if number == 1]
    if len(tensors) != 1:
        raise OnnxError(f"{name!r} is not a tensor")
    element, shape = 0, None
    for number, value in _fields(tensors[0]):
        if number == 1 and isinstance(value, int):
            element = value
        elif number == 2 and isinstance(value, memoryview):
            shape = tuple(_read_dimension(dim) for kind, dim in _messages(value) if kind == 1)
    if element not in _DATATYPES:
        raise OnnxError(f"{name!r} has elements of ONNX type {element}, which no tensor protocol has")
    return OnnxValue(name, _DATATYPES[element], shape)


def _read_dimension(data: memoryview) -> int | str:
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            return value if value < 1 << 62 else -1  # some exporters write a negative size for "any"
        if number == 2 and isinstance(value, memoryview):
            return bytes(value[:_MAX_TEXT_BYTES]).decode() or -1
    return -1


def _find_locations(kind: str, data: memoryview, found: dict[str, None], depth: int) -> None:
    """Add the external files of every tensor in a message."""
    if depth > _MAX_DEPTH:
        raise OnnxError(f"graphs nested over {_MAX_DEPTH} deep")
    if kind == "tensor":
        for number, entry in _messages(data):
            if number == 13 and _text(entry, 1) == "location":
                found[_text(entry, 2)] = None
        return
    parts = _PARTS[kind]
    for number, value in _messages(data):
        if number in parts:
            _find_locations(parts[number], value, found, depth + 1)


def _check_functions(data: memoryview, graph: memoryview) -> None:
    """Refuse functions that call each other without end, or stand for too many nodes: a runtime writes all of them out."""
    bodies = {tuple(_text(one, field) for field in (10, 1, 13)): one for number, one in _messages(data) if number == 25}
    sizes: dict[tuple[str, ...], int] = {}

    def count(kind: str, message: memoryview, depth: int, *, is_own: bool = False) -> int:
        """Return the nodes that a part stands for; nodes of the file's own graph (is_own) stand for themselves only."""
        if depth > _MAX_DEPTH:
            raise OnnxError(f"functions and graphs nested over {_MAX_DEPTH} deep")
        parts, total = _PARTS[kind], 0
        for number, value in _messages(message):
            if (part := parts.get(number)) in ("node", "attribute", "graph"):
                total += count(part, value, depth + 1, is_own=is_own)
        name = tuple(_text(message, field) for field in (7, 4, 8)) if kind == "node" else ()
        if (body := bodies.get(name)) is not None:
            if name not in sizes:
                sizes[name] = count("function", body, depth + 1)
            total += sizes[name]
        if total > _MAX_FUNCTION_NODES:
            raise OnnxError(f"its functions stand for over {_MAX_FUNCTION_NODES} nodes")
        return total + (kind == "node" and not is_own)

    if bodies:
        count("graph", graph, 0, is_own=True)


def _text(data: memoryview, wanted: int) -> str:
    """Return a text field of a message, or empty when it is missing."""
    text = ""
    for number, value in _messages(data):
        if number == wanted:
            if len(value) > _MAX_TEXT_BYTES:
                raise OnnxError(f"a name of {len(value)} bytes")
            text = bytes(value).decode()
    return text


def _messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (number, bytes) of the fields with a length: messages, texts and packed numbers."""
    for number, value in _fields(data):
        if isinstance(value, memoryview):
            yield number, value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (number, value) of a message's fields. Raises IndexError or ValueError for malformed bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        end = position + length
        if end > len(data) or number == 0:
            raise ValueError("a field beyond the end")
        if wire == 2:
            yield number, data[position:end]
        position = end


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of over 64 bits")
