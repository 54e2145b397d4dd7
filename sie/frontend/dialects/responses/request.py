"""Decodes the bodies of `POST /v1/responses` to a typed call.

`sie.frontend.dialects.responses.reply` encodes the replies. Source: generation API reference, section 5.1, and the
types of the openai client 3.52. A field of the wrong type is 422, a wrong value 400; unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai.agent_fields import SEARCH_TOOLS, drop_agent_fields, read_agent_task, read_skills
from sie.frontend.dialects.openai.chat import ANY_OBJECT, ResponseFormat, read_effort, read_format
from sie.frontend.dialects.openai.chat_messages import name_results
from sie.frontend.dialects.openai.chat_tools import ToolField, read_tool_choice, read_tools
from sie.frontend.dialects.openai.search_fields import SearchFilters, WebSearchField, read_search
from sie.frontend.dialects.openai.text_fields import TextFields, decode_body, read_text_fields
from sie.frontend.dialects.responses.items import (
    Input,
    Item,
    full_name,
    listed_items,
    put_referred,
    read_items,
    referred_ids,
)
from sie.frontend.generation.sampling_fields import Count, Number, wrong
from sie.values.agent import SearchRule
from sie.values.generate import ChatMessage, GenerateRequest, Grammar, ToolChoice

_MAX_LIST: Final = 65_536
_MAX_PAIRS: Final = 16
_SERVER_TOOLS: Final = SEARCH_TOOLS | {"code_interpreter", "shell"}
_PREVIEW: Final = "web_search_preview"
_NOT_OF_PREVIEW: Final = ("filters", "return_token_budget")
_OUTPUTS: Final = "code_interpreter_call.outputs"
_LOGPROBS: Final = "message.output_text.logprobs"
_UNSERVED: Final = {
    "max_tool_calls": "is not served; use 'max_tool_rounds'",
    "conversation": "is not served; use 'previous_response_id'",
    "prompt": "is not served: the server keeps no prompts",
}
_to_json: Final = msgspec.json.Encoder().encode


class NamespaceTool(ToolField, kw_only=True):
    """A function, or a namespace of several functions, which the model knows as `name.function`."""

    tools: Annotated[list[ToolField], Meta(max_length=_MAX_LIST)] | None = None
    filters: SearchFilters | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: dict[str, Any] | None = None
    return_token_budget: Literal["default", "unlimited"] | None = None
    search_content_types: Annotated[list[str], Meta(max_length=16)] | None = None
    external_web_access: bool | None = None


class ReasoningField(msgspec.Struct):
    """How much the model reasons."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(TextFields, kw_only=True):
    """The body of a request."""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    max_output_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    top_logprobs: Number | None = None
    logprobs: bool | None = None
    tools: Annotated[list[NamespaceTool], Meta(max_length=_MAX_LIST)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Any = None
    reasoning: ReasoningField | None = None
    text: TextConfig | None = None
    response_format: ResponseFormat | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    prompt: Any = None
    user: str | None = None


class ResponsesCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request, with the fields that this API adds to text generation.

    The request holds only this call's input until `begin` adds the conversation before it.
    """

    request: GenerateRequest
    instructions: str | None
    previous_id: str | None
    items: list[Item]
    """The input, in the form to store and list."""
    echoed: dict[str, Any]
    """The fields of the request that the answer repeats."""
    namespaces: dict[str, tuple[str, str]]
    """Namespace and name of each function in a namespace, by its full name."""
    stores: bool
    is_background: bool
    shows_pictures: bool
    """Whether its items have the pictures that code made."""

    def resolve(self, found: Mapping[str, Item]) -> None:
        """Put stored items in the place of those that only refer to them. Raises BadRequest for one that was not found."""
        self.request.messages = put_referred(self.items, found, files := [])
        self.request.files = files

    def begin(self, before: Sequence[ChatMessage]) -> None:
        """Put the instructions and the conversation so far before the input. Raises BadRequest for a result without call."""
        said = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        self.request.messages = name_results([*said, *before, *(self.request.messages or ())], "input")


_DECODER: Final = msgspec.json.Decoder(ResponsesBody)


def decode_responses(body: bytes, content_type: str | None, limits: Limits) -> ResponsesCall:
    """Return the call in a body. Raises BadRequest naming the field."""
    call = decode_body(_DECODER, body, content_type, limits)
    _refuse_unserved(call)
    request = read_text_fields(call)
    request.messages = read_items(call.input, files := [])
    request.files = files
    items = listed_items(call.input)
    if not (request.messages or call.previous_response_id is not None or referred_ids(items)):
        raise wrong("input", "must hold at least one message")
    request.max_tokens = call.max_output_tokens or call.max_completion_tokens or call.max_tokens
    request.truncate_prompt = call.truncation == "auto"
    fields, namespaces = _flat_tools(call.tools or ())
    server_tools: dict[str, str] = {}
    request.tools = read_tools(fields, _SERVER_TOOLS, server_tools, mcp := [])
    skills = [
        skill
        for number, tool in enumerate(call.tools or ())
        if tool.type == "shell"
        for skill in read_skills(tool.environment, f"tools[{number}].environment", "skill_reference")
    ]
    search = _read_search(call.tools or (), server_tools)
    request.agent = read_agent_task(call, server_tools, skills=skills, mcp=mcp, search=search)
    request.tool_choice = read_tool_choice(call.tool_choice, request.tools, request.agent)
    request.parallel_tool_calls = call.parallel_tool_calls is not False
    request.grammar = _read_grammar(call, request.grammar)
    request.logprobs = _read_logprobs(call)
    effort = call.reasoning.effort if call.reasoning is not None else None
    request.thinking, request.reasoning_effort = (
        (True, None) if effort is None else read_effort(effort, "reasoning.effort")
    )
    return ResponsesCall(
        request=request,
        instructions=call.instructions,
        previous_id=call.previous_response_id,
        items=items,
        echoed=_echo(call, request),
        namespaces=namespaces,
        stores=call.store is not False,
        is_background=bool(call.background),
        shows_pictures=_OUTPUTS in (call.include or ()),
    )


def _read_search(tools: Sequence[NamespaceTool], server_tools: dict[str, str]) -> SearchRule | None:
    """Return the search of a tool, or None without one. A tool that may not reach the web is taken out of server_tools."""
    found = [(number, tool) for number, tool in enumerate(tools) if tool.type in SEARCH_TOOLS]
    if not found:
        return None
    if len(found) > 1:
        raise wrong(f"tools[{found[1][0]}]", "is a second web search; give one")
    number, tool = found[0]
    for field in _NOT_OF_PREVIEW if tool.type == _PREVIEW else ():
        if getattr(tool, field) is not None:
            raise wrong(f"tools[{number}].{field}", f"is not served for a tool of type {_PREVIEW!r}; use 'web_search'")
    options = {name: getattr(tool, name) for name in WebSearchField.__struct_fields__}
    rule = read_search(WebSearchField(**options), f"tools[{number}]")
    if rule is None:
        del server_tools[tool.type]
    return rule


def _refuse_unserved(call: ResponsesBody) -> None:
    drop_agent_fields(call, served=("files", "max_tool_rounds"))  # source: section 5.1
    for field, reason in _UNSERVED.items():
        if getattr(call, field) is not None:
            raise wrong(field, reason)
    if (call.n or 1) > 1:
        raise wrong("n", "must be 1: a response is one answer")
    if call.background and call.store is False:
        raise wrong("background", "needs 'store', so that the client can ask for the answer later")
    if call.text is not None and call.text.verbosity not in (None, "medium"):
        raise wrong("text.verbosity", "is not served; leave it out, or give 'medium'")
    if len(call.metadata or ()) > _MAX_PAIRS:
        raise wrong("metadata", f"has more than {_MAX_PAIRS} pairs")


def _flat_tools(tools: Sequence[NamespaceTool]) -> tuple[list[ToolField], dict[str, tuple[str, str]]]:
    """Return all functions in one list, and the namespace and name of those in namespaces, by full name."""
    flat: list[ToolField] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for number, tool in enumerate(tools):
        if tool.type != "namespace":
            flat.append(tool)
            continue
        if not tool.name or not tool.tools:
            raise wrong(f"tools[{number}]", "must have a 'name' and 'tools'")
        for inner in tool.tools:
            if inner.type != "function" or not inner.name:
                raise wrong(f"tools[{number}].tools", "must be functions, each with its 'name'")
            name = full_name(tool.name, inner.name)
            namespaces[name] = (tool.name, inner.name)
            flat.append(msgspec.structs.replace(inner, name=name))
    return flat, namespaces


def _read_grammar(call: ResponsesBody, own: Grammar | None) -> Grammar | None:
    """Return the answer's grammar. The field of the chat API counts only without `text`."""
    form = call.text.format if call.text is not None else None
    chosen = call.response_format if call.text is None else None
    if own is not None and (form is not None or chosen is not None):
        raise wrong("grammar", f"and {'text.format' if form is not None else 'response_format'!r} cannot both be given")
    if form is None or form.type == "text":
        return own or read_format(chosen)
    if form.type == "json_object":
        return Grammar(kind="json_schema", value=_to_json(form.schema or ANY_OBJECT).decode(), field="text.format")
    if form.schema is None:
        raise wrong("text.format.schema", "is required")
    return Grammar(kind="json_schema", value=_to_json(form.schema).decode(), field="text.format")


def _read_logprobs(call: ResponsesBody) -> int | None:
    is_asked = call.logprobs or call.top_logprobs or _LOGPROBS in (call.include or ())
    return call.top_logprobs or 0 if is_asked else None


def _echo(call: ResponsesBody, request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of the request that its response repeats, each in one normal form.

    The openai client needs the three fields about tools.
    """
    reasoning = call.reasoning or ReasoningField()
    effort = request.reasoning_effort if request.thinking else "none"
    return {
        "instructions": call.instructions,
        "previous_response_id": call.previous_response_id,
        "background": bool(call.background),
        "store": call.store is not False,
        "metadata": call.metadata or {},
        "max_output_tokens": call.max_output_tokens or call.max_completion_tokens or call.max_tokens,
        "max_tool_calls": None,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "presence_penalty": call.presence_penalty,
        "frequency_penalty": call.frequency_penalty,
        "top_logprobs": call.top_logprobs or 0,
        "tools": [_echo_tool(tool) for tool in call.tools or ()],
        "tool_choice": _echo_choice(call.tool_choice, request.tool_choice),
        "parallel_tool_calls": call.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": reasoning.summary},
        "text": {"format": _echo_format(call)},
        "truncation": call.truncation or "disabled",
        "user": call.user,
    }


def _echo_choice(given: Any, choice: ToolChoice) -> Any:
    if not isinstance(given, dict):
        return given or "auto"
    named = [{"type": "function", "name": name} for name in choice.names]
    if cast("dict[str, Any]", given)["type"] == "function":
        return named[0]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": named}


def _echo_format(call: ResponsesBody) -> dict[str, Any]:
    """Return the answer's format. The schema of a chat format is one level deeper."""
    form: TextFormat | ResponseFormat | None = call.text.format if call.text is not None else call.response_format
    if form is None:
        return {"type": "text"}
    if form.type == "json_object" and form.schema:
        return {"type": form.type, "schema": form.schema}
    schema = form.json_schema if isinstance(form, ResponseFormat) else form
    if form.type != "json_schema" or schema is None:
        return {"type": form.type}
    facts = {"description": schema.description, "strict": schema.strict}
    given = {key: value for key, value in facts.items() if value is not None}
    return {"type": "json_schema", "name": schema.name or "", "schema": schema.schema, **given}


def _echo_tool(tool: ToolField) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool) and tool.tools is not None:
        inner = [_echo_tool(one) for one in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": inner}
    if tool.type == "mcp":
        shown = {"server_label": tool.server_label, "allowed_tools": tool.allowed_tools}
        return {
            "type": "mcp",
            "require_approval": "never",
            **{name: one for name, one in shown.items() if one is not None},
        }
    if tool.type in _SERVER_TOOLS:
        shown = {"container": tool.container, "environment": tool.environment}
        if isinstance(tool, NamespaceTool) and tool.filters is not None:
            shown["filters"] = msgspec.to_builtins(tool.filters)
        return {"type": tool.type, **{name: value for name, value in shown.items() if value is not None}}
    made = tool.function or tool
    return {
        "type": "function", "name": made.name, "description": made.description, "parameters": made.parameters,
        "strict": bool(made.strict),
    }  # fmt: skip
