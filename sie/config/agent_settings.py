"""The section of settings for agents: tools that the server runs. See `sie.config.settings`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from sie.config.limits import MIB


class Agents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tools that the server itself runs for a model (docs/agents.md)."""

    agent: Annotated[
        bool, Meta(description="Turn on every tool: Python, shell and, with a `search_url`, web search.")
    ] = False
    enable_code_execution: Annotated[
        bool, Meta(description="Whether requests may have the server run Python code.")
    ] = False
    enable_shell: Annotated[bool, Meta(description="Whether requests may have the server run shell commands.")] = False
    enable_search: Annotated[
        bool,
        Meta(description="Whether requests may have the server search the web and read pages; needs a `search_url`."),
    ] = False
    tool_dispatch_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s]+)?\Z",
            description="Address to which the server posts the calls of a request's own functions, instead of returning them to "
            "the client; empty returns them.",
            extra={"form": "http://host/path or https://host/path"},
        ),
    ] = ""
    search_backend: Annotated[
        Literal["searxng", "brave"], Meta(description="The kind of search engine at `search_url`.")
    ] = "searxng"
    search_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s]+)?\Z",
            description="Address of the search engine's API; empty for none.",
            extra={"form": "http://host/path or https://host/path"},
        ),
    ] = ""
    search_key_file: Annotated[str, Meta(description="File with the key of the search engine; empty for none.")] = ""
    mcp_config: Annotated[
        str,
        Meta(
            description="JSON file of MCP servers, whose tools requests may pick by the server's name; empty for none."
        ),
    ] = ""
    mcp_max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16, le=1 << 32, description="Most bytes that an MCP server may send in ten seconds; over it is cut."
        ),
    ] = 16 * MIB
    fetch_private_addresses: Annotated[
        bool,
        Meta(description="Let page extraction reach loopback, private and link-local addresses. For tests only."),
    ] = False
    sandbox: Annotated[
        Literal["on", "off"],
        Meta(
            description="Whether code and commands run in a sandbox. off: they run as the server's own user, unconfined."
        ),
    ] = "on"
    sandbox_network: Annotated[
        Literal["none", "host"],
        Meta(description="The network of a sandbox. host: all that this host reaches, its own services included."),
    ] = "none"
    sandbox_nice: Annotated[
        int,
        Meta(
            ge=0,
            le=19,
            description="Nice value of a sandbox's session, where the kernel groups processes by session. Less gives code more of "
            "a host whose cores are all busy, and makes others wait for it.",
        ),
    ] = 19
    agent_dir: Annotated[
        str,
        Meta(
            description="Directory of the working directories, on a local disk; each agent process makes one of its own in it. Empty uses `agents` in `state_dir`."
        ),
    ] = ""
    agent_socket: Annotated[
        str,
        Meta(
            description="Unix socket of an agent process of another service, `sie agents`; empty starts one with the server."
        ),
    ] = ""
    agent_python: Annotated[
        str, Meta(description="Interpreter for Python code, with its packages; empty uses the server's own.")
    ] = ""
    agent_permission: Annotated[
        Literal["auto", "ask", "deny"],
        Meta(
            description="Whether tools run at once, after a client's approval, or never. A request may only be stricter."
        ),
    ] = "auto"
    agent_running: Annotated[
        int, Meta(ge=1, le=1024, description="Most tool calls that run at once, at idle priority; others wait.")
    ] = 2
    agent_sessions: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Most sessions with a working directory; the least recently used one is removed.",
        ),
    ] = 128
    agent_session_idle_s: Annotated[
        float, Meta(ge=1, le=604_800, description="Time without use after which a session is removed.")
    ] = 1800.0
    max_tool_rounds: Annotated[
        int,
        Meta(ge=0, le=10_000, description="Most rounds of tool calls of a request; its own field may only lower it."),
    ] = 256
    agent_timeout_s: Annotated[
        float, Meta(ge=1, le=86_400, description="Longest time for all rounds of a request.")
    ] = 1800.0
    agent_tokens: Annotated[
        int, Meta(ge=1, le=1 << 32, description="Most tokens that all rounds of a request may generate.")
    ] = 1_000_000
    approval_timeout_s: Annotated[
        float, Meta(ge=0.1, le=3600, description="Time after which a tool call that nobody approved is denied.")
    ] = 300.0
    code_timeout_s: Annotated[float, Meta(ge=0.1, le=3600, description="Longest time of one piece of Python code.")] = (
        60.0
    )
    shell_timeout_s: Annotated[
        float, Meta(ge=0.1, le=86_400, description="Longest time of one shell call; its own field may only lower it.")
    ] = 600.0
    tool_timeout_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3600,
            description="Longest time of a call at `tool_dispatch_url`, of a search, of a page, and of finding the page's text.",
        ),
    ] = 30.0
    sandbox_memory_bytes: Annotated[
        int, Meta(ge=64 * MIB, le=1 << 42, description="Most memory of a sandbox, over all its processes.")
    ] = 2048 * MIB
    sandbox_processes: Annotated[int, Meta(ge=4, le=32_768, description="Most processes of a sandbox.")] = 64
    sandbox_open_files: Annotated[
        int, Meta(ge=16, le=65_536, description="Most open files of a process in a sandbox.")
    ] = 256
    sandbox_file_bytes: Annotated[int, Meta(ge=1, le=1 << 40, description="Largest file that a sandbox may write.")] = (
        256 * MIB
    )
    sandbox_disk_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 42, description="Most disk space of a session's files.")
    ] = 1024 * MIB
    sandbox_files: Annotated[
        int, Meta(ge=16, le=10_000_000, description="Most files and directories of a session.")
    ] = 20_000
    sandbox_output_bytes: Annotated[
        int,
        Meta(ge=1024, le=1 << 36, description="Output of a call, to stdout and stderr, beyond which it is stopped."),
    ] = 16 * MIB
    max_result_chars: Annotated[
        int, Meta(ge=256, le=1 << 24, description="Most characters of stdout, and of stderr, that a result shows.")
    ] = field(default=16_384, name="max_tool_result_chars")

    @property
    def has_code(self) -> bool:
        """Whether Python code may run."""
        return self.agent or self.enable_code_execution

    @property
    def has_shell(self) -> bool:
        """Whether shell commands may run."""
        return self.agent or self.enable_shell

    @property
    def has_search(self) -> bool:
        """Whether the web may be searched."""
        return bool(self.search_url) and (self.agent or self.enable_search)

    @property
    def has_mcp(self) -> bool:
        """Whether there are MCP servers."""
        return bool(self.mcp_config)

    @property
    def is_on(self) -> bool:
        """Whether there is an agent process."""
        return self.has_code or self.has_shell or self.has_search or self.has_mcp or bool(self.tool_dispatch_url)
