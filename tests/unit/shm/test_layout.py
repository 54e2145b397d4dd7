from __future__ import annotations

import struct

import pytest
from msgspec.structs import asdict

from sie.shm import layout
from sie.values.work_bytes import PROLOGUE


def test_descriptor_bytes_are_those_of_the_drawing() -> None:
    packed = layout.DESCRIPTOR.pack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)

    parts = [(1, 2), (2, 2), (3, 4), (4, 8), (5, 8), (6, 8), (7, 8), (8, 4), (9, 2), (10, 2)]
    assert packed == b"".join(value.to_bytes(width, "little") for value, width in parts) + bytes(16)


def test_descriptor_fields_have_the_order_of_the_bytes() -> None:
    descriptor = layout.Descriptor(*layout.DESCRIPTOR.unpack(layout.DESCRIPTOR.pack(*range(1, 11))))

    assert asdict(descriptor) == {
        "kind": 1, "flags": 2, "generation": 3, "request_id": 4, "offset": 5, "length": 6, "deadline_ns": 7,
        "num_tokens": 8, "part": 9, "parts": 10,
    }  # fmt: skip


def test_prologue_bytes_are_those_of_the_drawing() -> None:
    assert PROLOGUE.pack(1, 0x01020304) == b"\x01\0\0\0\x04\x03\x02\x01" + bytes(8)


def test_value_wider_than_its_field_is_refused() -> None:
    with pytest.raises(struct.error):
        layout.DESCRIPTOR.pack(1, 0, 1 << 32, 0, 0, 0, 0, 0, 0, 1)


def test_plain_kinds_are_the_enumerated_ones() -> None:
    assert list(layout.Kind) == [layout.SUBMIT, layout.REPLY, layout.ERROR, layout.TOKENS, layout.RELEASE]


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_round_up(nbytes: int, rounded: int) -> None:
    assert layout.round_up(nbytes) == rounded
