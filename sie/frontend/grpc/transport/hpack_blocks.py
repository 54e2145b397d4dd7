"""Decodes HPACK blocks to entries. Counts entries and bytes while decoding, so that no block costs more than its limits.

The decoder of the hpack package counts no entries, and copies the rest of the block for each literal. This module uses
only its table and its Huffman code. Pure, except for the table. Source: RFC 7541, sections 5 and 6.
"""

from __future__ import annotations

from typing import Final

from hpack import HPACKDecodingError, OversizedHeaderListError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from sie.frontend.grpc.transport.frames import DEFAULT_TABLE_BYTES

ENTRY_BYTES: Final = 32
"""Overhead of each entry in the size of a list. Source: RFC 9113, section 10.5.1."""
_MAX_RESIZES: Final = 2
"""A client resizes the table to the smallest size since its last block, then to the current one. Source: section 4.2."""
_MAX_SHIFT: Final = 28


def decode_block(block: bytes, table: HeaderTable, max_bytes: int, max_entries: int) -> list[tuple[bytes, bytes]]:
    """Return the entries of a block, and apply its changes to the table.

    Raises OversizedHeaderListError over a limit, and another HPACKError for a malformed block; the table is then lost.
    """
    fields: list[tuple[bytes, bytes]] = []
    at, size, num_bytes, num_resizes = 0, len(block), 0, 0
    try:
        while at < size:
            first = block[at]
            if first >= 0x80:
                index, at = _integer(block, at, 0x7F)
                field = table.get_by_index(index)
            elif first >> 5 == 1:
                value, at = _integer(block, at, 0x1F)
                num_resizes += 1
                if fields or num_resizes > _MAX_RESIZES or value > DEFAULT_TABLE_BYTES:
                    raise HPACKDecodingError("a table size that is not allowed")
                table.maxsize = value
                continue
            else:
                index, at = _integer(block, at, 0x3F if first >= 0x40 else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, at = _string(block, at)
                text, at = _string(block, at)
                field = (name, text)
                if first >= 0x40:
                    table.add(name, text)
            fields.append(field)
            num_bytes += len(field[0]) + len(field[1]) + ENTRY_BYTES
            if num_bytes > max_bytes or len(fields) > max_entries:
                raise OversizedHeaderListError("far too many headers")
    except IndexError as error:
        raise HPACKDecodingError("a block that is cut short") from error
    return fields


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return the integer whose first byte, under mask, is at `at`, and its end. Source: section 5.1."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, _MAX_SHIFT, 7):
        more = block[at]
        at += 1
        value += (more & 0x7F) << shift
        if more < 0x80:
            return value, at
    raise HPACKDecodingError("an integer that is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return the string at `at`, and its end. Source: section 5.2."""
    is_huffman = block[at] >= 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HPACKDecodingError("a string that is cut short")
    text = block[at:end]
    return (decode_huffman(text) if is_huffman else text), end
