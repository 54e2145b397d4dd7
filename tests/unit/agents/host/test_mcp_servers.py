"""An MCP server's answers are texts for a model, whatever the server says about their form."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types
import pytest
from mcp.client._memory import InMemoryTransport
from mcp.server import Server

from sie.agents.host import mcp_transports
from sie.agents.host.mcp_servers import McpServers
from sie.agents.messages import RunTool, ToolResult
from sie.config.mcp_config import McpConfig, McpServer, WebSocket

CONFIG = McpConfig(servers=(McpServer(name="m", source=WebSocket(url="ws://unused/")),))
CALL = RunTool(owner="", session="", run_id="r", round=0, turn=0, name="m_say", arguments="{}", server="m")


def test_a_result_that_does_not_fit_its_output_schema_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_tools(_context: Any, _params: Any) -> mcp_types.ListToolsResult:
        schema = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a+)$"}}}
        tool = mcp_types.Tool(name="say", input_schema={"type": "object"}, output_schema=schema)
        return mcp_types.ListToolsResult(tools=[tool])

    async def call_tool(_context: Any, _params: Any) -> mcp_types.CallToolResult:
        content = mcp_types.TextContent(type="text", text="hello")
        return mcp_types.CallToolResult(content=[content], structured_content={"text": "aaa!"})

    async def run() -> ToolResult:
        servers = McpServers(CONFIG, max_bytes=1 << 20, max_chars=100)
        servers.open()
        try:
            async with asyncio.timeout(60):
                while not servers.list_tools().servers[0].is_connected:  # noqa: ASYNC110  # nothing tells of it
                    await asyncio.sleep(0)
                return await servers.run(CALL)
        finally:
            await servers.close()

    double = Server("double", on_list_tools=list_tools, on_call_tool=call_tool)
    monkeypatch.setattr(mcp_transports, "open_transport", lambda *_: InMemoryTransport(double))
    assert asyncio.run(run()).content == "hello"
