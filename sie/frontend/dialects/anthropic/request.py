"""Decodes the bodies of `/v1/messages` and `/v1/messages/count_tokens` to a typed request.

`sie.frontend.dialects.anthropic.reply` encodes the replies. Source: generation API reference, section 6, and the types
of the anthropic client 2.12. Every wrong request is a 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.anthropic.content import (
    InputMessage,
    TextBlock,
    join_text,
    read_conversation,
)
from sie.frontend.dialects.openai.agent_fields import read_agent_task, read_skills, take_server_tool, take_session_id
from sie.frontend.dialects.openai.chat import (
    ResponseFormat,
    read_effort,
    read_format,
    read_template_options,
    read_thinking,
)
from sie.frontend.dialects.openai.chat_messages import ends_with_partial_answer
from sie.frontend.dialects.openai.chat_tools import ToolField, read_tools
from sie.frontend.dialects.openai.mcp_tools import McpFields, read_mcp_choice
from sie.frontend.dialects.openai.search_fields import Domains, search_rule
from sie.frontend.dialects.openai.text_fields import SamplingFields, decode_body, read_grammar, read_sampling_fields
from sie.frontend.generation.sampling_fields import Number, read_stop, refuse_set, wrong
from sie.values.agent import AgentTask, McpChoice, SearchRule, SkillReference
from sie.values.errors import BadRequest
from sie.values.generate import ChatMessage, GenerateRequest, Grammar, Tool, ToolChoice

_MAX_LIST: Final = 65_536
_MODES: Final[dict[str, Literal["auto", "required", "none"]]] = {"auto": "auto", "any": "required", "none": "none"}
_CLIENT_TOOLS: Final = frozenset({None, "custom", "function"})
_SERVER_TOOLS: Final = frozenset({"code_interpreter", "web_search"})
_SEARCH: Final = "web_search_"
_UNSERVED: Final = {
    "mcp_servers": "is not served: the operator configures them; use a tool of type 'mcp_toolset'",
    "stop": "is not served here; use 'stop_sequences'",
    "stop_token_ids": "is not served here; use /v1/chat/completions",
    "logprobs": "is not served here; use /v1/chat/completions",
}
"""Fields of other routes and servers that may be null, false or empty."""
_SERVER_NAMES: Final = frozenset({"code_execution", "web_search"})
"""The names of server tools in `tool_choice`."""
NAMES: Final = {"stop": "stop_sequences"}
"""This route's names for fields in errors of the generation core."""


class InputTool(msgspec.Struct):
    """A function of the client. Tools of other types would run on the server."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    mcp_server_name: str | None = None
    allowed_domains: Domains | None = None
    blocked_domains: Domains | None = None
    max_uses: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class InputToolChoice(msgspec.Struct):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model reasons first."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Number | None = None


class OutputFormat(msgspec.Struct):
    """The schema that the answer must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The form of the answer, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesBody(SamplingFields, kw_only=True):
    """The body of a request."""

    messages: Annotated[list[InputMessage], Meta(max_length=_MAX_LIST)]
    system: str | Annotated[list[TextBlock], Meta(max_length=_MAX_LIST)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=_MAX_LIST)] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=_MAX_LIST)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    response_format: ResponseFormat | None = None
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    metadata: Any = None
    n: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    logprobs: Any = None


_DECODER: Final = msgspec.json.Decoder(MessagesBody)
_to_json: Final = msgspec.json.Encoder().encode


def decode_messages(body: bytes, content_type: str | None, limits: Limits) -> GenerateRequest:
    """Return the request in a body. Raises BadRequest naming the field."""
    call = decode_body(_DECODER, body, content_type, limits)
    skills = _read_container(call.container)
    refuse_set(call, _UNSERVED)
    if call.n not in (None, 1):
        raise wrong("n", "must be 1: an answer is one message")
    if call.thread is not None:
        raise _refused_thread()
    session_id = take_session_id(call)
    request = read_sampling_fields(call)
    request.session_id = session_id
    conversation = read_conversation(call.messages, continues=bool(session_id))
    request.messages = [*_read_system(call.system), *conversation]
    request.continues = ends_with_partial_answer(conversation)
    server_tools: dict[str, str] = {}
    request.tools = _read_tools(call.tools or (), server_tools, mcp := [])
    # `none` switches off the server's tools, too.
    is_none = call.tool_choice is not None and call.tool_choice.type == "none"
    search = _read_search(call.tools or ())
    task = read_agent_task(call, server_tools, session_id, skills, mcp=mcp, search=search)
    request.agent = None if is_none else task
    request.tool_choice = _read_choice(call.tool_choice, request.tools, request.agent)
    request.parallel_tool_calls = call.tool_choice is None or not call.tool_choice.disable_parallel_tool_use
    request.grammar = _read_grammar(call)
    request.thinking, request.reasoning_effort = _read_thinking(call)
    request.template_options = read_template_options(call)
    request.stop = read_stop(call.stop_sequences, "stop_sequences")
    return request


