"""Keeps the connections to the operator's MCP servers, lists their tools and runs calls of them.

A server that is not there is tried again, less and less often. A fault of a server is a result for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sie.agents.messages import McpTools, RunTool, ToolResult, failed
from sie.config.mcp_config import McpConfig, McpServer
from sie.runtime.logs import get_logger
from sie.values.agent import McpServerTools, McpTool

if TYPE_CHECKING:
    from mcp import Client

_log = get_logger(__name__)
_FIRST_AGAIN_S: Final = 0.2
_LAST_AGAIN_S: Final = 30.0
_LISTING_PAUSE_S: Final = 0.5
_MAX_TOOLS: Final = 256
_MAX_PAGES: Final = 32
_MAX_DESCRIPTION_CHARS: Final = 4096
_MAX_SCHEMA_BYTES: Final = 1 << 16
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_to_json: Final = msgspec.json.Encoder().encode


class McpServers:
    """All configured servers. max_bytes: what one may send in ten seconds; max_chars: of a result that a model reads."""

    def __init__(self, config: McpConfig, *, max_bytes: int, max_chars: int) -> None:
        self._running = asyncio.Semaphore(config.max_concurrent_calls)
        self._servers = {
            server.name: _Connection(server, config.tool_timeout_secs, max_bytes, max_chars)
            for server in config.enabled
        }

    def open(self) -> None:
        """Begin to connect."""
        for server in self._servers.values():
            server.open()

    async def close(self) -> None:
        """End all connections, and the programs behind them."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def list_tools(self) -> McpTools:
        """Return every server with its tools; one that is not connected has none."""
        return McpTools(tuple(server.tools() for server in self._servers.values()))

    async def run(self, call: RunTool) -> ToolResult:
        """Run one call."""
        server = self._servers.get(call.server)
        if server is None:
            return failed(f"There is no MCP server {call.server!r}")
        async with self._running:
            return await server.run(call)


