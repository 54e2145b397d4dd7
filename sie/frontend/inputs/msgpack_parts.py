"""Decodes a large msgpack body item by item, so that other threads run between two items.

A decoder keeps the interpreter lock, some 50 ms for 32 MiB of text that is not ASCII. It skips an item in no time, because
msgpack gives the length of each text before it. So the body is decoded with its items left out, and then each item.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import msgspec

from sie.frontend.inputs.json_parts import PARTED_BYTES, list_in

_T = TypeVar("_T")


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
