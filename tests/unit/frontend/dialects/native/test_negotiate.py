from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.dialects.native.negotiate import content_type, is_msgpack, wants_msgpack


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("", False),
        ("application/msgpack", True),
        ("application/x-msgpack", True),
        ("Application/MsgPack; charset=binary", True),
        ("application/json", False),
        ("application/vnd.msgpack", False),
        ("text/plain", False),
        ("application/octet-stream", False),
        ("msgpack", False),
    ],
)
def test_content_type_chooses_the_request_decoder(header, expected):
    assert is_msgpack(header) is expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, True),
        ("", True),
        ("*/*", True),
        ("text/html", True),
        ("application/*", True),
        ("application/json", False),
        ("APPLICATION/JSON", False),
        ("text/html, application/json;q=0.1", False),
        ("application/json, application/msgpack;q=0.1", True),
        ("application/x-msgpack;q=0", True),
        ("application/problem+json", True),
    ],
)
def test_accept_chooses_the_response_format(header, expected):
    assert wants_msgpack(header) is expected


_HEADERS = st.lists(
    st.sampled_from(
        [
            "application/msgpack",
            "Application/X-MsgPack",
            "application/json",
            "APPLICATION/JSON",
            "*/*",
            ";q=0.5",
            ", ",
            "x",
        ]
    ),
    max_size=6,
).map("".join)


@given(_HEADERS)
def test_accept_follows_the_ordered_rules_for_any_combination(header):
    lowered = header.lower()
    named = "application/msgpack" in lowered or "application/x-msgpack" in lowered
    assert is_msgpack(header) is named
    assert wants_msgpack(header) is (not header or named or "application/json" not in lowered)


def test_success_content_types():
    assert (content_type(True), content_type(False)) == ("application/msgpack", "application/json")
