from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.anthropic.request import decode_messages
from sie.frontend.dialects.openai.embeddings import decode_embeddings
from sie.values.choices import with_choices
from sie.values.errors import BadRequest


class Inner(msgspec.Struct):
    kind: Literal["a", "b", "c"] | None = None


class Form(msgspec.Struct, kw_only=True):
    size: Literal["float", "base64"] | None = None
    zero: Literal[0] = 0
    parts: str | Annotated[list[Inner], msgspec.Meta(max_length=9)] | None = None
    by_name: dict[str, Literal["on", "off"]] = {}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"size": "int8"}', "Invalid enum value 'int8', expected 'float' or 'base64' - at `$.size`"),
        ('{"zero": 1}', "Invalid enum value 1, expected 0 - at `$.zero`"),
        ('{"parts": [{}, {"kind": "d"}]}', "Invalid enum value 'd', expected 'a', 'b' or 'c' - at `$.parts[1].kind`"),
        ('{"by_name": {"x": "or"}}', "Invalid enum value 'or', expected 'on' or 'off' - at `$.by_name[...]`"),
        (
            '{"size": "x` - at `$.zero`"}',
            "Invalid enum value 'x` - at `$.zero`', expected 'float' or 'base64' - at `$.size`",
        ),
        ('{"size": 1}', "Expected `str | null`, got `int` - at `$.size`"),
    ],
)
def test_an_error_names_the_choices_of_its_field(body, text):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=Form)
    assert with_choices(caught.value, Form) == text


def test_a_long_refused_value_is_cut():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"size": "%s"}' % (b"x" * 9999), type=Form)
    assert len(with_choices(caught.value, Form)) < 200


def test_routes_of_both_kinds_name_the_choices():
    with pytest.raises(BadRequest, match=r"'int8', expected 'float' or 'base64'"):
        decode_embeddings(b'{"input": "a", "encoding_format": "int8"}', None, Limits())
    with pytest.raises(BadRequest, match=r"'messages\[0\].role': .*'you', expected 'user', 'assistant' or 'system'"):
        decode_messages(b'{"max_tokens": 1, "messages": [{"role": "you", "content": "a"}]}', None, Limits())
