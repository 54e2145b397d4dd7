"""The events of a generated answer as parts of a `TextFrame`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec

from sie.values.errors import ProtocolError
from sie.values.generate import GenerateEvent

KINDS: Final[tuple[Any, ...]] = get_args(GenerateEvent)
"""The kinds of events; only ever appended to, since their numbers are sent."""
_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
_DECODERS: Final = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
_encode: Final = msgspec.msgpack.Encoder().encode


def encode_events(events: Sequence[GenerateEvent]) -> list[tuple[int, msgspec.Raw]]:
    """Return events for a frame."""
    return [(_NUMBERS[type(event)], msgspec.Raw(_encode(event))) for event in events]


def decode_events(events: Sequence[tuple[int, msgspec.Raw]]) -> list[GenerateEvent]:
    """Return the events of a frame. Raises ProtocolError."""
    try:
        return [_DECODERS[number].decode(fields) for number, fields in events]
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise ProtocolError(f"an event that cannot be decoded: {error}") from error
