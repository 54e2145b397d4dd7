"""Decodes the tools of type `mcp`: a request picks a server of the operator by its label, and never brings an address.

Source: generation API reference, section 8.2, and the types of the openai client 3.52.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from sie.frontend.generation.sampling_fields import wrong
from sie.values.agent import McpChoice

_UNSERVED: Final = ("server_url", "connector_id", "tunnel_id", "headers", "authorization")


class McpFields(msgspec.Struct, kw_only=True):
    """The fields of a tool of type `mcp`."""

    server_label: Annotated[str, Meta(max_length=256)] | None = None
    server_url: Any = None
    connector_id: Any = None
    tunnel_id: Any = None
    headers: Any = None
    authorization: Any = None
    allowed_tools: Any = None
    require_approval: Any = None


def read_mcp_choice(tool: McpFields, path: str, field: str = "server_label") -> McpChoice:
    """Return the server that a tool picks; field is the API's name for it. Raises BadRequest naming the field."""
    for unserved in _UNSERVED:
        if getattr(tool, unserved):
            raise wrong(
                f"{path}.{unserved}", "is not served: the operator configures MCP servers; give their 'server_label'"
            )
    if tool.require_approval not in (None, "never"):
        raise wrong(f"{path}.require_approval", "must be 'never'; use 'agent_permission' to be asked")
    if not tool.server_label:
        raise wrong(f"{path}.{field}", "is required")
    return McpChoice(field=f"{path}.{field}", label=tool.server_label, tools=_read_allowed(tool.allowed_tools, path))


def _read_allowed(allowed: Any, path: str) -> tuple[str, ...] | None:
    """Return the names of the tools that may be called: a list, or an object with one."""
    names = cast("dict[str, Any]", allowed).get("tool_names") if isinstance(allowed, dict) else allowed
    if names is None and (allowed is None or allowed == {}):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[Any]", names)):
        raise wrong(f"{path}.allowed_tools", "must be a list of names of tools")
    return tuple(cast("list[str]", names))
