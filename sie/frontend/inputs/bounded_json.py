"""Bounds the cost of a request body before and while it is decoded. All bytes have arrived; it never reads a socket.

The bounds, and why Python code does not scan the bytes of an ordinary body:
- Typed decoding skips unknown fields without building them. Free-form fields are `msgspec.Raw` (a view). So only typed
  lists and structs take memory.
- msgpack gives a list's length before its elements, and `max_length` rejects it there. The values of a large body are
  counted one by one, since the bytes of a text look like headers; large bodies have few values for their size.
- JSON does not give lengths. 24 MB of `{}` items take 2.8 s and 834 MiB to decode before `max_length` is checked. So
  brackets and commas are counted first, with `bytes.count` and numpy, at memory speed.
- Depth: JSON over max_depth is rejected before decoding. msgspec stops at about 1,000 levels with RecursionError
  (1.4 ms for a million levels of msgpack). This is safe on stacks of 1 MiB and more, such as the main thread's. A
  skipped field of a msgpack body may be up to that deep. Both formats hold free-form values to max_depth before other
  code walks them.

`check_json` takes 0.2 us for a body with few brackets, and 2 to 15 ms for each MiB of a body with many, in pieces between
which other threads run: decode large bodies off the event loop.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from sie.frontend.inputs.json_parts import QUOTE, STEP, decode_json, pieces, structure_places
from sie.frontend.inputs.msgpack_parts import decode_msgpack, has_more_values
from sie.values.choices import with_choices
from sie.values.errors import BadRequest

MAX_CONTAINERS = 65_536 + 64
"""Most maps and lists in a JSON body: one for each item at the highest setting, and some around them."""
MAX_VALUES = 1_000_000
"""Most list elements and map entries in a JSON body, and values in a msgpack body; a decoded integer takes 36 bytes."""
MAX_FREE_FORM_BYTES = 64 * 1024
"""Most bytes of a field without a fixed type (`options`) that is decoded to Python objects."""

_TRUNCATED = "Input data was truncated"
_ESCAPE_BYTES = 6
_SURROGATE_AT_END = re.compile(rb"\\u[dD][89abAB]")
_SCAN_BYTES = 1 << 20
_ALL_BYTES = bytes(range(256))
_NOT_BRACKETS_OR_QUOTE = bytes(set(_ALL_BYTES) - set(b'"[]{}'))
_NOT_STRUCTURE = bytes(set(_ALL_BYTES) - set(b'",[]{}'))

_FREE_FORM_MSGPACK = msgspec.msgpack.Decoder(dict[str, Any] | None)
_FREE_FORM_JSON = msgspec.json.Decoder(dict[str, Any] | None)

_T = TypeVar("_T")
Decoder = msgspec.json.Decoder[_T] | msgspec.msgpack.Decoder[_T]
"""A decoder of either format."""


def check_json(body: bytes, max_depth: int, max_values: int = MAX_VALUES, max_containers: int = MAX_CONTAINERS) -> None:
    """Raise BadRequest for a JSON body that is nested too deep or would grow too much when it is decoded.

    A caller that decodes lists without a Python object for each element may allow more of them. The decoder, not this
    function, rejects a body that is not JSON.
    """
    # These counts include brackets and commas inside strings, so they can accept a body but not reject one.
    many_values = _count(body, b",") >= max_values
    if _count(body, b"{") + _count(body, b"[") <= max_depth and not many_values:
        return
    depth = num_openers = num_commas = 0
    for marks in _structure(body, with_commas=many_values):
        num_openers += marks.count(b"{") + marks.count(b"[")
        num_commas += marks.count(b",")
        if num_openers > max_containers or num_commas + num_openers > max_values:
            raise BadRequest(
                f"The JSON body must hold at most {max_containers} objects and arrays and {max_values} values"
            )
        depths = STEP[np.frombuffer(marks, np.uint8)].cumsum(dtype=np.int32)
        if len(depths):
            if depth + int(depths.max()) > max_depth:
                raise _too_deep(max_depth)
            depth += int(depths[-1])


def _structure(body: bytes, *, with_commas: bool) -> Iterator[bytes]:
    """Yield the brackets (and commas) outside the strings of a JSON text, for a piece of it at a time."""
    others = _NOT_STRUCTURE if with_commas else _NOT_BRACKETS_OR_QUOTE
    open_string = 0
    for _, piece in pieces(body):
        # Two adjacent quotes do not change the state of the marks after them.
        marks = piece.translate(None, others).replace(b'""', b"")
        if open_string or QUOTE in marks:
            chunk = np.frombuffer(marks, np.uint8)
            places, open_string = structure_places(chunk, open_string)
            marks = chunk[places].tobytes()
        yield marks


def _count(body: bytes, mark: bytes) -> int:
    """Count a byte, and let other threads run between two pieces of a large body."""
    if len(body) <= _SCAN_BYTES:
        return body.count(mark)
    return sum(body.count(mark, at, at + _SCAN_BYTES) for at in range(0, len(body), _SCAN_BYTES))


def check_utf8(body: bytes) -> None:
    """Raise BadRequest unless the whole body is UTF-8; a decoder checks only the strings that it builds."""
    if body.isascii():
        return
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(body), _SCAN_BYTES):
            decode(body[start : start + _SCAN_BYTES])
        decode(b"", final=True)
    except UnicodeDecodeError:
        raise BadRequest("Invalid UTF-8 in the body") from None


def decode_typed(decoder: Decoder[_T], body: bytes) -> _T:
    """Decode a body. Every msgspec error becomes BadRequest with its text, which contains the path and any choices.

    Raises BadRequest for a msgpack body with more than MAX_VALUES. `check_json` counts those of JSON.
    """
    is_json = isinstance(decoder, msgspec.json.Decoder)
    if not is_json and has_more_values(body, MAX_VALUES):
        raise BadRequest(f"The msgpack body must hold at most {MAX_VALUES} values")
    try:
        return decode_json(decoder, body) if is_json else decode_msgpack(decoder, body)
    except msgspec.DecodeError as exc:
        fault = _surrogate_fault(decoder, body) if str(exc) == _TRUNCATED and is_json else None
        raise BadRequest(with_choices(fault or exc, decoder.type)) from None
    except UnicodeDecodeError:
        raise BadRequest("Invalid UTF-8 in a string") from None
    except RecursionError:  # a RuntimeError: a handler for DecodeError alone would make it a 500
        raise BadRequest("The body is nested too deep") from None


def _surrogate_fault(decoder: Decoder[Any], body: bytes) -> msgspec.DecodeError | None:
    """Return the fault of a body that ends behind a lone surrogate, None for any other body.

    msgspec takes such a body as truncated, because the bytes of a second surrogate do not fit in it.
    """
    if _SURROGATE_AT_END.search(body, max(0, len(body) - 2 * _ESCAPE_BYTES)):
        try:
            decoder.decode(body + b" " * _ESCAPE_BYTES)
        except msgspec.DecodeError as error:
            return error if "surrogate" in str(error) else None
    return None


def decode_free_form(raw: msgspec.Raw, *, msgpack: bool, path: str, max_depth: int) -> dict[str, Any]:
    """Decode a map without a fixed type; absent and null become an empty map.

    Raises BadRequest when it is over 64 KiB, deeper than max_depth, or not a map. The text contains path
    (`$.params.options`).
    """
    view = memoryview(raw)
    if not view.nbytes:
        return {}
    if view.nbytes > MAX_FREE_FORM_BYTES:
        raise BadRequest(f"Field '{path}' must hold at most {MAX_FREE_FORM_BYTES} bytes")
    decoder = _FREE_FORM_MSGPACK if msgpack else _FREE_FORM_JSON
    try:
        value = decode_typed(decoder, bytes(view))
    except BadRequest as exc:
        raise BadRequest(_prefix_path(exc.message, path)) from None
    _check_value_depth(value, max_depth)
    return value or {}


def _prefix_path(message: str, path: str) -> str:
    """Change a path that starts at the field into one that starts at the body."""
    head, at, tail = message.rpartition(" - at `$")
    return f"{head} - at `{path}{tail}" if at else f"{message} - at `{path}`"


def _check_value_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth):
        level = [child for parent in level for child in children_of(parent)]
        if not level:
            return
    if any(isinstance(child, (dict, list)) for child in level):
        raise _too_deep(max_depth)


def children_of(value: Any) -> Iterable[Any]:
    """Return the values of a decoded map or list, empty for other values; a decoded map's keys never nest."""
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _too_deep(max_depth: int) -> BadRequest:
    return BadRequest(f"The body is nested too deep: at most {max_depth} levels")
