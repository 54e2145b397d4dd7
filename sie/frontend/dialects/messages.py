"""Owns the wire of `/v1/messages` and `/v1/messages/count_tokens`: bodies to a typed request.

What is written back is in `sie.frontend.dialects.messages_reply`. Source: generation API reference, section 6, and the types
of the anthropic client 2.12. Every mistake is a 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from sie.frontend.dialects.agent_fields import AgentFields, refuse_agent_fields, refuse_agent_tool
from sie.frontend.dialects.chat import ResponseFormat, read_format, read_thinking
from sie.frontend.dialects.chat_tools import ToolField, read_tools
from sie.frontend.dialects.messages_content import InputMessage, TextBlock, join_text, read_conversation
from sie.frontend.dialects.openai import DEFAULT_MODEL
from sie.frontend.dialects.text_fields import GrammarField, decode_body, read_bias, read_grammar, read_stop, wrong
from sie.generation import ChatMessage, GenerateRequest, Grammar, Tool, ToolChoice
from sie.limits import Limits

_MAX_LIST: Final = 65_536
_MODES: Final[dict[str, Literal["auto", "required", "none"]]] = {"auto": "auto", "any": "required", "none": "none"}
_CLIENT_TOOLS: Final = frozenset({None, "custom", "function"})


class InputTool(msgspec.Struct):
    """A function of the client's; any other type of tool would run on the server."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class InputToolChoice(msgspec.Struct):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model reasons first."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """The schema that the answer must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """What form the answer has, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesBody(AgentFields, kw_only=True):
    """The body of a request."""

    messages: Annotated[list[InputMessage], Meta(max_length=_MAX_LIST)]
    model: str | None = None
    max_tokens: int | None = None
    system: str | Annotated[list[TextBlock], Meta(max_length=_MAX_LIST)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=_MAX_LIST)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stream: bool | None = None
    tools: Annotated[list[InputTool], Meta(max_length=_MAX_LIST)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    response_format: ResponseFormat | None = None
    grammar: GrammarField | None = None
    truncate_sequence: bool | None = None
    ignore_eos: bool | None = None
    container: Any = None
    metadata: Any = None


_DECODER: Final = msgspec.json.Decoder(MessagesBody)
_to_json: Final = msgspec.json.Encoder().encode


def decode_messages(body: bytes, content_type: str | None, limits: Limits) -> GenerateRequest:
    """Return the request in a body. Raises BadRequest naming the field."""
    call = decode_body(_DECODER, body, content_type, limits)
    refuse_agent_fields(call)
    _refuse_unserved(call)
    tools = _read_tools(call.tools or ())
    choice = call.tool_choice
    thinking, effort = _read_thinking(call)
    return GenerateRequest(
        model=call.model or DEFAULT_MODEL,
        messages=[*_read_system(call.system), *read_conversation(call.messages)],
        tools=tools,
        tool_choice=_read_choice(choice, tools),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        grammar=_read_grammar(call),
        thinking=thinking,
        reasoning_effort=effort,
        max_tokens=call.max_tokens,
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=call.top_k,
        min_p=call.min_p,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        repetition_penalty=call.repetition_penalty,
        logit_bias=read_bias(call.logit_bias or {}),
        seed=call.seed,
        stop=read_stop(call.stop_sequences, "stop_sequences"),
        ignore_eos=bool(call.ignore_eos),
        truncate_prompt=bool(call.truncate_sequence),
        stream=bool(call.stream),
    )


def _refuse_unserved(call: MessagesBody) -> None:
    if call.container is not None and call.container != {}:
        raise wrong("container", "asks for skills or a container, and the server has none")
    if call.dry_multiplier:
        raise wrong("dry_multiplier", "is not served; leave it out, or give 0")


def _read_system(system: str | Sequence[TextBlock] | None) -> list[ChatMessage]:
    if system is None:
        return []
    text = system if isinstance(system, str) else join_text(system, "system")
    return [ChatMessage(role="system", content=text)]


def _read_tools(tools: Sequence[InputTool]) -> tuple[Tool, ...]:
    fields: list[ToolField] = []
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if tool.type not in _CLIENT_TOOLS:
            refuse_agent_tool(str(tool.type), path)
        if tool.input_schema is None:
            raise wrong(f"{path}.input_schema", "is required")
        fields.append(
            ToolField(
                name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
        )
    return read_tools(fields)


def _read_choice(choice: InputToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type == "tool":
        if choice.name not in {tool.name for tool in tools}:
            raise wrong("tool_choice.name", f"is {str(choice.name)[:80]!r}, which is none of the tools")
        return ToolChoice(mode="required", names=(choice.name or "",))
    if choice.type == "any" and not tools:
        raise wrong("tool_choice", "is 'any', and there are no tools")
    return ToolChoice(mode=_MODES[choice.type])


def _read_thinking(call: MessagesBody) -> tuple[bool | None, str | None]:
    if call.thinking is not None and call.thinking.type != "adaptive":
        is_on = call.thinking.type == "enabled"
        if call.enable_thinking not in (None, is_on):
            raise wrong("thinking", f"is {call.thinking.type!r}, and 'enable_thinking' says otherwise")
        call.enable_thinking = is_on
    if call.output_config is not None and call.output_config.effort is not None:
        if call.reasoning_effort is not None:
            raise wrong("reasoning_effort", "and 'output_config.effort' cannot both be given")
        # How much to reason, not whether: a model that was told not to stays silent.
        effort = call.output_config.effort.strip().lower()
        call.reasoning_effort = None if call.enable_thinking is False else "xhigh" if effort == "max" else effort
    return read_thinking(call)


def _read_grammar(call: MessagesBody) -> Grammar | None:
    form = call.output_config.format if call.output_config is not None else None
    given = [name for name, value in (("grammar", call.grammar), ("response_format", call.response_format),
                                      ("output_config", form)) if value is not None]  # fmt: skip
    if len(given) > 1:
        raise wrong(given[0], f"and {given[1]!r} cannot both be given")
    if form is not None:
        return Grammar(kind="json_schema", value=_to_json(form.schema).decode())
    return read_grammar(call.grammar) or read_format(call.response_format)
