"""Starts the agent process, and connects its parts: the sandbox, sessions, tools and approvals, behind one socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Final

import msgspec

from sie.agents.channel import AgentServer
from sie.agents.host.approvals import Approvals
from sie.agents.host.mcp_servers import McpServers
from sie.agents.host.outside import OutsideTools
from sie.agents.host.runner import Tools
from sie.agents.host.sandboxed import Bounds
from sie.agents.host.sessions import Sessions
from sie.agents.messages import (
    Answer,
    AwaitApproval,
    Decide,
    FindFiles,
    ListMcp,
    McpTools,
    OpenApproval,
    Question,
    RunTool,
    ToolResult,
)
from sie.agents.paths import socket_path
from sie.agents.store.store import Store
from sie.config.agent_settings import Agents
from sie.config.mcp_config import read_mcp_config
from sie.config.settings import Settings
from sie.ipc import channel as control
from sie.ipc import messages
from sie.ipc.channel import Channel, ChannelClosedError
from sie.runtime import child_setup
from sie.runtime.control_groups import DelegatedGroup, find_delegated, take_delegated
from sie.runtime.logs import configure, get_logger
from sie.runtime.sandbox import Limits, Sandbox, find_sandbox
from sie.values.errors import Internal

_log = get_logger(__name__)
_CONFIGURE_TIMEOUT_S: Final = 10.0
_MAX_INLINE_BYTES: Final = 1 << 28
_FIRST_GIVEN_FD: Final = 3
_ADDRESS_SHARE: Final = 4
"""Address space for each byte of memory: programs reserve more than they use."""


class AgentProcess:
    """The parts of one agent process."""

    def __init__(self, settings: Settings) -> None:
        agents = settings.agents
        self._sandbox = _sandbox_of(settings)
        self._approvals = Approvals(agents.approval_timeout_s)
        self._sessions = Sessions(
            settings.agent_dir, self._sandbox,
            max_sessions=agents.agent_sessions, idle_s=agents.agent_session_idle_s, on_removed=self._approvals.forget,
        )  # fmt: skip
        bounds = Bounds(
            memory_bytes=agents.sandbox_memory_bytes, processes=agents.sandbox_processes, disk_bytes=agents.sandbox_disk_bytes, files=agents.sandbox_files,
            output_bytes=agents.sandbox_output_bytes, shown_chars=agents.max_result_chars, groups=_groups(),
        )  # fmt: skip
        python = agents.agent_python or sys.executable
        self._outside = OutsideTools(agents)
        self._mcp = _mcp_of(agents)
        self._tools = Tools(
            agents, self._sandbox, self._sessions, bounds, Store(settings.store_dir, settings.store), python=python,
            others=self._run_outside,
            max_inline_bytes=min(settings.store.max_inline_file_bytes, _MAX_INLINE_BYTES),
        )  # fmt: skip

    async def open(self, path: str, given: socket.socket | None = None) -> None:
        """Begin to answer frontends on this path. given: the socket that the service manager opened there."""
        await self._sessions.open_directory()
        if self._mcp is not None:
            self._mcp.open()
        await AgentServer(path, self.answer).open(given)

    async def answer(self, question: Question) -> Answer:
        """Answer one question of a frontend. Raises SieError."""
        match question:
            case RunTool():
                return await self._tools.run(question)
            case FindFiles():
                return await self._tools.find_files(question)
            case ListMcp():
                return self._mcp.list_tools() if self._mcp is not None else McpTools(())
            case OpenApproval():
                return self._approvals.open(question)
            case AwaitApproval():
                return await self._approvals.wait(question)
            case Decide():
                return self._approvals.decide(question)
            case _:
                raise Internal(f"unexpected {type(question).__name__}")

    async def _run_outside(self, call: RunTool) -> ToolResult:
        if call.server and self._mcp is not None:
            return await self._mcp.run(call)
        return await self._outside.run(call)

    async def expire_forever(self) -> None:
        """Remove idle sessions, until cancelled."""
        await self._sessions.expire_forever()

    async def close(self) -> None:
        """End everything that runs, and remove its files."""
        await self._sessions.close()
        self._outside.close()
        if self._mcp is not None:
            await self._mcp.close()


def _groups() -> DelegatedGroup | None:
    """Return the control groups of sandboxes, and log which limits hold."""
    groups = take_delegated(find_delegated())
    _log.info("sandboxes are limited by %s", "control groups and a watchdog" if groups else "rlimits and a watchdog")
    return groups


def _mcp_of(agents: Agents) -> McpServers | None:
    """Return the MCP servers of the operator. A file that cannot be read was refused at the start, and changed since."""
    if not agents.mcp_config:
        return None
    try:
        config = read_mcp_config(agents.mcp_config)
    except (OSError, ValueError) as error:
        _log.error("no MCP server is connected: mcp_config: %s", error)
        return None
    return McpServers(config, max_bytes=agents.mcp_max_bytes, max_chars=agents.max_result_chars)


def _sandbox_of(settings: Settings) -> Sandbox:
    """Return the sandbox of this host. Without one its mode is off, and the log says what is missing."""
    agents = settings.agents
    limits = Limits(
        data_bytes=agents.sandbox_memory_bytes, address_bytes=_ADDRESS_SHARE * agents.sandbox_memory_bytes,
        file_bytes=agents.sandbox_file_bytes, open_files=agents.sandbox_open_files, processes=agents.sandbox_processes,
    )  # fmt: skip
    if agents.sandbox == "off":
        _log.warning("sandbox off: code and commands run as this user, with this host's files and network")
        limits = msgspec.structs.replace(limits, processes=0)
        return Sandbox(mode="off", limits=limits, session_nice=agents.sandbox_nice)
    sandbox, report = find_sandbox(
        has_network=agents.sandbox_network == "host",
        limits=limits,
        hidden=hidden_paths(settings),
        python=agents.agent_python,
    )
    if report.problem and (agents.has_code or agents.has_shell):
        _log.error("no code and no command can run, because there is no sandbox: %s", report.problem)
    return msgspec.structs.replace(sandbox, session_nice=agents.sandbox_nice)


def hidden_paths(settings: Settings) -> list[str]:
    """Return the paths of the server's own that no sandbox may show, wherever they are."""
    server, access, models = settings.server, settings.access, settings.models
    found = [server.runtime_dir, server.state_dir, settings.store.store_dir, models.cache_dir, models.weights_dir, models.catalog, *models.repositories,
             access.api_keys, access.tls_cert, access.tls_key, access.tls_client_ca, settings.agents.agent_dir,
             settings.agents.search_key_file, settings.agents.mcp_config, access.uds]  # fmt: skip
    directories = [spec.partition("=")[2].partition("@")[0] for spec in (*models.preload, *models.lazy)]
    found += [path for path in directories if path.startswith(("/", "."))]
    return [path for path in found if path]


