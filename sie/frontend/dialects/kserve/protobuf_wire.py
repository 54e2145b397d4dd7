"""Reads and writes bytes fields of protobuf messages as views, without the protobuf library.

A message class copies every bytes field when it reads it, and again when it writes it. Tensors are such fields. Pure.
Source: Protocol Buffers, Encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from sie.values.errors import BadRequest

VARINT: Final = 0
BYTES: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_MAX_VARINT_BYTES: Final = 10
_MAX_FIELD: Final = (1 << 29) - 1
MAX_FIELDS: Final = 16_384
"""Fields of one message. Python reads them one by one: eight million empty ones held the event loop for seconds."""
UNCHECKED_BYTES: Final = 2 * MAX_FIELDS
"""A message up to this size has no more than MAX_FIELDS, because a field has two bytes or more."""


class MalformedMessage(BadRequest):
    """Raised for bytes that are not a message of the expected type."""


class WireField(NamedTuple):
    """One field: its position, including its tag, and the start of its value."""

    number: int
    wire_type: int
    start: int
    value_start: int
    end: int


def wire_fields(data: bytes | memoryview, max_fields: int = MAX_FIELDS) -> Iterator[WireField]:
    """Yield the fields of a message in their order. Raises MalformedMessage, also for more than max_fields."""
    position = 0
    while position < len(data):
        max_fields -= 1
        if max_fields < 0:
            raise too_many_fields()
        field = wire_field(data, position)
        yield field
        position = field.end


def wire_field(data: bytes | memoryview, start: int) -> WireField:
    """Return the field at start. Raises MalformedMessage."""
    tag = data[start]
    position = start + 1
    if tag >= 0x80:  # most tags and lengths are one byte
        tag, position = _varint(data, start)
    number, wire_type = tag >> 3, tag & 7
    value_start = position
    if wire_type == VARINT:
        _, position = _varint(data, position)
    elif wire_type == BYTES:
        length, value_start = _varint(data, position)
        position = value_start + length
    elif wire_type in _FIXED_BYTES:
        position += _FIXED_BYTES[wire_type]
    else:
        raise MalformedMessage(f"the message has a field of wire type {wire_type}")
    if position > len(data) or not 0 < number <= _MAX_FIELD:
        raise MalformedMessage("the message is truncated, or has a field without a number")
    return WireField(number, wire_type, start, value_start, position)


def _varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    if position < len(data) and data[position] < 0x80:
        return data[position], position + 1
    value = 0
    for shift, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedMessage("the message has a truncated number")


def cut_views(data: bytes, number: int) -> tuple[bytes, list[memoryview]]:
    """Return a message without its repeated bytes field `number`, and views of that field's values.

    Raises MalformedMessage.
    """
    view, size = memoryview(data), len(data)
    rest: list[memoryview] = []
    values: list[memoryview] = []
    tag = number << 3 | BYTES
    position = kept_from = 0
    num_left = MAX_FIELDS
    while position < size:
        num_left -= 1
        if num_left < 0:
            raise too_many_fields()
        # Fast path: most fields are short bytes fields, and `wire_field` costs more for each.
        if size - position > 1 and data[position] & 0x87 == BYTES and data[position] > 7 and data[position + 1] < 0x80:
            start, value_start = position, position + 2
            position = value_start + data[position + 1]
            if position > size:
                raise MalformedMessage("the message is truncated, or has a field without a number")
            is_wanted = data[start] == tag
        else:
            field = wire_field(data, position)
            start, value_start, position = field.start, field.value_start, field.end
            is_wanted = field.number == number and field.wire_type == BYTES
        if is_wanted:
            rest.append(view[kept_from:start])
            values.append(view[value_start:position])
            kept_from = position
    if not values:
        return data, values
    rest.append(view[kept_from:])
    return b"".join(rest), values


def parse_with_views(cls: type[Any], data: bytes, number: int) -> tuple[Any, list[memoryview]]:
    """Return the message in data without a field, and views of its values, as `cut_views` does. Raises MalformedMessage."""
    rest, values = cut_views(data, number)
    return parse(cls, rest), values


def parse(cls: type[Any], data: bytes | memoryview) -> Any:
    """Return the message in data. Raises MalformedMessage, also for too many fields and numbers, those of its parts included."""
    if len(data) > UNCHECKED_BYTES:
        _check_fields(memoryview(data), cls.DESCRIPTOR, MAX_FIELDS)
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"the message is not a {cls.DESCRIPTOR.name}: {error}") from None


def _check_fields(data: memoryview, kind: Any, left: int) -> int:
    """Return how many fields may follow those of a message of a kind. Eight bytes of packed numbers count as one."""
    for field in wire_fields(data, left):
        left -= 1
        known = kind.fields_by_number.get(field.number) if field.wire_type == BYTES else None
        if known is not None and known.message_type is not None:
            left = _check_fields(data[field.value_start : field.end], known.message_type, left)
        elif known is not None and known.type not in (known.TYPE_STRING, known.TYPE_BYTES):
            left -= (field.end - field.value_start) // 8
        if left < 0:
            raise too_many_fields()
    return left


def too_many_fields() -> MalformedMessage:
    return MalformedMessage("the message has too many fields")


def append_bytes(head: bytes, number: int, values: Iterable[bytes | memoryview]) -> bytes:
    """Return an encoded message with the values of a repeated bytes field after it."""
    tag = _encoded(number << 3 | BYTES)
    parts: list[bytes | memoryview] = [head]
    for value in values:
        parts += (tag + _encoded(len(value)), value)
    return b"".join(parts)


def _encoded(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
