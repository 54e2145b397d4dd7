"""A body that is decoded in parts gives what it gives as a whole, and no other body is accepted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.inputs import json_parts
from sie.frontend.inputs.json_parts import decode_json, find_long_list, without_long_list


class Item(msgspec.Struct, gc=False):
    text: str = ""
    metadata: msgspec.Raw = msgspec.Raw(b"")


class Body(msgspec.Struct, gc=False):
    items: Annotated[list[Item | str], msgspec.Meta(max_length=500)] | None = None
    names: str | list[Any] = ""
    frozen: tuple[int, ...] = ()
    n: int = 0


DECODER = msgspec.json.Decoder(Body)


SIZES = {name: getattr(json_parts, name) for name in ("PARTED_BYTES", "_SCAN_BYTES", "_PART_BYTES")}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(SIZES, (40, 7, 16), strict=True):
        monkeypatch.setattr(json_parts, name, value)


def plain(call: Body) -> dict[str, Any]:
    """Return what compares by value: a Raw is a view of its body."""
    items = [one if isinstance(one, str) else (one.text, bytes(one.metadata)) for one in call.items or ()]
    return {"items": items, "names": call.names, "frozen": call.frozen, "n": call.n}


def outcome(decode: Callable[[bytes], Body], body: bytes) -> dict[str, Any] | str:
    """Return what a body is decoded to, or the error."""
    try:
        return plain(decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)


_TEXTS = st.text(st.sampled_from('[]{}",:\\a ü'), max_size=12)
_JSON = st.recursive(
    _TEXTS | st.integers(-9, 9), lambda one: st.lists(one) | st.dictionaries(_TEXTS, one), max_leaves=6
)
_ITEMS = st.lists(_TEXTS | st.fixed_dictionaries({"text": _TEXTS}, optional={"metadata": _JSON, "more": _JSON}))
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "items": _ITEMS,
        "names": _TEXTS | st.lists(_JSON),
        "more": _JSON,
        "n": st.integers(),
        "frozen": st.lists(st.integers()),
    },
)


@given(_BODIES, st.booleans(), st.sampled_from([None, 1]))
def test_a_body_in_parts_is_the_whole_body(value: dict[str, Any], use_ascii: bool, indent: int | None):
    body = json.dumps(value, ensure_ascii=use_ascii, indent=indent).encode()
    assert plain(decode_json(DECODER, body)) == plain(DECODER.decode(body))


@given(_BODIES, st.data())
def test_a_damaged_body_is_refused_as_a_whole_one_is(value: dict[str, Any], data: st.DataObject):
    body = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))  # earlier damage may have left nothing
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b",", b"]", b"[", b'"', b"\\", b"{", b" "])
        )
    text = bytes(body)
    assert outcome(lambda text: decode_json(DECODER, text), text) == outcome(DECODER.decode, text)


@pytest.mark.parametrize(
    "items",
    [
        b'["a",' + b" " * 99 + b',"b"]', b'["a",' + b" " * 99 + b"]", b"[" + b" " * 99 + b"]", b'["' + b"a" * 50 + b'",3]',
        b'["' + b"a" * 50 + b'"}', b"[" + b'"a",' * 600 + b'"a"]', b'["' + b"a" * 50 + b'"],"items":["b"]', b'["\\ud800' + b"a" * 50 + b'"]',
    ],
)  # fmt: skip
def test_a_fault_is_named_as_in_a_whole_body(items: bytes):
    body = b'{"items":' + items + b',"n":1}'
    assert outcome(lambda text: decode_json(DECODER, text), body) == outcome(DECODER.decode, body)


def test_the_rest_of_a_body_has_its_other_fields():
    body = json.dumps({"n": 3, "names": ["short"], "items": ["text " * 9] * 3}).encode()
    assert json.loads(without_long_list(body)) == {"n": 3, "names": ["short"], "items": []}
    assert without_long_list(b'{"items":["a"]}') == b'{"items":["a"]}'


def test_a_key_with_a_quote_in_it_is_no_other_key():
    assert find_long_list(b'{"a\\"items":["' + b"x" * 50 + b'"]}') is None


@pytest.mark.timing
def test_a_large_body_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch):
    for name, value in SIZES.items():
        monkeypatch.setattr(json_parts, name, value)
    body = json.dumps({"items": ["ü" * 16_000] * 450}).encode()
    decoders = (lambda: DECODER.decode(body)), (lambda: decode_json(DECODER, body))
    whole_s, parts_s = (min(longest_turn_s(decode) for _ in range(3)) for decode in decoders)
    assert parts_s < whole_s / 2


def longest_turn_s(decode: Callable[[], Body]) -> float:
    """Return the longest processor time that a thread which decodes takes between two turns of this one."""
    may_end = threading.Event()

    def work() -> None:
        decode()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    clock, longest_s, last_s = time.pthread_getcpuclockid(thread.ident), 0.0, 0.0
    num_idle = 0
    while num_idle < 20:
        time.sleep(0.001)
        now_s = time.clock_gettime(clock)
        num_idle = num_idle + 1 if now_s == last_s else 0
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    may_end.set()
    thread.join()
    return longest_s