def main() -> int:
    """Run the agent process; the launch record is the only argument."""
    launch = msgspec.json.decode(sys.argv[1], type=messages.Launch)
    child_setup.die_with_parent(launch.supervisor_pid)
    child_setup.yield_to_siblings()
    child_setup.dump_stacks_on_abort()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure(launch.log_format, launch.log_level, "agent")  # type: ignore[arg-type]
    try:
        channel = control.connect(launch)
        message, fds = channel.receive(_CONFIGURE_TIMEOUT_S)
    except (OSError, ChannelClosedError) as error:
        _log.error("no supervisor: %s", error)
        return 1
    for fd in fds:
        os.close(fd)
    assert isinstance(message, messages.Configure)
    asyncio.run(_serve(message.settings, socket_path(launch.control_path), channel))
    return 0


def serve_service(settings: Settings) -> int:
    """Run the agent process as a service of its own, until SIGTERM. Raises OSError if it cannot listen.

    The socket is the one that systemd opened, or is made at `agent_socket`. Source: sd_listen_fds(3).
    """
    configure(settings.server.log_format, settings.server.log_level, "agent")
    child_setup.dump_stacks_on_abort()
    given = None
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        given = socket.socket(fileno=_FIRST_GIVEN_FD)
        os.set_inheritable(_FIRST_GIVEN_FD, False)  # its own name for it
    path = str(given.getsockname()) if given is not None else settings.agents.agent_socket
    asyncio.run(_serve(settings, path, given=given))
    return 0


async def _serve(
    settings: Settings, path: str, channel: Channel | None = None, given: socket.socket | None = None
) -> None:
    """Serve until SIGTERM, or until the supervisor is gone."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    if channel is not None:
        loop.add_reader(channel.fileno(), _on_control, channel)
    process = AgentProcess(settings)
    await process.open(path, given)
    child_setup.calm_collector()
    if channel is not None:
        channel.send(messages.Ready())
    expiry = asyncio.create_task(process.expire_forever())
    await stopped.wait()
    expiry.cancel()
    await process.close()
    os._exit(0)  # threads that measure a directory need not end first


def _on_control(channel: Channel) -> None:
    try:
        while (received := channel.try_receive()) is not None:
            message, fds = received
            for fd in fds:
                os.close(fd)
            if isinstance(message, messages.Ping):
                channel.send(messages.Pong(message.number))
    except ChannelClosedError:
        os._exit(1)  # the kernel ends every sandbox with this process


if __name__ == "__main__":
    sys.exit(main())
