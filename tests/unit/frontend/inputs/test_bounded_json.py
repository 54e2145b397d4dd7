from __future__ import annotations

import json
import re
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.inputs import bounded_json, json_parts
from sie.frontend.inputs.bounded_json import check_json, check_utf8, decode_free_form, decode_typed
from sie.values.errors import BadRequest

MAX_DEPTH = 8


def nested(depth, inner=b""):
    return b"[" * depth + inner + b"]" * depth


def model_depth(value):
    if isinstance(value, dict):
        return 1 + max((model_depth(child) for child in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((model_depth(child) for child in value), default=0)
    return 0


_STRINGS = st.text(st.sampled_from('[]{}",\\a'), max_size=6)
_JSON = st.recursive(
    _STRINGS | st.integers() | st.none(),
    lambda child: st.lists(child, max_size=5) | st.dictionaries(_STRINGS, child, max_size=4),
    max_leaves=40,
)


@given(_JSON, st.booleans())
def test_depth_is_exact_whatever_the_strings_hold(value, use_ascii):
    body = json.dumps(value, ensure_ascii=use_ascii).encode()
    depth = model_depth(value)
    check_json(body, depth)
    if depth:
        with pytest.raises(BadRequest, match="nested too deep"):
            check_json(body, depth - 1)


def test_strings_with_an_even_number_of_backslashes_end_where_json_says():
    body = json.dumps({"a": "\\", "b": ["[" * 50, '\\"' * 3, "\\\\"]}).encode()
    check_json(body, 2)
    with pytest.raises(BadRequest):
        check_json(body, 1)


def test_many_brackets_in_texts_are_not_depth():
    check_json(json.dumps({"items": [{"text": "[" * 100_000}]}).encode(), MAX_DEPTH)


def test_strings_are_followed_across_scan_chunks(monkeypatch):
    monkeypatch.setattr(json_parts, "_SCAN_BYTES", 7)
    value = {"items": [{"text": "}]{[" * (i % 5)} for i in range(40)]}
    check_json(json.dumps(value).encode(), 3)
    with pytest.raises(BadRequest):
        check_json(json.dumps(value).encode(), 2)


@pytest.mark.parametrize("opener", [b"[", b'{"a":'])
def test_a_million_levels_are_refused(opener):
    with pytest.raises(BadRequest):
        check_json(b'{"unknown":' + opener * 1_000_000, 64)


@pytest.mark.parametrize(
    "body",
    [
        b'{"items":[' + b"{}," * 1_000_000 + b"{}]}",
        b'{"input":[' + b"257," * 2_000_000 + b"1]}",
        b'{"input":[' + b'"",' * 2_000_000 + b'""]}',
        b'{"input":[' + b'",",' * 2_000_000 + b'""]}',
    ],
)
def test_amplifying_bodies_are_refused_without_growing(body):
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="at most 65600 objects"):
            check_json(body, 64)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


def test_a_large_text_with_many_commas_passes():
    check_json(json.dumps({"items": [{"text": "a,b " * 500_000}]}).encode(), MAX_DEPTH)


@pytest.mark.parametrize("body", [b"", b"{", b"]" * 1000 + b"[" * 1000, b'"' * 1001, b"\\" * 99 + b"[" * 8])
def test_other_malformed_json_is_left_to_the_decoder(body):
    check_json(body, MAX_DEPTH)


class _Body(msgspec.Struct):
    items: list[str]
    options: msgspec.Raw = msgspec.Raw(b"")


_TYPED = {True: msgspec.msgpack.Decoder(_Body), False: msgspec.json.Decoder(_Body)}


@pytest.mark.parametrize(
    ("body", "msgpack", "message"),
    [
        (b'{"items":[1]}', False, "Expected `str`, got `int` - at `$.items[0]`"),
        (b"{}", False, "Object missing required field `items`"),
        (b'{"items":[]}x', False, "trailing characters"),
        (b'{"items":["\xff"]}', False, "Invalid UTF-8"),
        (b'{"items":["\\ud800 and more"]}', False, "unexpected end of escaped utf-16 surrogate pair (byte 17)"),
        (b'{"items":["\\ud800"]}', False, "unexpected end of escaped utf-16 surrogate pair (byte 17)"),
        (b'{"items":["\\uDBff"]}\n', False, "unexpected end of escaped utf-16 surrogate pair (byte 17)"),
        (b'{"items":["\\ud83d\\ude00"', False, "truncated"),
        (b'{"items":["\\ud8', False, "truncated"),
        (b"", True, "truncated"),
        (b"\x81\xa5items\x91\xa1\xff", True, "Invalid UTF-8"),
        (b"\x81\xa1x" + b"\x91" * 900_000 + b"\xc0", True, "nested too deep"),
    ],
)
def test_every_decoder_refusal_is_a_bad_request_with_its_path(body, msgpack, message):
    with pytest.raises(BadRequest, match=re.escape(message)):
        decode_typed(_TYPED[msgpack], body)


@pytest.mark.parametrize("msgpack", [True, False])
class TestFreeForm:
    def raw(self, value, msgpack):
        return msgspec.Raw(msgspec.msgpack.encode(value) if msgpack else msgspec.json.encode(value))

    def decode(self, raw, msgpack):
        return decode_free_form(raw, msgpack=msgpack, path="$.params.options", max_depth=MAX_DEPTH)

    def test_absent_and_null_are_empty(self, msgpack):
        assert self.decode(msgspec.Raw(b""), msgpack) == {}
        assert self.decode(self.raw(None, msgpack), msgpack) == {}

    def test_a_map_is_returned(self, msgpack):
        assert self.decode(self.raw({"a": [1, {"b": None}]}, msgpack), msgpack) == {"a": [1, {"b": None}]}

    def test_another_type_is_refused_with_the_path(self, msgpack):
        with pytest.raises(BadRequest, match=r"Expected `object \| null`, got `int` - at `\$\.params\.options`"):
            self.decode(self.raw(5, msgpack), msgpack)

    def test_over_64_kib_is_refused(self, msgpack):
        with pytest.raises(BadRequest, match="65536"):
            self.decode(self.raw({"a": "x" * 65_536}, msgpack), msgpack)

    def test_depth_is_held_to_the_limit(self, msgpack):
        self.decode(msgspec.Raw(self._deep(MAX_DEPTH, msgpack)), msgpack)
        with pytest.raises(BadRequest, match="nested too deep"):
            self.decode(msgspec.Raw(self._deep(MAX_DEPTH + 1, msgpack)), msgpack)

    def _deep(self, depth, msgpack):
        if msgpack:
            return b"\x81\xa1a" + b"\x91" * (depth - 1) + b"\xc0"
        return b'{"a":' + nested(depth - 1, b"null") + b"}"


@pytest.mark.parametrize("cut", [b"\xe2\x98", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80"])
def test_only_utf8_passes_wherever_a_scan_cuts_it(monkeypatch, cut):
    monkeypatch.setattr(bounded_json, "_SCAN_BYTES", 2)
    for shift in range(3):
        check_utf8(b"a" * shift + "\N{SNOWMAN}\N{GRINNING FACE}".encode())
        for body in (b"a" * shift + cut, b"a" * shift + cut + b"bb"):
            with pytest.raises(BadRequest, match="UTF-8"):
                check_utf8(body)
