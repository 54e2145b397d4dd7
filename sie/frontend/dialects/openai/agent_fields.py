"""Reads the fields and tools by which a client asks the server to act: run code and commands, search, keep a session.

`sie.agents.loop.plan` decides whether the server acts; a session is kept without that, too.
Source: generation API reference, sections 3.1, 6.1 and 8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from sie.frontend.dialects.openai.search_fields import WebSearchField, read_search
from sie.frontend.generation.sampling_fields import SamplingNumbers
from sie.values.agent import AgentTask, ExpectedFile, McpChoice, SearchRule, SkillReference, stricter
from sie.values.errors import BadRequest

_MAX_FILES: Final = 64


class ExpectedFileField(msgspec.Struct):
    """A file that the tools are expected to make."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    format: str | None = None
    description: str | None = None


class AgentFields(SamplingNumbers, kw_only=True):
    """The agent fields. They extend the sampling fields, because a struct can have one base with fields.

    A field that is null, false or empty is ignored.
    """

    files: Annotated[list[ExpectedFileField], Meta(max_length=_MAX_FILES)] | None = None
    session_id: Any = None
    agent_permission: Literal["auto", "ask", "deny"] | None = None
    code_execution_permission: Literal["auto", "ask", "deny"] | None = None
    enable_shell: bool | None = None
    enable_code_execution: bool | None = None
    max_tool_rounds: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    web_search_options: WebSearchField | None = None


_OWN = tuple(field for field in AgentFields.__struct_fields__ if field not in SamplingNumbers.__struct_fields__)
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
SEARCH_TOOLS: Final = frozenset({"web_search", "web_search_preview"})
_UNSERVED_TOOLS: Final = {
    "file_search": "and searching in files is not served",
    "namespace": "and namespaces belong to the Responses API",
    "shell": "which belongs to the Responses API; here use 'enable_shell'",
    **dict.fromkeys(SEARCH_TOOLS, "which belongs to the Responses API; here use 'web_search_options'"),
}


def drop_agent_fields(body: AgentFields, *, served: Collection[str] = ()) -> None:
    """Drop the agent fields that a route ignores, except the served ones."""
    for field in _OWN:
        if field not in served:
            setattr(body, field, None)


def read_agent_task(
    body: AgentFields,
    tools: dict[str, str],
    session_id: str = "",
    skills: Sequence[SkillReference] = (),
    *,
    mcp: Sequence[McpChoice] = (),
    search: SearchRule | None = None,
) -> AgentTask | None:
    """Return what the request asks the server to do, or None. tools: the path of each server tool by its type.

    session_id: of the tools' interpreter and files, if the request asks for tools; by itself it asks for none. search: that of
    a tool, if there is one.
    """
    if body.web_search_options is not None:
        search = read_search(body.web_search_options, "web_search_options")
        if search is None:
            body.web_search_options = None
    asked = [field for field in _OWN if _is_given(getattr(body, field))]
    fields = [*asked, *tools.values(), *(one.field for one in (*skills, *mcp))]
    if not fields:
        return None
    searches = [path for kind, path in tools.items() if kind in SEARCH_TOOLS]
    return AgentTask(
        field=fields[0],
        code_field="enable_code_execution" if body.enable_code_execution else tools.get("code_interpreter", ""),
        shell_field="enable_shell" if body.enable_shell else tools.get("shell", ""),
        search_field="web_search_options" if body.web_search_options is not None else next(iter(searches), ""),
        session=session_id,
        permission=stricter(body.agent_permission or "auto", body.code_execution_permission or "auto"),
        max_rounds=body.max_tool_rounds,
        search=search or SearchRule(),
        files=tuple(ExpectedFile(file.name, file.format, file.description) for file in body.files or ()),
        skills=tuple(skills),
        mcp=tuple(mcp),
    )


def read_skills(place: Any, path: str, kind: str) -> tuple[SkillReference, ...]:
    """Return the skills that a container or an environment names; each has this type. Raises BadRequest."""
    given = cast("dict[str, Any]", place).get("skills") if isinstance(place, dict) else None
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _wrong(f"{path}.skills", "must be a list")
    return tuple(
        _read_skill(one, f"{path}.skills[{number}]", kind) for number, one in enumerate(cast("list[Any]", given))
    )


def _read_skill(given: Any, path: str, kind: str) -> SkillReference:
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if fields.get("type") != kind:
        raise _wrong(f"{path}.type", f"must be {kind!r}: the server has the skills that were uploaded to it")
    skill_id, version = fields.get("skill_id"), fields.get("version")
    if not isinstance(skill_id, str) or not skill_id:
        raise _wrong(f"{path}.skill_id", "is required")
    if version is not None and not isinstance(version, str | int):
        raise _wrong(f"{path}.version", "must be a number or 'latest'")
    return SkillReference(field=path, skill_id=skill_id, version="" if version is None else str(version))


def _wrong(field: str, reason: str) -> BadRequest:
    return BadRequest(f"Field '{field}' {reason}", extras={"param": field})


def take_session_id(body: AgentFields) -> str:
    """Return the id of the session that a request continues, or an empty text. Raises BadRequest if it cannot be one."""
    session_id, body.session_id = body.session_id, None
    if session_id is None:
        return ""
    if not isinstance(session_id, str):
        raise BadRequest("Field 'session_id': expected a text", http_status=422, extras={"param": "session_id"})
    if session_id:
        check_session_id(session_id)
    return session_id


def check_session_id(session_id: str) -> None:
    """Raise BadRequest for a text that may not be the id of a session."""
    if not _SESSION_ID.fullmatch(session_id):
        text = "Field 'session_id' must have 1 to 128 letters, digits and _.:@-"
        raise BadRequest(text, extras={"param": "session_id"})


def _is_given(value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)  # a field with 0 was given, too
    return bool(value) or is_number


def take_server_tool(kind: str, path: str, allowed: Collection[str], found: dict[str, str]) -> None:
    """Note a tool of the server in found. Raises BadRequest for one that this route or this server does not have."""
    if kind not in allowed:
        reason = _UNSERVED_TOOLS.get(kind) or "and there is no such tool here"
        raise BadRequest(f"Field '{path}.type' is {kind[:40]!r}, {reason}", extras={"param": path})
    if kind in found:
        raise BadRequest(f"Field '{path}.type' is {kind!r} for a second time", extras={"param": path})
    found[kind] = path