def _refused_thread() -> BadRequest:
    """Return the error for a conversation that the server should hold. Its details have the client send all of it.

    Source: anthropic client 2.12, lib/threads/_thread_state.py.
    """
    error = wrong("thread", "is not served: send the whole conversation, or use 'session_id'")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    error.extras = {**error.extras, "details": details}
    return error


def _read_container(container: Any) -> tuple[SkillReference, ...]:
    """Return the skills that a container names. Raises BadRequest for a container of another run."""
    if container is None:
        return ()
    if not isinstance(container, dict):
        raise wrong("container", "must be an object with 'skills': tools run in places of their own")
    if cast("dict[str, Any]", container).get("id") is not None:
        raise wrong("container.id", "names a container of another run; use 'session_id' to continue one")
    return read_skills(container, "container", "custom")


def _read_system(system: str | Sequence[TextBlock] | None) -> list[ChatMessage]:
    text = system if isinstance(system, str) else join_text(system or (), "system")
    return [ChatMessage(role="system", content=text)] if text else []


def _read_tools(tools: Sequence[InputTool], server_tools: dict[str, str], mcp: list[McpChoice]) -> tuple[Tool, ...]:
    """Return the functions of the client, and put the paths of the server's tools into server_tools, MCP servers into mcp."""
    fields: list[ToolField] = []
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if tool.type == "mcp_toolset":
            mcp.append(read_mcp_choice(McpFields(server_label=tool.mcp_server_name), path, "mcp_server_name"))
            continue
        if tool.type not in _CLIENT_TOOLS:
            for kind in _server_kinds(str(tool.type)):
                take_server_tool(kind, path, _SERVER_TOOLS, server_tools)
            continue
        if tool.input_schema is None:
            raise wrong(f"{path}.input_schema", "is required")
        fields.append(
            ToolField(
                name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
        )
    return read_tools(fields)


def _read_search(tools: Sequence[InputTool]) -> SearchRule | None:
    """Return the web search of a tool, or None without one."""
    tool = next((tool for tool in tools if str(tool.type).startswith(_SEARCH)), None)
    return None if tool is None else search_rule(tool.allowed_domains, tool.blocked_domains, tool.max_uses)


def _server_kinds(kind: str) -> tuple[str, ...]:
    """Return the tools of the server that one of Anthropic's names turns on. Its names end in a date."""
    if kind == "web_search_20260209":
        return "web_search", "code_interpreter"
    for start, name in ((_SEARCH, "web_search"), ("code_execution_", "code_interpreter")):
        if kind.startswith(start):
            return (name,)
    return (kind,)


def _read_choice(choice: InputToolChoice | None, tools: Sequence[Tool], agent: AgentTask | None) -> ToolChoice:
    if choice is None or (choice.type == "tool" and choice.name in _SERVER_NAMES):
        return ToolChoice()
    if choice.type == "tool":
        if choice.name not in {tool.name for tool in tools}:
            raise wrong("tool_choice.name", f"is {str(choice.name)[:80]!r}, which is not one of the tools")
        return ToolChoice(mode="required", names=(choice.name or "",))
    if choice.type == "any" and not tools and not (agent is not None and agent.has_tools):
        raise wrong("tool_choice", "is 'any', but there are no tools")
    return ToolChoice(mode=_MODES[choice.type])


def _read_thinking(call: MessagesBody) -> tuple[bool | None, str | None]:
    if call.thinking is not None:
        is_on = call.thinking.type != "disabled"
        if call.enable_thinking not in (None, is_on):
            raise wrong("thinking", f"is {call.thinking.type!r}, but 'enable_thinking' contradicts it")
        call.enable_thinking = is_on
    if call.output_config is not None and call.output_config.effort is not None:
        if call.reasoning_effort is not None:
            raise wrong("reasoning_effort", "and 'output_config.effort' cannot both be given")
        # The effort sets how much to reason, not whether: disabled thinking stays disabled.
        effort = call.output_config.effort
        read_effort(effort, "output_config.effort")
        call.reasoning_effort = None if call.enable_thinking is False else effort
    return read_thinking(call)


def _read_grammar(call: MessagesBody) -> Grammar | None:
    form = call.output_config.format if call.output_config is not None else None
    given = [name for name, value in (("grammar", call.grammar), ("response_format", call.response_format),
                                      ("output_config", form)) if value is not None]  # fmt: skip
    if len(given) > 1:
        raise wrong(given[0], f"and {given[1]!r} cannot both be given")
    if form is not None:
        return Grammar(kind="json_schema", value=_to_json(form.schema).decode(), field="output_config.format")
    return read_grammar(call.grammar) or read_format(call.response_format)
