"""The typed values of agents: what a request asks the server to do, and the events of doing it. Imports no other folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

Permission = Literal["auto", "ask", "deny"]
PERMISSIONS: tuple[Permission, ...] = ("auto", "ask", "deny")
"""From the loosest to the strictest."""


def stricter(one: Permission, other: Permission) -> Permission:
    """Return the stricter of two permissions."""
    return one if PERMISSIONS.index(one) >= PERMISSIONS.index(other) else other


class ExpectedFile(msgspec.Struct, frozen=True):
    """A file that a request expects the tools to make; its name is a path in the working directory."""

    name: str
    format: str | None = None
    description: str | None = None


class SkillReference(msgspec.Struct, frozen=True, kw_only=True):
    """A skill that a request names. field is its place in the request; version is a number, `latest`, or empty."""

    field: str
    skill_id: str
    version: str = ""


class McpChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An MCP server that a request picks by its label. tools are those that the model may call; None means all of them."""

    field: str
    label: str
    tools: tuple[str, ...] | None = None


class McpTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of an MCP server. name is what models know; own_name is the server's."""

    name: str
    own_name: str
    description: str
    parameters: dict[str, Any]


class McpServerTools(msgspec.Struct, frozen=True, kw_only=True):
    """One MCP server of the operator's, and its tools, if it is connected."""

    label: str
    is_connected: bool
    tools: tuple[McpTool, ...] = ()


class SearchRule(msgspec.Struct, frozen=True, kw_only=True):
    """The web search that a request allows: only the allowed sites (empty: all), without the blocked ones, max_uses calls.

    A site is a domain, in any case and in any letters, and has its subdomains.
    """

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    max_uses: int | None = None

    def allows(self, host: str) -> bool:
        """Return whether pages of a host may be found and read."""
        return (not self.allowed or _is_in(host, self.allowed)) and not _is_in(host, self.blocked)


def _is_in(host: str, domains: Iterable[str]) -> bool:
    dotted = f".{_domain(host)}"
    return any(dotted.endswith(f".{_domain(domain)}") for domain in domains)


def _domain(name: str) -> str:
    """Return a name as hosts are looked up, or as it is if it can be none."""
    plain = name.lower().rstrip(".")
    try:
        return plain if plain.isascii() else plain.encode("idna").decode()
    except UnicodeError:
        return plain


class MountedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A client's file for the working directory. path is its name there; blob names its bytes in the store."""

    id: str
    path: str
    blob: str
    num_bytes: int


class MountedSkill(msgspec.Struct, frozen=True, kw_only=True):
    """A skill for the working directory. folder is its name below `skills`; blob names its archive in the store."""

    folder: str
    blob: str
    num_bytes: int


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """The acts besides generating that a request asks of the server.

    code_field, shell_field and search_field are the names of the fields that ask for Python, commands and web search, or
    empty; field is the first field of all that asks for an agent. session is the client's name for its session, or empty. max_rounds
    None means the server's setting. skills are those that the request names; inputs and mounted are what the store has of
    its files and skills.
    """

    field: str = "tools"
    code_field: str = ""
    shell_field: str = ""
    search_field: str = ""
    session: str = ""
    permission: Permission = "auto"
    max_rounds: int | None = None
    search: SearchRule = SearchRule()
    files: tuple[ExpectedFile, ...] = ()
    skills: tuple[SkillReference, ...] = ()
    mcp: tuple[McpChoice, ...] = ()
    inputs: tuple[MountedFile, ...] = ()
    mounted: tuple[MountedSkill, ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether it asks for a tool."""
        return bool(self.code_field or self.shell_field or self.search_field or self.mcp)

    @property
    def has_directory(self) -> bool:
        """Whether its tools work in a directory."""
        return bool(self.code_field or self.shell_field)


class AgentFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that a tool made, as the wire shows it. A placeholder has code and message, and no content.

    Small content is in text (with its first characters in preview) or data_base64. Source: generation API reference,
    section 7.
    """

    id: str
    name: str
    created_at: int
    source: dict[str, Any]
    purpose: str = "agent_output"
    format: str = ""
    mime_type: str = "application/octet-stream"
    bytes: int = 0
    text: str | None = None
    preview: str | None = None
    data_base64: str | None = None
    code: str | None = None
    message: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the File object of the API."""
        made = msgspec.to_builtins(self)
        shown = {"purpose": self.purpose, "format": self.format, "mime_type": self.mime_type, "bytes": self.bytes}
        return {**shown, **made} if self.code is None else made


class ToolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the server ran, for an answer that is not a stream."""

    round: int
    name: str
    arguments: str
    result: str
    images: tuple[str, ...] = ()
    file_ids: tuple[str, ...] = ()


class ToolProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A call begins or is complete. data has its `tool_type` and the fields of that type."""

    round: int
    name: str
    phase: Literal["calling", "complete"]
    data: dict[str, Any]
    call_id: str
    arguments: str
    server: str = ""
    """The label of the MCP server whose tool this is."""
    is_error: bool = False


class ApprovalRequired(msgspec.Struct, frozen=True, kw_only=True):
    """A call waits for a client's approval."""

    approval_id: str
    session: str
    round: int
    tool: dict[str, str]
    arguments: dict[str, Any]


class FileProduced(msgspec.Struct, frozen=True):
    """A tool made a file."""

    file: AgentFile


class AgentOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer about the server's acts."""

    session: str
    records: tuple[ToolRecord, ...] = ()
    files: tuple[AgentFile, ...] = ()


AgentEvent = ToolProgress | ApprovalRequired | FileProduced