class _Connection:
    """One server, and the task that keeps its connection."""

    def __init__(self, server: McpServer, timeout_s: float, max_bytes: int, max_chars: int) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._max_chars = max_chars
        self._client: Client | None = None
        self._tools: tuple[McpTool, ...] = ()
        self._lose: Callable[[str], None] = _ignore
        """Ends the current connection, with the reason."""
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def tools(self) -> McpServerTools:
        return McpServerTools(label=self._server.name, is_connected=self._client is not None, tools=self._tools)

    async def run(self, call: RunTool) -> ToolResult:
        """Run a call. One that takes too long is cancelled at the server, and its connection begins anew."""
        from mcp import MCPError

        client, lose = self._client, self._lose
        tool = next((one for one in self._tools if one.name == call.name), None)
        if client is None or tool is None:
            return failed(f"The MCP server {self._server.name!r} is not connected now")
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
            async with asyncio.timeout(self._timeout_s):
                return self._read(await client.call_tool(tool.own_name, arguments))
        except TimeoutError:
            lose("a call took too long")
            return failed(f"The MCP server did not answer within tool_timeout_secs ({self._timeout_s:g} s)")
        except msgspec.MsgspecError as error:
            return failed(f"The arguments are wrong: {error}")
        except Exception as error:  # libraries below raise groups, validation errors, and their own
            reason = str(error) if isinstance(error, MCPError) else type(error).__name__
            if not await self._is_alive(client):
                lose(f"{type(error).__name__}: {error}")
                return failed(f"The connection to the MCP server broke: {reason}")
            return failed(f"The MCP server answered with an error: {reason[: self._max_chars]}")

    async def _is_alive(self, client: Client) -> bool:
        """Return whether a server whose answer was an error, or no answer at all, still serves.

        One that was restarted forgot its sessions.
        """
        if client is not self._client:
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.session.list_tools()
        except Exception:  # libraries below raise their own
            return False
        return True

    def _read(self, result: Any) -> ToolResult:
        text = "\n".join(filter(None, map(_text_of, result.content)))
        if not text and result.structured_content is not None:
            text = _to_json(result.structured_content).decode()
        if len(text) > self._max_chars:
            text = f"{text[: self._max_chars]}\n[... {len(text)} characters in all]"
        if result.is_error:
            return failed(text or "The tool failed, and gave no reason")
        return ToolResult(content=text, record=text, data={"content": text})

    # --- connecting -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Connect, again and again, until cancelled."""
        again_s = _FIRST_AGAIN_S
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                reason = await self._serve()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # groups of whatever the libraries below raise
                reason = _reason_of(error)
            _log.warning("MCP server %s is not connected: %s", self._server.name, reason[:500])
            if asyncio.get_running_loop().time() - began_s > _LAST_AGAIN_S:
                again_s = _FIRST_AGAIN_S
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _LAST_AGAIN_S)

    async def _serve(self) -> str:
        """Connect and stay connected; return why the connection ended."""
        from mcp import Client
        from mcp_types import ToolListChangedNotification

        from sie.agents.host.mcp_transports import open_transport

        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        changed = asyncio.Event()

        def lose(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        async def hear(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                changed.set()

        self._lose = lose
        transport = open_transport(self._server, self._max_bytes, lose)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout_s):
                    made = Client(transport, read_timeout_seconds=self._timeout_s, message_handler=hear)
                    client = await stack.enter_async_context(made)
                    client.session.validate_tool_result = _take_any  # a pattern of the server's could hold this loop
                    self._tools = await self._list(client)
                self._client = client
                _log.info("MCP server %s is connected, with %d tools", self._server.name, len(self._tools))
                return await self._follow(client, lost, changed)
            finally:
                self._client, self._tools = None, ()

    async def _follow(self, client: Client, lost: asyncio.Future[str], changed: asyncio.Event) -> str:
        """Return why the connection ended. Until then, list the tools anew when the server says that they have changed."""
        listening = asyncio.ensure_future(_listen(client, changed))
        try:
            return await self._list_again(client, lost, changed)
        finally:
            listening.cancel()
            await asyncio.wait((listening,))

    async def _list_again(self, client: Client, lost: asyncio.Future[str], changed: asyncio.Event) -> str:
        while True:
            news = asyncio.ensure_future(changed.wait())
            try:
                await asyncio.wait((lost, news), return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            await asyncio.wait((lost,), timeout=_LISTING_PAUSE_S)  # changes come in groups
            if lost.done():
                return lost.result()
            changed.clear()
            async with asyncio.timeout(self._timeout_s):
                self._tools = await self._list(client)

    async def _list(self, client: Client) -> tuple[McpTool, ...]:
        found: list[McpTool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += [tool for one in page.tools if (tool := self._tool_of(one)) is not None]
            cursor = page.next_cursor
            if not cursor:
                break
        if len(found) > _MAX_TOOLS:
            _log.warning("MCP server %s has %d tools; the first %d count", self._server.name, len(found), _MAX_TOOLS)
        return tuple(found[:_MAX_TOOLS])

    def _tool_of(self, tool: Any) -> McpTool | None:
        """Return a tool, or None if its name or schema cannot be given to a model."""
        schema = _to_json(tool.input_schema)
        if not _TOOL_NAME.fullmatch(tool.name) or len(schema) > _MAX_SCHEMA_BYTES:
            _log.warning("a tool of MCP server %s is left out: %r", self._server.name, tool.name[:100])
            return None
        return McpTool(
            name=f"{self._server.prefix}_{tool.name}", own_name=tool.name,
            description=(tool.description or "")[:_MAX_DESCRIPTION_CHARS], parameters=msgspec.json.decode(schema),
        )  # fmt: skip


async def _listen(client: Client, changed: asyncio.Event) -> None:
    """Hear of changed tools from a server that tells of them on a stream of its own, as from protocol 2026-07-28 on.

    A stream that ends is opened again. Each beginning counts as a change: nobody was told of those before it.
    """
    from mcp import MCPError
    from mcp.client.subscriptions import ListenNotSupportedError
    from mcp_types import METHOD_NOT_FOUND

    again_s = _LISTING_PAUSE_S
    while True:
        try:
            async with client.listen(tools_list_changed=True) as events:
                if not events.honored.tools_list_changed:
                    return
                changed.set()
                async for _ in events:
                    again_s = _LISTING_PAUSE_S
                    changed.set()
        except ListenNotSupportedError:  # an older server
            return
        except Exception as error:  # libraries below raise their own
            if isinstance(error, MCPError) and error.code == METHOD_NOT_FOUND:
                return
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, _LAST_AGAIN_S)


def _ignore(_reason: str) -> None:
    """Do nothing: there is no connection yet."""


async def _take_any(name: str, result: Any) -> None:
    """Take a result of any form: a model reads it as text."""


def _text_of(content: Any) -> str:
    """Return a part of a result as a model reads it."""
    if content.type == "text":
        return content.text
    if content.type == "resource" and hasattr(content.resource, "text"):
        return content.resource.text
    return f"[{content.type}: {getattr(content, 'mime_type', None) or getattr(content, 'uri', '')}]"


def _reason_of(error: BaseException) -> str:
    """Return the first reason in a group of errors."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
