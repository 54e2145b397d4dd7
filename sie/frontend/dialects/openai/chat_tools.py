"""Decodes the tools of a chat and `tool_choice`. Source: generation API reference, section 3.4."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, cast

import msgspec

from sie.frontend.dialects.openai.agent_fields import take_server_tool
from sie.frontend.dialects.openai.chat_messages import NAME
from sie.frontend.dialects.openai.mcp_tools import McpFields, read_mcp_choice
from sie.frontend.generation.sampling_fields import wrong
from sie.values.agent import AgentTask, McpChoice
from sie.values.generate import Tool, ToolChoice

_MODES: Final = ("auto", "required")
_WITH_SKILLS: Final = "container_auto"
"""The type of a place that may have skills; the routes that serve them read them."""


class FunctionField(msgspec.Struct):
    """A function of the client."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(McpFields):
    """A tool, with its function nested or flat."""

    type: str = "function"
    function: FunctionField | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    container: Any = None
    environment: Any = None


def read_tools(
    tools: Sequence[ToolField],
    server: Collection[str] = (),
    found: dict[str, str] | None = None,
    mcp: list[McpChoice] | None = None,
) -> tuple[Tool, ...]:
    """Return the functions. The paths of server tools, by their types, are put into found, and MCP servers into mcp.

    server: the types of server tools that the route has. Raises BadRequest for another type, or if a function's name is
    missing or used twice.
    """
    read: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if tool.type == "mcp" and mcp is not None:
            mcp.append(read_mcp_choice(tool, path))
            continue
        if tool.type != "function":
            take_server_tool(tool.type, path, server, found if found is not None else {})
            _check_place(tool.container, f"{path}.container", "auto")
            _check_place(tool.environment, f"{path}.environment", "container_auto")
            continue
        made = tool.function or FunctionField(tool.name or "", tool.description, tool.parameters, tool.strict)
        named = f"{path}.function.name" if tool.function is not None else f"{path}.name"
        if not NAME.fullmatch(made.name):
            raise wrong(named, "must hold only letters, digits and _.:/-, at most 256")
        if made.name in read:
            raise wrong(named, f"is {made.name!r}, the name of another tool")
        read[made.name] = Tool(
            name=made.name, description=made.description, parameters=made.parameters, strict=bool(made.strict)
        )
    return tuple(read.values())


def _check_place(place: Any, path: str, kind: str) -> None:
    """Raise BadRequest for a place to run in that is not a new, empty one."""
    if place is None:
        return
    if not isinstance(place, dict) or cast("dict[str, Any]", place).get("type") != kind:
        raise wrong(path, f"must have the type {kind!r}: the server runs tools in places of its own")
    own = () if kind == _WITH_SKILLS else ("skills",)
    for field in ("file_ids", "memory_limit", "network_policy", *own):
        if cast("dict[str, Any]", place).get(field):
            raise wrong(f"{path}.{field}", "is not served")


def read_tool_choice(choice: Any, tools: Sequence[Tool], agent: AgentTask | None) -> ToolChoice:
    """Return which tools may or must be called: the client's functions, and the server's tools for agent.

    Raises BadRequest for an unknown form or name.
    """
    names = frozenset(tool.name for tool in tools)
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice(mode="none")
    if choice == "required":
        if not (tools or (agent is not None and agent.has_tools)):
            raise _wrong("is 'required', but there are no tools")
        return ToolChoice(mode="required")
    if not isinstance(choice, dict):
        raise _wrong("must be 'auto', 'none', 'required' or an object")
    fields = cast("dict[str, Any]", choice)
    if fields.get("type") == "function":
        return ToolChoice(mode="required", names=(_known(_name_of(fields), names),))
    if fields.get("type") == "allowed_tools":
        return _read_allowed(fields.get("allowed_tools", fields), names)
    raise _wrong("must have the type 'function' or 'allowed_tools'")


def _read_allowed(allowed: Any, names: frozenset[str]) -> ToolChoice:
    if not isinstance(allowed, dict):
        raise _wrong("must hold 'mode' and 'tools'")
    fields = cast("dict[str, Any]", allowed)
    mode, entries = fields.get("mode", "auto"), fields.get("tools")
    if mode not in _MODES:
        raise _wrong("must have the mode 'auto' or 'required'")
    if not isinstance(entries, list) or not entries:
        raise _wrong("must allow at least one tool")
    found = [_known(_name_of(entry), names) for entry in cast("list[Any]", entries)]
    return ToolChoice(mode=mode, names=tuple(dict.fromkeys(found)))


def _name_of(entry: Any) -> Any:
    """Return the name in `{"type": "function", "function": {"name"}}`, nested or flat."""
    if not isinstance(entry, dict):
        raise _wrong("must name functions")
    fields = cast("dict[str, Any]", entry)
    if fields.get("type", "function") != "function":
        raise _wrong(f"names a tool of type {str(fields['type'])[:40]!r}; only functions can be chosen")
    nested = fields.get("function")
    return cast("dict[str, Any]", nested).get("name") if isinstance(nested, dict) else fields.get("name")


def _known(name: Any, names: frozenset[str]) -> str:
    if not isinstance(name, str) or name not in names:
        raise _wrong(f"names {str(name)[:80]!r}, which is not one of the tools")
    return name


def _wrong(reason: str) -> Exception:
    error = wrong("tool_choice", reason)
    error.code = "TOOL_CHOICE_INVALID"  # type: ignore[misc]  # an instance overrides its class's default
    return error
