"""Decides what a request's agent may do, from the request and the settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from sie.agents import tools
from sie.agents.tools import ServerTool
from sie.config.agent_settings import Agents
from sie.values.agent import AgentTask, McpChoice, McpServerTools, stricter
from sie.values.errors import BadRequest, Unavailable
from sie.values.generate import GenerateRequest

_FOR_CODE: Final = "--enable-code-execution, or --agent for all"
_FOR_SHELL: Final = "--enable-shell, or --agent for all"
_FOR_MCP: Final = "--mcp-config"
_FOR_SEARCH: Final = "--search-url and --enable-search"


class AgentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one request's agent: its task under the settings, and the bounds of its rounds."""

    request: GenerateRequest
    """The request, with the server's tools besides the client's functions."""
    task: AgentTask
    max_rounds: int
    timeout_s: float
    max_tokens: int
    dispatches: bool
    """Whether a client's functions are called at the operator's address instead of being returned."""
    mcp: tuple[ServerTool, ...] = ()
    """The tools of the MCP servers that the request picked."""

    def runs(self, name: str) -> bool:
        """Return whether the server runs calls of this function."""
        if any(tool.name == name for tool in self.mcp):
            return True
        return self.dispatches if name not in tools.NAMES else name in {tool.name for tool in tools.tools_of(self.task)}

    def find_tool(self, name: str) -> ServerTool:
        """Return the tool that a call names."""
        return next((tool for tool in self.mcp if tool.name == name), None) or tools.find_tool(name)


def plan_agent(request: GenerateRequest, settings: Agents, servers: Sequence[McpServerTools] = ()) -> AgentPlan | None:
    """Return the plan of a request, or None for one that only generates. servers are the MCP servers of the operator.

    Raises BadRequest naming the field, and the switch of a tool that is off; Unavailable for an MCP server that is gone.
    """
    dispatches = bool(settings.tool_dispatch_url) and bool(request.tools)
    task = request.agent or (AgentTask() if dispatches else None)
    if task is None or request.messages is None:
        return None
    check_switches(task, settings)
    permission = stricter(task.permission, settings.agent_permission)
    if permission == "ask" and not request.stream:
        raise _wrong("agent_permission", "is 'ask', which needs 'stream': true: an approval is asked for in the stream")
    if request.num_choices > 1:
        raise _wrong("n", "must be 1 where the server runs tools")
    picked = tuple(tool for choice in task.mcp for tool in _pick(choice, servers))
    taken = tools.NAMES | {tool.name for tool in picked}
    if len(taken) < len(tools.NAMES) + len(picked):
        raise _wrong(task.mcp[-1].field, "picks tools with one name: a server twice, or servers whose names collide")
    for tool in request.tools:
        if tool.name in taken:
            raise _wrong("tools", f"has a function with the name of a tool of the server, {tool.name!r}")
    wanted = task.max_rounds if task.max_rounds is not None else settings.max_tool_rounds
    task = msgspec.structs.replace(task, permission=permission)
    every = (*request.tools, *(tools.as_function(tool) for tool in (*tools.tools_of(task), *picked)))
    return AgentPlan(
        request=msgspec.structs.replace(request, tools=every), task=task, max_rounds=min(wanted, settings.max_tool_rounds), timeout_s=settings.agent_timeout_s,
        max_tokens=settings.agent_tokens, dispatches=dispatches, mcp=picked,
    )  # fmt: skip


def check_switches(task: AgentTask, settings: Agents) -> None:
    """Raise BadRequest for a task with a tool that is off, naming the switch."""
    for field, is_on, switch in (
        (task.code_field, settings.has_code, _FOR_CODE),
        (task.shell_field, settings.has_shell, _FOR_SHELL),
        (task.search_field, settings.has_search, _FOR_SEARCH),
        (task.mcp[0].field if task.mcp else "", settings.has_mcp, _FOR_MCP),
    ):
        if field and not is_on:
            raise _wrong(field, f"asks for a tool that is off on this server; start it with {switch}")
    if not settings.is_on:
        raise _wrong(task.field, "asks the server to act as an agent, which is off; start it with --agent")


def _pick(choice: McpChoice, servers: Sequence[McpServerTools]) -> list[ServerTool]:
    """Return the tools that a request picks of one MCP server."""
    server = next((one for one in servers if one.label == choice.label), None)
    if server is None:
        known = ", ".join(sorted(one.label for one in servers)) or "none"
        raise _wrong(
            choice.field, f"names an MCP server that is not configured: {choice.label[:80]!r}; there are: {known}"
        )
    if not server.is_connected:
        text = f"MCP server {choice.label!r} is not connected now"
        raise Unavailable(text, code="MCP_NOT_CONNECTED", retry_after_s=1, extras={"param": choice.field})
    if missing := set(choice.tools or ()) - {tool.own_name for tool in server.tools}:
        raise _wrong(choice.field, f"allows {min(missing)[:80]!r}, which is not a tool of {choice.label!r}")
    return tools.mcp_tools(choice, server)


def _wrong(field: str, reason: str) -> BadRequest:
    return BadRequest(f"Field '{field}' {reason}", extras={"param": field})
