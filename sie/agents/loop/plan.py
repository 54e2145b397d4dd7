"""Decides what a request's agent may do, from the request and the settings. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.agents import tools
from sie.config.agent_settings import Agents
from sie.values.agent import AgentTask, stricter
from sie.values.errors import BadRequest
from sie.values.generate import GenerateRequest

_FOR_CODE: Final = "--enable-code-execution"
_FOR_SHELL: Final = "--enable-shell"
_FOR_SEARCH: Final = "--enable-search and --search-url"


class AgentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of one request may do: its task under the settings, and the limits of its rounds."""

    request: GenerateRequest
    """The request, with the server's tools besides the client's functions."""
    task: AgentTask
    max_rounds: int
    timeout_s: float
    max_tokens: int
    dispatches: bool
    """Whether a client's functions are called at the operator's address instead of being returned."""

    def runs(self, name: str) -> bool:
        """Return whether the server runs calls of this function."""
        return self.dispatches if name not in tools.NAMES else name in {tool.name for tool in tools.tools_of(self.task)}


def plan_agent(request: GenerateRequest, settings: Agents) -> AgentPlan | None:
    """Return the plan of a request, or None for one that only generates.

    Raises BadRequest naming the field, and the switch of a tool that is off.
    """
    dispatches = bool(settings.tool_dispatch_url) and bool(request.tools)
    task = request.agent or (AgentTask() if dispatches else None)
    if task is None or request.messages is None:
        return None
    _check_switches(task, settings)
    permission = stricter(task.permission, settings.agent_permission)
    if permission == "ask" and not request.stream:
        raise _wrong("agent_permission", "is 'ask', which needs 'stream': true: an approval is asked for in the stream")
    if request.num_choices > 1:
        raise _wrong("n", "must be 1 where the server runs tools")
    for tool in request.tools:
        if tool.name in tools.NAMES:
            raise _wrong("tools", f"has a function with the name of a tool of the server, {tool.name!r}")
    wanted = task.max_rounds if task.max_rounds is not None else settings.max_tool_rounds
    task = msgspec.structs.replace(task, permission=permission)
    every = (*request.tools, *(tools.as_function(tool) for tool in tools.tools_of(task)))
    return AgentPlan(
        request=msgspec.structs.replace(request, tools=every), task=task, max_rounds=min(wanted, settings.max_tool_rounds), timeout_s=settings.agent_timeout_s,
        max_tokens=settings.agent_tokens, dispatches=dispatches,
    )  # fmt: skip


def _check_switches(task: AgentTask, settings: Agents) -> None:
    for field, is_on, switch in (
        (task.code_field, settings.has_code, _FOR_CODE),
        (task.shell_field, settings.has_shell, _FOR_SHELL),
        (task.search_field, settings.has_search, _FOR_SEARCH),
    ):
        if field and not is_on:
            raise _wrong(
                field, f"asks for a tool that is off on this server; start it with {switch}, or --agent for all"
            )
    if not settings.is_on:
        raise _wrong(task.field, "asks the server to act as an agent, which is off; start it with --agent")


def _wrong(field: str, reason: str) -> BadRequest:
    return BadRequest(f"Field '{field}' {reason}", extras={"param": field})
