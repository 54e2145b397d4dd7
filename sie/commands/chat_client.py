"""The client side of a streamed chat completion: one request, its events, and the time of its tokens.

Prints nothing. Wire facts: generation API reference, sections 2 and 3 (chat completions and their streams).
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from sie.commands.http_client import Connection, ServerError, authorization, conversing, refusal
from sie.loadgen.target import Target, TargetError

PATH: Final = "/v1/chat/completions"
_TOOL_EVENTS: Final = frozenset({"agentic_tool_call_progress", "agentic_tool_approval_required", "file_produced"})
_SILENCE_S = 300.0
"""Longest wait for a byte. A working server sends comments, by default every ten seconds."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Sequence[dict[str, Any]]


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a request. A field at its default is not sent, so that the server decides."""

    messages: Sequence[Message]
    model: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    agent: dict[str, Any] = {}
    """The fields that ask for tools of the server."""


class ToolEvent(NamedTuple):
    """An event with a name: what a tool of the server does."""

    name: str
    data: dict[str, Any]


class Piece(NamedTuple):
    """Some text of an answer, as received."""

    text: str
    is_reasoning: bool


class Answer:
    """The received part of one answer. Times are `time.monotonic` seconds, None until known."""

    def __init__(self) -> None:
        self.text = ""
        """The text without the reasoning."""
        self.model = ""
        self.finish_reason: str | None = None
        self.num_tokens: int | None = None
        """Tokens of the answer, reasoning included."""
        self.asked_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first text of its answer."""
        return None if self.asked_s is None or self.first_s is None else self.first_s - self.asked_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first one, which waits for the prompt; None without such tokens."""
        if self.num_tokens is None or self.num_tokens < 2 or self.first_s is None or self.last_s is None:
            return None
        elapsed_s = self.last_s - self.first_s
        return (self.num_tokens - 1) / elapsed_s if elapsed_s > 0 else None

    def take(self, chunk: _Chunk, now_s: float) -> list[Piece]:
        """Record the data of a chunk; return its texts."""
        self.model = chunk.model or self.model
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens
        pieces: list[Piece] = []
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.delta.reasoning_content:
                pieces.append(Piece(choice.delta.reasoning_content, is_reasoning=True))
            if choice.delta.content:
                pieces.append(Piece(choice.delta.content, is_reasoning=False))
                self.text += choice.delta.content
        if pieces:
            self.first_s, self.last_s = self.first_s or now_s, now_s
        return pieces


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Chunk(msgspec.Struct, frozen=True):
    """An event of a stream, or the body of an error."""

    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def ask(target: Target, question: Question, answer: Answer) -> Generator[Piece | ToolEvent, None, None]:
    """Send a question; yield its answer's texts as they arrive, and record them and their times in `answer`.

    Events of the server's tools are yielded between the texts.

    Closing the iterator ends the request, and with it the server's work. Raises ServerError.
    """
    fields = msgspec.to_builtins(question)
    body = fields | fields.pop("agent", {}) | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        data = msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise ServerError(f"{error.object[error.start : error.end]!r} is not UTF-8 text; nothing was sent") from error
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **authorization(target)}
    connection = Connection(target, _SILENCE_S)
    with conversing(connection, target, _SILENCE_S):
        try:
            connection.connect()
        except TargetError as error:
            raise ServerError(str(error)) from error
        answer.asked_s = time.monotonic()
        response = connection.ask("POST", target.path + PATH, data, headers)
        if response.status != 200:
            raise ServerError(refusal(PATH, response.status, response.read()))
        for event in _events(response):
            if isinstance(event, ToolEvent):
                yield event
            else:
                yield from answer.take(event, time.monotonic())


def _events(response: http.client.HTTPResponse) -> Iterator[_Chunk | ToolEvent]:
    """Yield the events of a stream up to `[DONE]`. Raises ServerError for an error in it, or if it ends before."""
    name = ""
    while line := response.readline():
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").strip().decode("ascii", "replace")
            continue
        if not line.startswith(b"data: "):  # comments, and the empty lines between events
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = _read(data, name)
        name = ""
        if event is None:
            raise ServerError("the server's stream is not one of chat completions")
        if isinstance(event, _Chunk) and event.error is not None:
            raise ServerError(event.error.message)
        yield event
    raise ServerError("the server ended the answer early")


def _read(data: bytes, name: str) -> _Chunk | ToolEvent | None:
    try:
        if name in _TOOL_EVENTS:
            return ToolEvent(name, msgspec.json.decode(data, type=dict[str, Any]))
        return _decode(data)
    except msgspec.DecodeError:
        return None
