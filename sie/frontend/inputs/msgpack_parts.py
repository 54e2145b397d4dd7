"""Counts the values of a large msgpack body, and decodes it item by item, so that other threads run meanwhile.

A decoder keeps the interpreter lock, some 50 ms for 32 MiB of text that is not ASCII. It skips an item in no time, because
msgpack gives the length of each text before it. So the body is decoded with its items left out, and then each item.

That is true of few values only: 30 million of one byte each took 150 ms, and as long again within an item. So they are
counted first, from one to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args

import msgspec

from sie.frontend.inputs.json_parts import PARTED_BYTES, list_in

_T = TypeVar("_T")

_RUN: Final = re.compile(rb"[\x00-\xa0\xc0-\xc3\xe0-\xff]{1,65536}")
"""Values of one byte: small numbers, empty texts, constants, and the beginnings of small lists and maps."""
_MORE_BYTES: Final = {
    **{0xA0 + length: length for length in range(1, 32)},
    **dict.fromkeys((0xCC, 0xD0), 1), **dict.fromkeys((0xCD, 0xD1, 0xD4, 0xDC, 0xDE), 2), 0xD5: 3,
    **dict.fromkeys((0xCA, 0xCE, 0xD2, 0xDD, 0xDF), 4), 0xD6: 5, **dict.fromkeys((0xCB, 0xCF, 0xD3), 8), 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""By the first byte of a value: the bytes after it, for those of one size."""
_LENGTHS: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}  # fmt: skip
"""By the first byte of binary data, an extension or a text: the bytes of its length, and those of its type."""


def has_more_values(body: bytes, most: int) -> bool:
    """Whether the beginnings and entries of a body's lists and maps, all its values, are more than most. It may be malformed.

    A value takes a byte or more, so that a smaller body is not looked at.
    """
    at = num_values = 0
    while at < len(body) and num_values <= most and len(body) > most:
        first = body[at]
        if (more := _MORE_BYTES.get(first)) is not None:
            at += 1 + more
            num_values += 1
        elif (length := _LENGTHS.get(first)) is not None:
            size, kind = length
            at += 1 + size + kind + int.from_bytes(body[at + 1 : at + 1 + size])
            num_values += 1
        elif (run := _RUN.match(body, at)) is not None:
            num_values += run.end() - at
            at = run.end()
    return num_values > most


class _Parts(NamedTuple):
    """The decoders of a body's parts: of the body with undecoded items in the field `name`, and of one item."""

    name: str
    decode_body: Callable[[bytes], Any]
    decode_item: Callable[[msgspec.Raw], Any]


def decode_msgpack(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    """Return the decoded body, the items of a large one by themselves. Raises the decoder's errors."""
    parts = _parts_of(decoder.type) if len(body) >= PARTED_BYTES else None
    if parts is None:
        return decoder.decode(body)
    try:
        call = parts.decode_body(body)
        items = [parts.decode_item(raw) for raw in getattr(call, parts.name)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decoder.decode(body)  # it names the place of the fault
    msgspec.structs.force_setattr(call, parts.name, items)
    return call


@lru_cache
def _parts_of(body_type: Any) -> _Parts | None:
    """Return the parts of a body; None for one without a list of structs, and for one whose list may be left out."""
    if not (isinstance(body_type, type) and issubclass(body_type, msgspec.Struct)):
        return None
    for field in msgspec.structs.fields(body_type):
        found = list_in(field.type)
        (item_type,) = get_args(found[0]) if found is not None else (None,)
        if (
            found is not None
            and field.required
            and isinstance(item_type, type)
            and issubclass(item_type, msgspec.Struct)
        ):
            items = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=int(found[1]))]
            undecoded = msgspec.defstruct(
                "Undecoded", [(field.name, items)], bases=(body_type,), kw_only=True, gc=False
            )
            return _Parts(
                field.name, msgspec.msgpack.Decoder(undecoded).decode, msgspec.msgpack.Decoder(item_type).decode
            )
    return None
