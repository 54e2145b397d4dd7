"""Decodes the bodies of `/v1/chat/completions` to a typed request, and encodes replies and events.

Source: generation API reference, section 3, and the types of the openai client 3.52.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai.agent_fields import read_agent_task, take_session_id
from sie.frontend.dialects.openai.agent_reply import agent_object
from sie.frontend.dialects.openai.chat_messages import MessageField, ends_with_partial_answer, read_messages
from sie.frontend.dialects.openai.chat_tools import ToolField, read_tool_choice, read_tools
from sie.frontend.dialects.openai.sse_chunks import ChunkWriter
from sie.frontend.dialects.openai.text_fields import (
    Shown,
    TextFields,
    decode_body,
    read_text_fields,
    usage_object,
    wants_usage,
)
from sie.frontend.generation.sampling_fields import Count, Number, refuse_set, wrong
from sie.values.generate import (
    ChatMessage,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    Grammar,
    LogprobText,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)

_MAX_LIST: Final = 65_536
_NO_EFFORTS: Final = frozenset({"off", "none"})
_EFFORTS: Final = _NO_EFFORTS | {"low", "medium", "high", "xhigh"}
_THINKING_OPTIONS: Final = frozenset({"enable_thinking", "reasoning_effort"})
_MAX_OPTION: Final = 2**53
_NEAREST: Final = {"minimal": "low", "max": "xhigh"}
"""Efforts of the clients' types that templates do not know, and the nearest ones that they may know."""
_AS_TOOLS: Final = "is not served; use 'tools' and 'tool_choice'"
_UNSERVED: Final = {
    "chat_template": "is not accepted in a request: the server uses its own templates",
    "functions": _AS_TOOLS,
    "function_call": _AS_TOOLS,
    "audio": "is not served: answers are text",
}
_UNSERVED_IF_ON: Final = {
    "echo": "is not served: an answer is the next message alone",
    "documents": "is not served; put them into a message",
    "add_special_tokens": "must be false: the chat template writes all special tokens",
}
"""Fields of vLLM that may be null, false or empty."""
ANY_OBJECT: Final = {"type": "object"}
"""The schema of a `json_object` answer without its own schema."""
_to_json: Final = msgspec.json.Encoder().encode


class JsonSchema(msgspec.Struct):
    """A schema that the answer must follow."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    json_schema: JsonSchema | None = None


class ChatBody(TextFields, kw_only=True):
    """The body of a request."""

    messages: str | Annotated[list[MessageField], Meta(max_length=_MAX_LIST)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    tools: Annotated[list[ToolField], Meta(max_length=_MAX_LIST)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Annotated[list[str], Meta(max_length=16)] | None = None
    audio: Any = None
    echo: Any = None
    documents: Any = None
    verbosity: Any = None
    add_special_tokens: Any = None
    user: Any = None


_DECODER: Final = msgspec.json.Decoder(ChatBody)


def decode_chat(body: bytes, content_type: str | None, limits: Limits) -> tuple[GenerateRequest, Shown]:
    """Return the request in a body, and how to write its answer. Raises BadRequest naming the field."""
    call = decode_body(_DECODER, body, content_type, limits)
    _refuse_unserved(call)
    session_id = take_session_id(call)
    request = read_text_fields(call)
    request.session_id = session_id
    request.messages = read_messages(call.messages, request.files, continues=bool(session_id))
    request.continues = _read_continues(call, request.messages)
    if session_id and request.num_choices > 1:
        raise wrong("n", "must be 1 with 'session_id'")
    if call.max_completion_tokens is not None:
        request.max_tokens = call.max_completion_tokens
    server_tools: dict[str, str] = {}
    request.tools = read_tools(call.tools or (), {"code_interpreter"}, server_tools, mcp := [])
    request.agent = read_agent_task(call, server_tools, session_id, mcp=mcp)
    request.tool_choice = read_tool_choice(call.tool_choice, request.tools, request.agent)
    request.parallel_tool_calls = call.parallel_tool_calls is not False
    if call.response_format is not None and request.grammar is not None:
        raise wrong("grammar", "and 'response_format' cannot both be given")
    request.grammar = request.grammar or read_format(call.response_format)
    request.logprobs = _read_logprobs(call)
    thinking, request.reasoning_effort = read_thinking(call)
    request.template_options = read_template_options(call)
    request.thinking = thinking is not False  # on by default, whatever the template's own default is: section 3.1
    return request, Shown.begin(
        "chatcmpl", num_choices=request.num_choices, wants_usage=wants_usage(call), session_id=session_id
    )


def _refuse_unserved(call: ChatBody) -> None:
    for field, reason in _UNSERVED.items():
        if getattr(call, field) is not None:
            raise wrong(field, reason)
    refuse_set(call, _UNSERVED_IF_ON)
    if call.verbosity not in (None, "medium"):
        raise wrong("verbosity", "is not served; leave it out, or give 'medium'")
    if call.modalities is not None and call.modalities != ["text"]:
        raise wrong("modalities", "must be ['text']")


def _read_continues(call: ChatBody, messages: Sequence[ChatMessage]) -> bool:
    """Return whether the answer goes on with the last message. Source: vLLM's chat API."""
    if not call.continue_final_message:
        if call.add_generation_prompt is False:
            raise wrong("add_generation_prompt", "must be true, or 'continue_final_message' be true")
        return False
    if call.add_generation_prompt:
        raise wrong("add_generation_prompt", "and 'continue_final_message' cannot both be true")
    if not ends_with_partial_answer(messages):
        raise wrong("continue_final_message", "needs a text of the assistant as the last message, behind another one")
    return True


