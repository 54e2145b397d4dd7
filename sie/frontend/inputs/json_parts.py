"""Decodes a large JSON body in parts, so that other threads run between two of them.

A decoder keeps the interpreter lock, 0.1 to 0.5 s for 32 MiB, also on a thread: meanwhile the event loop stands still. Most
of a large body is one list. Its items are decoded some at a time, and the rest of the body without them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

PARTED_BYTES: Final = 4 << 20
"""Bodies of this size and more are decoded in parts. A smaller one keeps the lock for some 20 ms, and its scan would cost as much."""
_SCAN_BYTES: Final = 256 * 1024
_PART_BYTES: Final = 256 * 1024
QUOTE: Final = ord('"')
_COMMA: Final = ord(",")
_OPEN: Final = ord("[")
_CLOSE: Final = ord("]")
_IS_STRUCTURE: Final = np.zeros(256, np.bool_)
_IS_STRUCTURE[list(b"{}[],")] = True
STEP: Final = np.zeros(256, np.int8)
"""By byte: how it changes the depth of what follows, outside of strings."""
STEP[list(b"{[")] = 1
STEP[list(b"}]")] = -1
_backslashes: Final = re.compile(rb"\\*")
_key: Final = re.compile(rb'(?<!\\)"([^"\\]{1,64})"[ \t\r\n]*:[ \t\r\n]*\Z')
_KEY_BYTES: Final = 200

_T = TypeVar("_T")


class LongList(NamedTuple):
    """The longest list that is a value of the body's object: its key, its items in parts, and the body without them."""

    key: str
    parts: list[memoryview]
    rest: bytes


def pieces(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of a JSON text and their places, with spaces for escaped backslashes and quotes."""
    at = 0
    while at < len(body):
        # No piece ends within a run of backslashes, whose pairs are escaped backslashes.
        end = min(len(body), at + _SCAN_BYTES)
        run = _backslashes.match(body, end - 1)
        end = min(len(body), run.end() + 1) if run is not None else end
        piece = body[at:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        yield at, piece
        at = end


def structure_places(chunk: NDArray[np.uint8], open_string: int) -> tuple[NDArray[np.intp], int]:
    """Return the places of brackets and commas outside of strings, and 1 if the chunk ends within a string, else 0.

    open_string is the number that the chunk before it gave.
    """
    parity = (np.cumsum(chunk == QUOTE, dtype=np.uint8) + open_string) & 1  # wraps at 256, which is even
    return np.flatnonzero(_IS_STRUCTURE[chunk] & (parity == 0)), int(parity[-1]) if len(parity) else open_string


def _scan_places(body: bytes) -> Iterator[tuple[NDArray[np.intp], NDArray[np.uint8]]]:
    """Yield the places of brackets and commas outside of strings, and these bytes, for a piece of a JSON text at a time."""
    open_string = 0
    for at, piece in pieces(body):
        chunk = np.frombuffer(piece, np.uint8)
        places, open_string = structure_places(chunk, open_string)
        yield places + at, chunk[places]


def find_long_list(body: bytes) -> LongList | None:
    """Return the longest list of a body, or None if there is none of PARTED_BYTES. Parts of a malformed list may be, too."""
    opened: list[int] = []
    closed: list[int] = []
    commas: list[NDArray[np.intp]] = []
    depth = 0
    for places, kinds in _scan_places(body):
        depths = depth + np.cumsum(STEP[kinds], dtype=np.int64)
        opened += places[(kinds == _OPEN) & (depths == 2)].tolist()
        closed += places[(kinds == _CLOSE) & (depths == 1)].tolist()
        commas.append(places[(kinds == _COMMA) & (depths == 2)])
        depth = int(depths[-1]) if len(depths) else depth
    if not opened or len(opened) != len(closed):
        return None
    start, end = max(zip(opened, closed, strict=True), key=lambda ends: ends[1] - ends[0])
    key = _key.search(body, max(0, start - _KEY_BYTES), start)
    if key is None or end - start < PARTED_BYTES:
        return None
    cuts = _cuts(np.concatenate(commas), start, end)
    view = memoryview(body)
    parts = [view[one + 1 : other] for one, other in pairwise(cuts)]
    return LongList(key[1].decode(errors="replace"), parts, body[: start + 1] + body[end:])


def _cuts(commas: NDArray[np.intp], start: int, end: int) -> list[int]:
    """Return the places between which the parts of a list lie: its brackets, and some of its commas."""
    cuts = [start]
    while True:
        index = int(np.searchsorted(commas, cuts[-1] + _PART_BYTES))
        if index >= len(commas) or commas[index] >= end:
            return [*cuts, end]
        cuts.append(int(commas[index]))


def decode_json(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Return the decoded body, a large one in parts. Raises the decoder's errors."""
    call = _decode_in_parts(decoder, body) if len(body) >= PARTED_BYTES else None
    return decoder.decode(body) if call is None else call


def without_long_list(body: bytes) -> bytes:
    """Return a body without the items of its longest list, to look at its other fields. A small body stays as it is."""
    found = find_long_list(body) if len(body) >= PARTED_BYTES else None
    return body if found is None else found.rest


def _decode_in_parts(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T | None:
    """Return the decoded body, or None if it must be decoded whole: it has no long list, or has a fault to be named."""
    found = find_long_list(body)
    field = _field(decoder.type, found.key) if found is not None else None
    if found is None or field is None:
        return None
    name, max_length, decode = field
    try:
        call = decoder.decode(found.rest)
        items: list[Any] = []
        for part in found.parts:
            decoded = decode(b"[%b]" % part)
            if not decoded:
                return None
            items += decoded
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if getattr(call, name) != [] or len(items) > max_length:
        return None
    msgspec.structs.force_setattr(call, name, items)  # pyright: ignore[reportArgumentType]
    return call


@lru_cache
def _field(body_type: Any, key: str) -> tuple[str, float, Any] | None:
    """Return the field of a key with a list: its name, the most items, and the decoder of some of them. None for any other."""
    if not (isinstance(body_type, type) and issubclass(body_type, msgspec.Struct)):
        return None
    for field in msgspec.structs.fields(body_type):
        if field.encode_name == key and (found := list_in(field.type)) is not None:
            list_type, max_length = found
            return field.name, max_length, msgspec.json.Decoder(list_type).decode
    return None


def list_in(field_type: Any, max_length: float = math.inf) -> tuple[Any, float] | None:
    """Return the list among the types of a field, and the most items that it may have; None without a list."""
    if get_origin(field_type) is list:
        return field_type, max_length
    args = get_args(field_type)
    if get_origin(field_type) is Annotated:
        lengths = [meta.max_length for meta in args[1:] if isinstance(meta, msgspec.Meta)]
        return list_in(args[0], min((length for length in lengths if length is not None), default=math.inf))
    return next((found for arg in args if (found := list_in(arg)) is not None), None)
