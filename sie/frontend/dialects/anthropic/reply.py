"""Encodes the replies of `/v1/messages`: whole messages, streams of events, and errors.

Source: generation API reference, sections 2, 6.2 and 6.3, and the types of the anthropic client 2.12, which say that the
whole prompt is the sum of input_tokens and the tokens of the cache. So tokens of the prefix cache are not in both.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from sie.frontend.dialects.openai.agent_reply import agent_events, agent_object
from sie.frontend.dialects.openai.text_fields import named_event
from sie.values.agent import ApprovalRequired, FileProduced, ToolProgress
from sie.values.errors import SieError
from sie.values.generate import (
    ChoiceReply,
    Ended,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateReply,
    GenerateUsage,
    PromptScored,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)

_REASONS: Final[dict[FinishReason, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
_OVERLOADED: Final = 529
_OVERLOAD_CODES: Final = frozenset({"QUEUE_FULL", "RESOURCE_EXHAUSTED"})
_MISTAKES: Final = frozenset({415, 422})
"""Statuses of client errors that this API answers with 400."""
_to_json: Final = msgspec.json.Encoder().encode


def new_message_id() -> str:
    """Return the id of an answer."""
    return f"msg_{secrets.token_hex(12)}"


def encode_message(reply: GenerateReply, message_id: str, session_id: str = "") -> bytes:
    """Return the body of a whole answer. session_id is that of the request, or empty."""
    choice = reply.choices[0]
    return _to_json(
        {
            **_message(message_id, reply.model, session_id),
            "content": _content(choice),
            "stop_reason": _reason(choice.reason, choice.stop_string),
            "stop_sequence": choice.stop_string,
            "usage": _usage(reply.usage),
            **agent_object(reply.agent),
        }
    )


def encode_count(num_tokens: int) -> bytes:
    """Return the body of an answer to `count_tokens`."""
    return b'{"input_tokens":%d}' % num_tokens


def _message(message_id: str, model: str, session_id: str) -> dict[str, Any]:
    session = {"session_id": session_id} if session_id else {}
    return {"id": message_id, "type": "message", "role": "assistant", "model": model, **session}


def _content(choice: ChoiceReply) -> list[dict[str, Any]]:
    """Return the blocks in the order of a stream; an answer without blocks gets one empty text block."""
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    begin = 0
    for call, place in zip(choice.calls, choice.call_places, strict=True):
        blocks += [*_text(choice.text[begin:place]), {**_tool_use(call), "input": _arguments(call)}]
        begin = place
    return [*blocks, *_text(choice.text[begin:])] or [{"type": "text", "text": ""}]


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"arguments": call.arguments}


def _reason(reason: FinishReason, stop_string: str | None) -> str:
    return "stop_sequence" if stop_string is not None else _REASONS[reason]


def _usage(usage: GenerateUsage) -> dict[str, int]:
    return _tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _tokens(prompt: int, cached: int, answered: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": answered,
    }  # fmt: skip


# --- streams --------------------------------------------------------------------------------------------------------


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, fields)


class MessageWriter:
    """Writes a stream: numbered blocks, one after the other, then the stop reason with the usage."""

    keep_alive = _event("ping")

    def __init__(self, message_id: str, model: str, session_id: str = "") -> None:
        """Take the session of the request, or an empty text."""
        self._message = _message(message_id, model, session_id)
        self._kind = ""
        """Type of the open block."""
        self._num_blocks = 0
        self._finished: Finished | None = None

    def write(self, events: Sequence[GenerateEvent]) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        return b"".join(part for event in events for part in self._write(event))

    def write_error(self, error: SieError) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        return _event("error", error=_error_object(error))

    def _write(self, event: GenerateEvent) -> list[bytes]:
        match event:
            case Started(prompt, cached):
                usage = _tokens(prompt, cached, 0)
                whole: dict[str, Any] = {
                    **self._message,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": usage,
                }
                return [_event("message_start", message=whole)]
            case PromptScored():
                return []
            case ToolProgress() | ApprovalRequired() | FileProduced():
                return [*self._close(), agent_events(event)]
            case ReasoningDelta(_, text):
                return self._delta(
                    "thinking", {"thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": text}
                )
            case TextDelta(_, text):
                return self._delta("text", {"text": ""}, {"type": "text_delta", "text": text}) if text else []
            case ToolCallDelta(_, _, call):
                opened = [*self._close(), self._open({**_tool_use(call), "input": {}})]
                self._kind = "tool_use"
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                return [*opened, self._change(delta), *self._close()]
            case Finished():
                self._finished = event
                empty = [] if self._num_blocks else [self._open({"type": "text", "text": ""})]
                self._kind = self._kind or ("text" if empty else "")
                return [*empty, *self._close()]
            case Ended(usage):
                assert self._finished is not None
                reason = _reason(self._finished.reason, self._finished.stop_string)
                delta = {"stop_reason": reason, "stop_sequence": self._finished.stop_string}
                return [_event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]

    def _delta(self, kind: str, empty: dict[str, Any], delta: dict[str, Any]) -> list[bytes]:
        opened: list[bytes] = []
        if self._kind != kind:
            opened = [*self._close(), self._open({"type": kind, **empty})]
            self._kind = kind
        return [*opened, self._change(delta)]

    def _open(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _change(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> list[bytes]:
        is_open, self._kind = bool(self._kind), ""
        return [_event("content_block_stop", index=self._num_blocks - 1)] if is_open else []


# --- errors ---------------------------------------------------------------------------------------------------------


def error_status(error: SieError) -> int:
    """Return an error's status in this API."""
    if error.code in _OVERLOAD_CODES:
        return _OVERLOADED
    return 400 if error.http_status in _MISTAKES else error.http_status


def error_body(error: SieError) -> bytes:
    """Return `{"type": "error", "error": {"type", "message"}}`, with `details` if the error has them."""
    return _to_json({"type": "error", "error": _error_object(error)})


def _error_object(error: SieError) -> dict[str, Any]:
    status = error_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": error.extras["details"]} if "details" in error.extras else {}
    return {"type": kind, "message": error.message, **details}
