"""Reads the file of MCP servers that the operator configured. Connects to nothing.

The form is that of the generation API reference, section 8.2: `servers` with a name, a source and a prefix each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sie.values.trusted_file import read_trusted_file

_NAME: Final = r"^[A-Za-z0-9_-]{1,64}\Z"
_MAX_SERVERS: Final = 64
_MAX_FILE_BYTES: Final = 4 << 20
Name = Annotated[str, Meta(pattern=_NAME)]
Url = Annotated[str, Meta(min_length=1, max_length=4096)]


class Process(msgspec.Struct, tag="Process", frozen=True, forbid_unknown_fields=True):
    """A program that talks over its stdin and stdout."""

    command: Annotated[str, Meta(min_length=1)]
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    work_dir: str | None = None


class Http(msgspec.Struct, tag="Http", frozen=True, forbid_unknown_fields=True):
    """A server at an address, by MCP's streamable HTTP."""

    url: Annotated[Url, Meta(pattern=r"^https?://[^\s]+\Z")]
    headers: dict[str, str] = {}


class WebSocket(msgspec.Struct, tag="WebSocket", frozen=True, forbid_unknown_fields=True):
    """A server at an address, with a message in each WebSocket frame."""

    url: Annotated[Url, Meta(pattern=r"^wss?://[^\s]+\Z")]
    headers: dict[str, str] = {}


class McpServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server. Requests pick it by its name; its tools have the prefix, or the name, and `_` before theirs."""

    name: Name
    source: Process | Http | WebSocket
    enabled: bool = True
    tool_prefix: Name | None = None
    bearer_token: str | None = None

    @property
    def prefix(self) -> str:
        """The first part of the names of its tools."""
        return self.tool_prefix or self.name


class McpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All servers and the limits of their calls."""

    servers: Annotated[tuple[McpServer, ...], Meta(max_length=_MAX_SERVERS)] = ()
    tool_timeout_secs: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    max_concurrent_calls: Annotated[int, Meta(ge=1, le=1024)] = 10

    @property
    def enabled(self) -> Sequence[McpServer]:
        """The servers to connect to."""
        return [server for server in self.servers if server.enabled]


def read_mcp_config(path: str) -> McpConfig:
    """Return the servers of a file. Raises ValueError and OSError that say what is wrong.

    Its commands run with the server's rights, so nobody but root and the server's user may write to it.
    """
    config = msgspec.json.decode(read_trusted_file(path, _MAX_FILE_BYTES)[0], type=McpConfig)
    for what, names in (
        ("name", [one.name for one in config.servers]),
        ("prefix", [one.prefix for one in config.enabled]),
    ):
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two servers have the {what} {min(twice)!r}")
    return config
