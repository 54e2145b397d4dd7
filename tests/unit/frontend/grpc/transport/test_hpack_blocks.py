"""Header blocks: what the hpack package reads in them, within limits that hold while they are read."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder, HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.hpack import decode_integer
from hpack.table import HeaderTable
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from sie.frontend.grpc.transport.hpack_blocks import decode_block

TEXT = st.binary(max_size=40)
LISTS = st.lists(st.lists(st.tuples(TEXT, TEXT, st.booleans()), max_size=8), min_size=1, max_size=6)


def decoded(block: bytes, table: HeaderTable) -> list[tuple[bytes, bytes]] | None:
    """Return the entries, or None for a block that is refused."""
    try:
        return decode_block(block, table, 1 << 16, 512)
    except HPACKError:
        return None


@settings(max_examples=200, deadline=None)
@given(LISTS, st.booleans(), st.sampled_from([None, 0, 100, 4096]))
def test_decoded_lists_equal_the_encoded_ones(
    lists: list[list[tuple[bytes, bytes, bool]]], is_huffman: bool, size: int | None
):
    encoder, table = Encoder(), HeaderTable()
    for fields in lists:
        if size is not None:
            encoder.header_table_size = size
        block = encoder.encode(fields, huffman=is_huffman)
        assert decoded(block, table) == [(name, value) for name, value, _ in fields]


def num_resizes(block: bytes) -> int:
    """Return how often a block resizes the table at its start. Source: RFC 7541, section 6.3."""
    count = 0
    while block and block[0] & 0xE0 == 0x20:
        block, count = block[decode_integer(block, 5)[1] :], count + 1
    return count


@settings(max_examples=400, deadline=None)
@example([b"   \x81"])
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=4))
def test_any_bytes_decode_as_in_the_hpack_package(blocks: list[bytes]):
    decoder, table = Decoder(1 << 16), HeaderTable()
    for block in blocks:
        found = decoded(block, table)
        try:
            expected = [tuple(field) for field in decoder.decode(block, raw=True)]
        except HPACKError:
            expected = None
        if found is None and expected is not None and num_resizes(block) > 2:
            event("more resizes than a client needs")
            return
        assert found == expected
        event("refused" if found is None else "read")
        if found is None:
            return
        assert list(table.dynamic_entries) == list(decoder.header_table.dynamic_entries)


@pytest.mark.parametrize(
    "block",
    [b"\x81" * 513, b"\x00\x01a\x00" * 513, b"\x40\x01a\x7f\xe9\x06" + b"b" * 1000 + b"\xbe" * 70],
)
def test_a_list_over_a_limit_is_refused_while_it_is_read(block: bytes):
    with pytest.raises(OversizedHeaderListError):
        decode_block(block + b"\xff" * 100_000, HeaderTable(), 1 << 16, 512)


@pytest.mark.parametrize(
    "block",
    [
        b"\x20\x20\x20",
        b"\x82\x20",
        b"\x3f\xe2\x1f",
        b"\xff" * 10,
        b"\x80",
        b"\x00\x7f\xff\xff\xff\xff\x7f",
        b"\x40\x01",
        b"\x00",
    ],
)
def test_a_malformed_block_is_refused(block: bytes):
    with pytest.raises(HPACKDecodingError):
        decode_block(block, HeaderTable(), 1 << 16, 512)
