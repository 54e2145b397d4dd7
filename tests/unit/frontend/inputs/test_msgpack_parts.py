"""A msgpack body whose items are decoded by themselves gives what it gives as a whole, and no other body is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.dialects.native import encode, extract, score
from sie.frontend.inputs import msgpack_parts
from sie.frontend.inputs.bounded_json import decode_typed
from sie.frontend.inputs.msgpack_parts import decode_msgpack, has_more_values
from sie.values.errors import BadRequest
from tests.unit.frontend.inputs.test_json_parts import longest_turn_s

pack = msgspec.msgpack.encode


class Item(msgspec.Struct, gc=False):
    text: str = ""
    data: memoryview | None = None
    metadata: msgspec.Raw = msgspec.Raw(b"")


class Body(msgspec.Struct, gc=False):
    items: Annotated[list[Item], msgspec.Meta(max_length=9)]
    names: list[str] = []
    n: int = 0


DECODER = msgspec.msgpack.Decoder(Body)


def plain(call: Body) -> Any:
    """Return what compares by value: a view is not its bytes."""
    items = [(item.text, bytes(item.data or b""), bytes(item.metadata)) for item in call.items]
    return items, call.names, call.n


def outcome(decode: Callable[[bytes], Body], body: bytes) -> Any:
    """Return what a body is decoded to, or the error."""
    try:
        return plain(decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return type(error), str(error)


def in_parts(body: bytes) -> Body:
    return decode_msgpack(DECODER, body)


@pytest.fixture(autouse=True)
def _parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack_parts, "PARTED_BYTES", 0)


_VALUES = st.recursive(
    st.none() | st.text(max_size=5) | st.integers(-99, 2**40) | st.binary(max_size=5),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=5,
)
_ITEMS = st.fixed_dictionaries(
    {}, optional={"text": st.text(), "data": st.binary(), "metadata": _VALUES, "more": _VALUES}
)
_BODIES = st.fixed_dictionaries(
    {"items": st.lists(_ITEMS | _VALUES, max_size=11)},
    optional={"names": st.lists(st.text() | st.integers(0, 9), max_size=3), "n": _VALUES, "more": _VALUES},
)


@given(_BODIES)
def test_a_body_in_parts_is_the_whole_body(value: Any):
    body = pack(value)
    assert outcome(in_parts, body) == outcome(DECODER.decode, body)


@given(_BODIES, st.data())
def test_a_damaged_body_is_refused_as_a_whole_one_is(value: Any, data: st.DataObject):
    body = bytearray(pack(value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    damaged = bytes(body)
    assert outcome(in_parts, damaged) == outcome(DECODER.decode, damaged)


@pytest.mark.parametrize("body", [{"items": None}, {"n": 1}, [], {"items": [{"text": 1}]}, {"items": [{}] * 10}])
def test_a_fault_is_named_as_in_a_whole_body(body: Any):
    assert outcome(in_parts, pack(body)) == outcome(DECODER.decode, pack(body))
    assert isinstance(outcome(in_parts, pack(body))[0], type)


def count(value: Any) -> int:
    """Return the number of values, lists and maps included."""
    if isinstance(value, dict):
        return 1 + sum(map(count, value)) + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


_COUNTED = st.recursive(
    st.none() | st.booleans() | st.text(max_size=40) | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=20)),
    lambda one: st.lists(one, max_size=20) | st.dictionaries(st.text(max_size=40), one, max_size=20),
)  # fmt: skip


@given(_COUNTED)
def test_the_values_of_a_body_are_counted(value: Any):
    body, num_values = pack(value), count(value)
    assert not has_more_values(body, num_values)
    assert has_more_values(body, num_values - 1)


@pytest.mark.parametrize("value", ["a" * 70_000, b"a" * 70_000, [0] * 70_000, dict.fromkeys(map(str, range(70_000)))])
def test_the_values_of_a_large_body_are_counted(value: Any):
    assert not has_more_values(pack(value), count(value))
    assert has_more_values(pack(value), count(value) - 1)


@given(st.binary(max_size=50), st.integers(0, 60))
def test_no_bytes_have_more_values_than_bytes(body: bytes, most: int):
    assert not has_more_values(body, most) or most < len(body)


@pytest.mark.parametrize("decoder", [encode._FROM_MSGPACK, score._FROM_MSGPACK, extract._FROM_MSGPACK])
def test_countless_values_are_refused_wherever_they_are(decoder: msgspec.msgpack.Decoder[Any]):
    many, few = [0] * 1_000_001, [0] * 999_000
    for place in ({"more": many}, {"items": [{"more": many}]}, {"params": {"options": {"x": many}}}):
        with pytest.raises(BadRequest, match="must hold at most 1000000 values"):
            decode_typed(decoder, pack({"query": {}, "items": [{"text": "a"}]} | place))
    assert decode_typed(decoder, pack({"query": {}, "items": [{"text": "a"}], "more": few})).items[0].text == "a"


@pytest.mark.timing
@pytest.mark.parametrize("decoder", [encode._FROM_MSGPACK, score._FROM_MSGPACK, extract._FROM_MSGPACK])
def test_a_large_body_lets_other_threads_run(decoder: msgspec.msgpack.Decoder[Any]):
    body = pack({"query": {"text": "q"}, "items": [{"text": "ü" * 8000}] * 2000})
    decoders = (lambda: decoder.decode(body)), (lambda: decode_typed(decoder, body))
    whole_s, parts_s = (min(longest_turn_s(decode) for _ in range(3)) for decode in decoders)
    assert parts_s < whole_s / 2
