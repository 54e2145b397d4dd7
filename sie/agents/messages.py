"""Defines the messages between the frontends and the agent process. `sie.agents.channel` carries them.

A frontend asks; the agent process answers each question once, in any order.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.values.agent import AgentFile, McpServerTools, MountedFile, MountedSkill, SearchRule
from sie.values.errors import WireError

_to_json: Final = msgspec.json.Encoder().encode


class RunTool(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Run one call of a tool in a session, which begins with its first call. Answered by `ToolResult`.

    run_id, round and turn name the place of the call in its request, for the files that it makes. arguments is JSON. inputs
    and skills are put into the working directory first, unless they are there. server is the label of an MCP server, or empty. search: the sites
    of a call that searches the web, or reads a page.
    """

    owner: str
    session: str
    run_id: str
    round: int
    turn: int
    name: str
    arguments: str
    server: str = ""
    search: SearchRule = SearchRule()
    inputs: tuple[MountedFile, ...] = ()
    skills: tuple[MountedSkill, ...] = ()


class ToolResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The result of a call. content is for the model, record for a client; data is the progress event's, without its type.

    problem: why the call did nothing, or empty. Such a call has no data: the event has the fields that its kind of tool has then.
    """

    content: str
    record: str
    data: dict[str, Any] = {}
    files: tuple[AgentFile, ...] = ()
    problem: str = ""
    is_denied: bool = False


def failed(problem: str, *, is_denied: bool = False) -> ToolResult:
    """Return the result of a call that did nothing."""
    told = _to_json({"status": "denied" if is_denied else "error", "exception": problem}).decode()
    return ToolResult(content=told, record=told, problem=problem, is_denied=is_denied)


class FindFiles(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Find the files of a session that a request asked for by name. Answered by `FoundFiles`, in the same order."""

    owner: str
    session: str
    run_id: str
    round: int
    turn: int
    names: tuple[str, ...]


class FoundFiles(msgspec.Struct, tag=True, frozen=True):
    """Files, with a placeholder for each that does not exist."""

    files: tuple[AgentFile, ...]


class ListMcp(msgspec.Struct, tag=True, frozen=True):
    """List the MCP servers. Answered by `McpTools`."""


class McpTools(msgspec.Struct, tag=True, frozen=True):
    """The MCP servers that the operator configured."""

    servers: tuple[McpServerTools, ...]


class OpenApproval(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Make an approval for a call of a tool. kind: what it may be remembered for. Answered by `Approval`."""

    owner: str
    session: str
    kind: str


class Approval(msgspec.Struct, tag=True, frozen=True):
    """An open approval; id is empty if the client approved this kind for the whole session before."""

    id: str


class AwaitApproval(msgspec.Struct, tag=True, frozen=True):
    """Wait for the decision on an approval, or for its time to end. Answered by `Decision`."""

    id: str


class Decision(msgspec.Struct, tag=True, frozen=True):
    """Whether a call may run; message is the client's reason, or why nobody decided."""

    is_approved: bool
    message: str = ""


class Decide(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Decide on an approval, from any frontend. Answered by `Decided`."""

    owner: str
    id: str
    is_approved: bool
    remembers: bool = False
    message: str = ""


class Decided(msgspec.Struct, tag=True, frozen=True):
    """The outcome of a decision: `resolved`, `queued` or `not_found`."""

    status: str


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Stop the work on the question with this number. It is not answered any more."""

    number: int


Question = RunTool | FindFiles | ListMcp | OpenApproval | AwaitApproval | Decide | Cancel
Answer = ToolResult | FoundFiles | McpTools | Approval | Decision | Decided


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """A question with its number, which counts up on each connection."""

    number: int
    question: Question


class Answered(msgspec.Struct, array_like=True, frozen=True):
    """The answer to the question with this number, or the error that it met."""

    number: int
    answer: Answer | None = None
    error: WireError | None = None
