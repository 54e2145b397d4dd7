"""Finds tool calls in a model's text, for the formats that models are trained on. Pure.

    hermes   any text, and anywhere in it <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeatedly
    llama    only calls: {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>, separated by ;
    gemma    only calls, as for llama or in an array, perhaps in a fence ```json or ```tool_code
    json     as for gemma

Text that only looks like a call (no JSON, no name, or not one of the request's tools) stays text, as written. A call
that `max_tokens` or a stop string cut is dropped: it is neither a call nor text. White space around calls is dropped.
Source: chat templates of Hermes 2 Pro, Qwen 2.5 and 3, Llama 3.1 and 3.2, and the prompt guide of Gemma 3.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from sie.frontend.generation.markers import JsonScanner, common_end, has_odd_quotes
from sie.frontend.generation.parsers import OutputParser, Piece, Text
from sie.values.generate import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENERS: Final = ("<|python_tag|>", "```json", "```tool_call", "```tool_code", "```")
_CALL_OPENERS: Final = ("<|python_tag|>", "```tool_call", "```tool_code")
"""The openers that only calls follow."""
_TYPED: Final = '{"type":"function"'
_LEAST_TAG: Final = len("<tool")
"""A shorter beginning of an opening tag may also be ordinary text."""
_MAX_NAME: Final = 256
_SPACE: Final = re.compile(r"\s+")
_SEPARATORS: Final = " \t\r\n;,"
NewId = Callable[[], str]


def new_call_id() -> str:
    """Return a new, unique id for a call."""
    return f"call_{secrets.token_hex(12)}"


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_decode_call = msgspec.json.Decoder(_Written).decode
_decode_calls = msgspec.json.Decoder(list[_Written]).decode


def read_calls(text: str, names: Collection[str], new_id: NewId) -> list[ToolCall] | None:
    """Return the calls in JSON text, one object or an array of objects, or None if it holds anything else."""
    try:
        written = _decode_calls(text) if text.lstrip().startswith("[") else [_decode_call(text)]
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    calls: list[ToolCall] = []
    for call in written:
        arguments = _arguments(call)
        if call.name not in names or arguments is None:
            return None
        calls.append(ToolCall(id=new_id(), name=call.name, arguments=arguments))
    return calls or None


def is_begun_call(json_text: str, names: Collection[str]) -> bool:
    """Return whether incomplete JSON may be the beginning of a call."""
    head = _SPACE.sub("", json_text[: 2 * _MAX_NAME]).lstrip("[")
    starts = (_TYPED, *(f'{{"name":"{name}"' for name in names))
    return any(start.startswith(head) or head.startswith(start) for start in starts)


def _arguments(call: _Written) -> str | None:
    """Return the JSON text of the arguments, or None if not an object. Some models write the object as a string."""
    text = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    return text


class TaggedCalls:
    """Parses calls between two tags, anywhere in the text (hermes)."""

    markers = (_OPEN, _CLOSE)

    def __init__(self, names: Collection[str], new_id: NewId = new_call_id) -> None:
        self._names = names
        self._new_id = new_id
        self._held = ""
        self._gap = ""
        """White space before the call that is being read. It becomes text again if the call is not valid."""
        self._is_inside = False
        self._num_passed = 0
        """Characters of the current call up to the end of the last closing tag inside a string; 0 without such a tag."""
        self._is_behind_call = False

    def push(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        self._held += text
        pieces: list[Piece] = []
        while (read := self._read_inside() if self._is_inside else self._read_text()) is not None:
            pieces += read
        return pieces

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """See `OutputParser`."""
        if self._is_inside:  # the end of the answer ends a call as well
            calls = read_calls(self._held, self._names, self._new_id)
            if calls is None and is_cut and is_begun_call(self._held, self._names):
                return []
            if calls is None and self._num_passed:  # the string that seemed to contain a closing tag has no end
                return [*self._end_call(self._held.index(_CLOSE)), *self.push(""), *self.flush(is_cut=is_cut)]
            return [*calls] if calls is not None else [Text(self._gap + _OPEN + self._held)]
        held, self._held = self._held, ""
        if is_cut and (length := common_end(held, _OPEN)) >= _LEAST_TAG:
            held = held[:-length].rstrip()
        if self._is_behind_call:
            held = held.lstrip()
        return [Text(held)] if held else []

    def _read_text(self) -> list[Piece] | None:
        """Return the text before the next call, or None if more text must come first."""
        before, found, rest = self._held.partition(_OPEN)
        if self._is_behind_call:
            before = before.lstrip()
        certain = before if found else before[: len(before) - common_end(before, _OPEN)]
        certain = certain.rstrip()
        if found:
            self._held, self._gap, self._is_inside = rest, before[len(certain) :], True
        else:
            self._held = before[len(certain) :]
            if not certain:
                return None
        self._is_behind_call = self._is_behind_call and not certain
        return [Text(certain)] if certain else []

    def _read_inside(self) -> list[Piece] | None:
        """Return the call, or the text that looked like one; a tag in one of its strings does not end it."""
        while (end := self._held.find(_CLOSE, self._num_passed)) >= 0:
            # The text passed so far ended within a string: one more quote ends it.
            if has_odd_quotes(self._held[self._num_passed : end]) == (self._num_passed > 0):
                is_call = not self._num_passed or read_calls(self._held[:end], self._names, self._new_id) is not None
                return self._end_call(end if is_call else self._held.index(_CLOSE))
            self._num_passed = end + len(_CLOSE)
        return None

    def _end_call(self, end: int) -> list[Piece]:
        """Return the text before the closing tag at `end` as a call, or as text if it is not a call."""
        written, self._held = self._held[:end], self._held[end + len(_CLOSE) :]
        calls = read_calls(written, self._names, self._new_id)
        self._is_inside, self._is_behind_call, self._num_passed = False, calls is not None, 0
        return [*calls] if calls is not None else [Text(self._gap + _OPEN + written + _CLOSE)]


class BareCalls:
    """Parses answers that are calls from their first character on, or else text (llama, gemma, json)."""

    markers = _OPENERS

    def __init__(self, names: Collection[str], new_id: NewId = new_call_id) -> None:
        self._names = names
        self._new_id = new_id
        self._prefix: str = ""
        """The text before JSON that was not passed on."""
        self._json: list[str] = []
        self._scanner: JsonScanner | None = None
        self._is_text = False
        self._is_behind_call = False

    def push(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        if not text:
            return []
        if self._is_text:
            return [Text(text)]
        if self._scanner is not None:
            return self._scan(self._scanner, text)
        self._prefix += text
        return self._look()

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """See `OutputParser`."""
        if is_cut and not self._is_text and self._is_begun_call():
            return []
        held = self._prefix + "".join(self._json)
        self._prefix, self._json = "", []
        if self._is_behind_call and self._scanner is None:
            held = held.strip(_SEPARATORS + "`")
        return [Text(held)] if held else []

    def _is_begun_call(self) -> bool:
        if self._prefix.lstrip(_SEPARATORS).startswith(_CALL_OPENERS):
            return True
        return self._scanner is not None and is_begun_call("".join(self._json), self._names)

    def _look(self) -> list[Piece]:
        """Look for the beginning of JSON; an answer that begins otherwise is text."""
        start = self._prefix.lstrip(_SEPARATORS if self._is_behind_call else None)
        if any(opener.startswith(start) for opener in _OPENERS):
            return []  # empty, or the beginning of an opener
        opener = next((opener for opener in _OPENERS if start.startswith(opener)), "")
        rest = start.removeprefix(opener).lstrip()
        if not rest:
            return []
        if rest[0] in "{[":
            self._prefix = self._prefix[: len(self._prefix) - len(rest)]
            self._scanner = JsonScanner()
            return self._scan(self._scanner, rest)
        text = rest if self._is_behind_call else self._prefix
        self._prefix, self._is_text = "", True
        return [Text(text)]

    def _scan(self, scanner: JsonScanner, text: str) -> list[Piece]:
        end = scanner.scan(text)
        self._json.append(text[:end])
        if end is None:
            return []
        written, rest = "".join(self._json), text[end:]
        calls = read_calls(written, self._names, self._new_id)
        prefix, self._prefix, self._json, self._scanner = self._prefix, "", [], None
        if calls is None:
            self._is_text = True
            return [Text((prefix.lstrip(_SEPARATORS) if self._is_behind_call else prefix) + written + rest)]
        self._is_behind_call = True
        return [*calls, *self.push(rest)]


class FirstCall:
    """Passes on one call and nothing after it, for a request with `parallel_tool_calls` false."""

    def __init__(self, inner: OutputParser) -> None:
        self.markers = inner.markers
        self._inner = inner
        self._is_over = False

    def push(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        return self._take(self._inner.push(text))

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """See `OutputParser`."""
        return self._take(self._inner.flush(is_cut=is_cut))

    def _take(self, pieces: list[Piece]) -> list[Piece]:
        taken: list[Piece] = []
        for piece in pieces:
            if not self._is_over:
                taken.append(piece)
            self._is_over = self._is_over or isinstance(piece, ToolCall)
        return taken
