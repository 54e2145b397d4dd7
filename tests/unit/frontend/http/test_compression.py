"""Compressed bodies: what gzip and zlib write is read, what is a bomb or damaged is refused."""

from __future__ import annotations

import gzip
import zlib

import pytest

from sie.frontend.http.compression import choose_coding, compress, decompress
from sie.values.errors import BadRequest, InputTooLong, SieError

MIB = 1 << 20
TEXT = b"some tensors" * 1000


@pytest.mark.parametrize(
    ("coding", "packed"), [("gzip", gzip.compress(TEXT, mtime=0)), ("Deflate", zlib.compress(TEXT))]
)
def test_bodies_are_read_back(coding: str, packed: bytes):
    assert decompress(packed, coding, MIB, 20) == TEXT


def test_a_bomb_stops_at_the_limit():
    bomb = gzip.compress(bytes(64 * MIB))
    with pytest.raises(InputTooLong, match="over 1048576 bytes") as caught:
        decompress(bomb, "gzip", 256 * MIB, 10)
    assert caught.value.http_status == 413
    with pytest.raises(InputTooLong, match=f"over {16 * MIB} bytes"):
        decompress(bomb, "gzip", 16 * MIB, 100_000)
    assert len(decompress(bomb, "gzip", 64 * MIB, 100_000)) == 64 * MIB
    assert decompress(gzip.compress(bytes(MIB)), "gzip", 64 * MIB, 2) == bytes(MIB)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no gzip",
        gzip.compress(TEXT, mtime=0)[:-4],
        gzip.compress(TEXT, mtime=0)[:20],
        gzip.compress(TEXT, mtime=0) + b"x",
        zlib.compress(TEXT),
    ],
)
def test_what_is_damaged_is_a_bad_request(body: bytes):
    with pytest.raises(BadRequest):
        decompress(body, "gzip", MIB, 20)


@pytest.mark.parametrize("coding", ["br", "zstd", "", "gzip, gzip", "identity"])
def test_other_codings_are_unsupported(coding: str):
    with pytest.raises(SieError, match="Unsupported compression type") as caught:
        decompress(b"x", coding, MIB, 20)
    assert caught.value.http_status == 415


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("gzip, deflate", "gzip"),
        ("deflate;q=0.5, gzip", "deflate"),
        ("br, GZIP", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0.000, deflate; Q=0.", None),
        ("*", None),
    ],
)
def test_the_first_coding_that_can_be_sent_is_chosen(header: str, expected: str | None):
    assert choose_coding(header) == expected


def test_a_reply_is_compressed_only_when_that_helps():
    packed = compress(TEXT, "gzip")
    assert packed is not None
    assert gzip.decompress(packed) == TEXT
    assert zlib.decompress(compress(TEXT, "deflate") or b"") == TEXT
    assert compress(b"\x8f\x11", "gzip") is None
