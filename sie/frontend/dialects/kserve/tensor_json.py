"""Converts a tensor's elements to and from JSON. Pure. Source: Open Inference Protocol v2, section 5.1.

The elements of a request come as the raw bytes of a JSON value whose syntax msgspec has checked. They never become one
Python object each: NumPy reads integers, and floats are read in chunks. Their number is compared with the tensor's
shape before memory of that size is allocated.
"""

from __future__ import annotations

import re
import struct
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.values.bytes_tensor import frame_elements, split_elements
from sie.values.errors import BadRequest
from sie.values.tensor import DATATYPES

BINARY_ONLY: Final = frozenset({"FP16", "BF16"})
_CHUNK_BYTES: Final = 1 << 20
_NUMERIC: Final = b"0123456789+-.eE[], \t\n\r"
_BOOLEAN: Final = b"truefals[], \t\n\r"
_LONG_INTEGER: Final = re.compile(rb"\d{19}")
_FLOATS: Final = msgspec.json.Decoder(list[float])
_INTEGERS: Final = msgspec.json.Decoder(list[int])
_ANY: Final = msgspec.json.Decoder()
_MAX_DEPTH: Final = 40
_FEW_ELEMENTS: Final = 64
_TOGETHER: Final = 1 << 16
_to_json: Final = msgspec.json.Encoder().encode


