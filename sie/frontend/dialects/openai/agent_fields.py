"""Lists the fields and tools by which a client asks the server to act: run code, search, keep files and sessions.

The server keeps sessions, and does nothing else of this. It refuses such a request and names the field.
Source: generation API reference, sections 3.1 and 8.
"""

from __future__ import annotations

import re
from typing import Any, Final

from sie.frontend.generation.sampling_fields import SamplingNumbers
from sie.values.errors import BadRequest


class AgentFields(SamplingNumbers, kw_only=True):
    """The agent fields. Chat and Messages serve `session_id`; no route serves the others. They extend the sampling fields, because a struct can have one base with fields.

    A field that is null, false or empty is ignored.
    """

    files: Any = None
    session_id: Any = None
    agent_permission: Any = None
    code_execution_permission: Any = None
    enable_shell: Any = None
    enable_code_execution: Any = None
    max_tool_rounds: Any = None
    web_search_options: Any = None


_OWN = tuple(field for field in AgentFields.__struct_fields__ if field not in SamplingNumbers.__struct_fields__)
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
AGENT_TOOLS = frozenset(
    {"code_interpreter", "web_search", "web_search_preview", "shell", "namespace", "file_search", "mcp"}
)
"""Types of tools that the server itself would run."""


def drop_agent_fields(body: AgentFields, *served: str) -> None:
    """Drop the agent fields that a route ignores like unknown fields. served names those that the route has itself."""
    for field in _OWN:
        if field not in served:
            setattr(body, field, None)


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


def refuse_agent_fields(body: AgentFields) -> None:
    """Raise BadRequest for the first field by which the request asks the server to act."""
    for field in _OWN:
        value = getattr(body, field)
        is_absent = value is None or value is False or (value != {} and isinstance(value, list | str) and not value)
        if not is_absent:
            text = f"Field '{field}' asks the server to act as an agent, which is not supported"
            raise BadRequest(text, extras={"param": field})


def refuse_agent_tool(kind: str, path: str) -> None:
    """Raise BadRequest for a tool that is not a function of the client."""
    reason = "would run on the server, which runs no tools" if kind in AGENT_TOOLS else "is unknown"
    raise BadRequest(f"Field '{path}.type': a tool of type {kind!r} {reason}; use 'function'",
                     extras={"param": path})  # fmt: skip
