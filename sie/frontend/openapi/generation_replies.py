"""Owns the types of what the routes answer that generate text, as JSON. See `sie.frontend.openapi.replies`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class _Reply(Struct, kw_only=True, forbid_unknown_fields=True):
    """No reply has a key that is not described."""


class CachedDetails(_Reply):
    cached_tokens: int


class ReasoningDetails(_Reply):
    reasoning_tokens: int


class TextUsage(_Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: ReasoningDetails
    avg_tok_per_sec: float
    avg_prompt_tok_per_sec: float
    avg_compl_tok_per_sec: float
    total_time_sec: float
    total_prompt_time_sec: float
    total_completion_time_sec: float


class LikelyToken(_Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(_Reply):
    content: list[ChosenToken]
    refusal: None


class CalledFunction(_Reply):
    name: str
    arguments: str


class CallAnswer(_Reply):
    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(_Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallAnswer] | None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(_Reply):
    index: int
    message: ChatAnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class ChatAnswer(_Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TextUsage


class CompletionLogprobs(_Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionsChoice(_Reply):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None


class CompletionsAnswer(_Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionsChoice]
    usage: TextUsage


class TextErrorObject(Struct, kw_only=True):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "permission_error", "server_error"]
    param: str | None
    code: str | None


class TextError(Struct, kw_only=True):
    error: TextErrorObject
    message: str