def elements_from_json(raw: msgspec.Raw, name: str, datatype: str, num_elements: int) -> bytes:
    """Return the elements of input `name` in the binary form: little-endian, BYTES framed.

    raw is a flat list in C order, or lists nested like the shape. Raises BadRequest if its values do not have the
    datatype, or if their number is not num_elements.
    """
    if datatype in BINARY_ONLY:
        raise BadRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input '{name}'"
        )
    text = bytes(raw)
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array` - at `$.inputs[name={name}].data`")
    if datatype == "BYTES":
        return _strings(text, name, num_elements)
    if text.translate(None, _BOOLEAN if datatype == "BOOL" else _NUMERIC):
        raise _wrong_type(name, datatype)
    flat = text.translate(None, b"[] \t\n\r")  # in valid JSON, white space alone never separates two values
    if not flat.strip(b","):
        flat = b""
    elif flat.startswith(b",") or flat.endswith(b",") or b",," in flat:
        raise BadRequest(f"the data of input '{name}' must be a flat list, or lists nested as its shape is")
    counted = flat.count(b",") + 1 if flat else 0
    if counted != num_elements:
        raise _wrong_count(name, num_elements, counted)
    if not num_elements:
        return b""
    if datatype == "BOOL":
        return _booleans(flat, name)
    if datatype in ("FP32", "FP64"):
        return _floats(flat, name, datatype, num_elements)
    return _integers(flat, name, datatype)


def _floats(flat: bytes, name: str, datatype: str, num_elements: int) -> bytes:
    if num_elements <= _FEW_ELEMENTS:
        return _few_floats(flat, name, datatype, num_elements)
    values = np.empty(num_elements, np.float64)
    done = start = 0
    while start < len(flat):
        end = flat.find(b",", start + _CHUNK_BYTES)
        end = len(flat) if end < 0 else end
        try:
            chunk = _FLOATS.decode(b"[" + flat[start:end] + b"]")
        except msgspec.DecodeError:  # the JSON is valid, so only a number out of range
            raise _too_large(name, datatype) from None
        values[done : done + len(chunk)] = chunk
        done += len(chunk)
        start = end + 1
    with np.errstate(over="ignore"):
        rows = values.astype(DATATYPES[datatype])
    if not np.isfinite(rows).all():
        raise _too_large(name, datatype)
    return rows.tobytes()


def _few_floats(flat: bytes, name: str, datatype: str, num_elements: int) -> bytes:
    """Convert few numbers as `_floats` does, but without NumPy: one NumPy call costs as much as a few dozen numbers."""
    try:
        return struct.pack(f"<{num_elements}{'f' if datatype == 'FP32' else 'd'}", *_FLOATS.decode(b"[" + flat + b"]"))
    except (msgspec.DecodeError, OverflowError):  # the JSON is valid, so only a number out of range
        raise _too_large(name, datatype) from None


def _integers(flat: bytes, name: str, datatype: str) -> bytes:
    if re.search(rb"[.eE]", flat):
        raise _wrong_type(name, datatype)
    if _LONG_INTEGER.search(flat):  # NumPy would saturate
        try:
            return _checked(np.array(_INTEGERS.decode(b"[" + flat + b"]"), object), name, datatype)
        except msgspec.DecodeError:
            raise _too_large(name, datatype) from None
    return _checked(np.fromstring(flat, np.int64, sep=","), name, datatype)


def _checked(values: NDArray[Any], name: str, datatype: str) -> bytes:
    dtype = np.dtype(DATATYPES[datatype])
    bounds = np.iinfo(dtype)
    if values.min() < bounds.min or values.max() > bounds.max:
        raise _too_large(name, datatype)
    return values.astype(dtype).tobytes()


def _booleans(flat: bytes, name: str) -> bytes:
    ones = flat.replace(b"true", b"\1").replace(b"false", b"\0").replace(b",", b"")
    if ones.strip(b"\0\1"):
        raise _wrong_type(name, "BOOL")
    return ones


def _strings(text: bytes, name: str, num_elements: int) -> bytes:
    # A string has at least two quotes, so the text cannot hold more strings than this.
    if text.count(b'"') // 2 < num_elements:
        if b'"' not in text and text.strip(b"[] \t\r\n"):
            raise _wrong_type(name, "BYTES")  # numbers and the like
        raise _wrong_count(name, num_elements, text.count(b'"') // 2)
    try:
        level: list[Any] = _ANY.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the data of input '{name}' cannot be read: {error}") from None
    for _ in range(_MAX_DEPTH):
        if not any(type(value) is list for value in level):
            break
        level = [child for value in level for child in (cast("list[Any]", value) if type(value) is list else [value])]
    if not all(type(value) is str for value in level):
        raise _wrong_type(name, "BYTES")
    if len(level) != num_elements:
        raise _wrong_count(name, num_elements, len(level))
    return frame_elements([value.encode() for value in level])


class _Image(msgspec.Struct, forbid_unknown_fields=True):
    b64: bytes


_IMAGES: Final = msgspec.json.Decoder(list[bytes | _Image])


def images_from_json(raw: msgspec.Raw, name: str, num_elements: int) -> bytes:
    """Return the encoded images of input `name`, framed as a BYTES tensor: each is Base64, bare or as `{"b64": text}`.

    Raises BadRequest for anything else, and for more or fewer than num_elements.
    """
    text = bytes(raw)
    most = text.count(b",") + 1  # Base64 has no comma, so the text cannot hold more images
    if most != max(num_elements, 1):
        raise _wrong_count(name, num_elements, most)
    try:
        found = _IMAGES.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the data of input '{name}' must be images as Base64 text: {error}") from None
    if len(found) != num_elements:
        raise _wrong_count(name, num_elements, len(found))
    return frame_elements([image.b64 if isinstance(image, _Image) else image for image in found])


def elements_to_json(data: memoryview, name: str, datatype: str) -> bytes:
    """Return a reply's elements as a flat JSON list. Raises BadRequest for values that need the binary form."""
    if datatype in BINARY_ONLY:
        raise BadRequest(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output '{name}'"
        )
    if datatype == "BYTES":
        try:
            return msgspec.json.encode([element.decode() for element in split_elements(data)])
        except UnicodeDecodeError:
            raise BadRequest(
                f"output '{name}' has bytes that are not UTF-8. Please use the binary data format for output '{name}'"
            ) from None
    text = _numbers_to_json(np.frombuffer(data, DATATYPES[datatype]))
    if datatype in ("FP32", "FP64") and b"null" in text:  # msgspec writes null for numbers that JSON cannot hold
        raise BadRequest(
            f"output '{name}' has values that are not finite. Please use the binary data format for output '{name}'"
        )
    return text


def _numbers_to_json(values: NDArray[Any]) -> bytes:
    """Encode some values at a time: all of them as Python objects would take more memory than their text."""
    if len(values) <= _TOGETHER:
        return _to_json(values.tolist())
    starts = range(0, len(values), _TOGETHER)
    parts = [_to_json(values[start : start + _TOGETHER].tolist())[1:-1] for start in starts]
    parts[0] = b"[" + parts[0]
    parts[-1] += b"]"
    return b",".join(parts)


def _wrong_count(name: str, expected: int, got: int) -> BadRequest:
    return BadRequest(
        f"Shape does not match true shape of 'data' field: input '{name}' has {expected} elements by its shape and {got} "
        "in its data"
    )


def _wrong_type(name: str, datatype: str) -> BadRequest:
    return BadRequest(f"the data of input '{name}' must be {_WORDS[datatype]} for datatype {datatype}")


def _too_large(name: str, datatype: str) -> BadRequest:
    return BadRequest(f"a value of input '{name}' does not fit into {datatype}")


_WORDS: Final = {
    "BOOL": "true or false", "BYTES": "strings", "FP32": "numbers", "FP64": "numbers",
    **dict.fromkeys(("INT8", "INT16", "INT32", "INT64"), "integers"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32", "UINT64"), "integers that are not negative"),
}  # fmt: skip