def _read_logprobs(call: ChatBody) -> int | None:
    if not call.top_logprobs:
        return 0 if call.logprobs else None
    if not call.logprobs:
        raise wrong("top_logprobs", "needs 'logprobs': true beside it")
    return call.top_logprobs


def read_format(form: ResponseFormat | None) -> Grammar | None:
    """Return the grammar of a format. Raises BadRequest if its schema is missing."""
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema if form.json_schema is not None else None
    if form.type == "json_object":
        schema = schema or form.schema or ANY_OBJECT
    if schema is None:
        raise wrong("response_format.json_schema", "must hold a 'schema'")
    return Grammar(kind="json_schema", value=_to_json(schema).decode())


class ThinkingFields(Protocol):
    """The fields that decide whether and how much the model reasons."""

    chat_template_kwargs: dict[str, Any] | None
    enable_thinking: bool | None
    reasoning_effort: str | None


def read_thinking(call: ThinkingFields) -> tuple[bool | None, str | None]:
    """Return whether the model should reason, and how much. Source: generation API reference, section 3.1."""
    fallbacks = call.chat_template_kwargs or {}
    thinking, effort = call.enable_thinking, call.reasoning_effort
    if thinking is None and isinstance(fallbacks.get("enable_thinking"), bool):
        thinking = fallbacks["enable_thinking"]
    if effort is None and isinstance(fallbacks.get("reasoning_effort"), str):
        effort = fallbacks["reasoning_effort"]
    if effort is None:
        return thinking, None
    is_on, level = read_effort(effort, "reasoning_effort")
    if thinking is not None and thinking != is_on:
        raise wrong("reasoning_effort", f"is {effort[:40]!r}, but 'enable_thinking' contradicts it")
    return is_on, level


def read_template_options(call: ThinkingFields) -> dict[str, bool | int | float]:
    """Return the other variables for the template. Raises BadRequest for one that could bring text into the prompt."""
    options: dict[str, bool | int | float] = {}
    for name, value in (call.chat_template_kwargs or {}).items():
        if name in _THINKING_OPTIONS or value is None:
            continue
        if not isinstance(value, (bool, int, float)) or abs(value) > _MAX_OPTION:
            raise wrong(f"chat_template_kwargs.{name[:80]}", "must be true, false or a number of at most 2**53")
        options[name] = value
    return options


def read_effort(effort: str, field: str) -> tuple[bool, str | None]:
    """Return whether the model should reason, and if so how much. Raises BadRequest naming the field."""
    level = effort.strip().lower()
    level = _NEAREST.get(level, level)
    if level not in _EFFORTS:
        known = "off, none, minimal, low, medium, high, xhigh, max"
        raise wrong(field, f"must be one of {known}, not {effort[:40]!r}")
    is_on = level not in _NO_EFFORTS
    return is_on, level if is_on else None


# --- writing --------------------------------------------------------------------------------------------------------


def encode_chat(reply: GenerateReply, shown: Shown) -> bytes:
    """Return the body of a whole answer."""
    choices: list[dict[str, Any]] = []
    for index, choice in enumerate(reply.choices):
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text if choice.text or not choice.calls else None,
            "refusal": None,
            "tool_calls": [_call(number, call) for number, call in enumerate(choice.calls)] or None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        choices.append(
            {
                "index": index,
                "message": message,
                "finish_reason": choice.reason,
                "logprobs": _logprobs(choice.logprobs),
            }
        )
    head = shown.head("chat.completion", reply.model)
    session = {"session_id": shown.session_id} if shown.session_id else {}
    return _to_json(
        {**head, "choices": choices, "usage": usage_object(reply.usage), **session, **agent_object(reply.agent)}
    )


class _Likely(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class _Chosen(_Likely, frozen=True, gc=False):
    top_logprobs: list[_Likely]


_numbers: Final = functools.lru_cache(maxsize=65536)(tuple[int, ...])
"""Returns a token's bytes as numbers, from a cache, because tokens repeat."""


def logprob_json(one: LogprobText) -> msgspec.Raw:
    """Return a token with its logprob as JSON. Bytes of an incomplete character appear only in `bytes`.

    Each token is encoded separately, so that other threads run between two tokens of a long answer.
    """
    top = [_Likely(other.text, other.logprob, _numbers(other.raw)) for other in one.top]
    return msgspec.Raw(_to_json(_Chosen(one.text, one.logprob, _numbers(one.raw), top)))


def _call(number: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": number, "id": call.id, "type": "function", "function": function}


class ChatWriter(ChunkWriter):
    """Writes a stream: a first chunk with the role for every choice, then deltas and finishing chunks."""

    def __init__(self, shown: Shown, model: str) -> None:
        super().__init__(shown, "chat.completion.chunk", model)

    def _chunks(self, event: GenerateEvent) -> list[list[dict[str, Any]]]:
        match event:
            case Started():
                role = {"role": "assistant", "content": ""}
                return [[_choice(index, role) for index in range(self._shown.num_choices)]]
            case TextDelta(choice, text, logprobs):
                return [[_choice(choice, {"content": text}, logprobs=logprobs)]]
            case ReasoningDelta(choice, text, logprobs):
                return [[_choice(choice, {"reasoning_content": text}, logprobs=logprobs)]]
            case ToolCallDelta(choice, number, call):
                return [[_choice(choice, {"tool_calls": [_call(number, call)]})]]
            case Finished(choice, reason):
                return [[_choice(choice, {}, reason)]]
            case _:
                return []


def _choice(
    index: int, delta: dict[str, Any], reason: FinishReason | None = None, logprobs: Sequence[LogprobText] = ()
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": _logprobs(logprobs)}


def _logprobs(logprobs: Sequence[LogprobText]) -> dict[str, Any] | None:
    return {"content": [logprob_json(one) for one in logprobs], "refusal": None} if logprobs else None
