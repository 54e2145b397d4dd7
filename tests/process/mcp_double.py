"""A real MCP server for tests, and ways in which one misbehaves. `python mcp_double.py WAY [PORT]`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

server = MCPServer("double")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def environment(name: str) -> str:
    """Show a variable of the environment."""
    return os.environ.get(name, "unset")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """End the process in the middle of a call."""
    os._exit(3)


@server.tool()
def flood() -> str:
    """Answer with more than anybody wants."""
    os.write(2, b"x" * (1 << 22))
    return "x" * (1 << 22)


@server.tool()
def large() -> str:
    """Answer with much text."""
    return "y" * 100_000


@server.tool()
async def learn(name: str, context: Context) -> str:
    """Have one more tool."""
    server.add_tool(add, name=name)
    await context.notify_tools_changed()
    return name


async def serve_websocket(port: int) -> None:
    """Serve messages in WebSocket frames; `mcp` 2 has no such server of its own."""
    from websockets.asyncio.server import ServerConnection, serve

    async def handle(opened: ServerConnection) -> None:
        assert opened.request is not None
        if opened.request.headers.get("authorization") != "Bearer secret":
            await opened.close(4001, "who are you?")
            return
        inbox, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        inner = server._lowlevel_server

        async def receive() -> None:
            async with inbox:
                async for text in opened:
                    await inbox.send(SessionMessage(jsonrpc_message_adapter.validate_json(text)))

        async def send() -> None:
            async for message in outbox:
                await opened.send(message.message.model_dump_json(by_alias=True, exclude_unset=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            tasks.start_soon(send)
            await inner.run(read, write, inner.create_initialization_options())
            tasks.cancel_scope.cancel()

    async with serve(handle, "127.0.0.1", port, subprotocols=["mcp"]):  # type: ignore[list-item]
        print("ready", file=sys.stderr, flush=True)
        await asyncio.get_running_loop().create_future()


def answer_carelessly() -> None:
    """Serve a tool whose schema few can read, and whose result is not one of MCP's; and one that learns others."""
    odd = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {}},
        "if": {"required": ["a"]},
        "then": {"required": ["b"]},
    }
    listed: list[dict[str, Any]] = [
        {"name": "odd", "inputSchema": odd},
        {"name": "plain", "inputSchema": {"type": "object"}},
    ]
    results: dict[str, Any] = {"tools/list": {"tools": listed}, "ping": {}}
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        result = results.get(asked["method"])
        if asked["method"] == "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {"listChanged": True}},
                      "serverInfo": {"name": "careless", "version": "1"}}  # fmt: skip
        elif asked["method"] == "tools/call":
            text = {"content": [{"type": "text", "text": json.dumps(asked["params"]["arguments"])}]}
            if asked["params"]["arguments"].get("learns"):
                listed.append({"name": asked["params"]["arguments"]["learns"], "inputSchema": {"type": "object"}})
                print(json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}), flush=True)
            result = text if asked["params"]["name"] == "plain" else {"content": "not a list"}
        ended = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **ended}), flush=True)


def main() -> None:
    way = sys.argv[1]
    if way == "websocket":
        asyncio.run(serve_websocket(int(sys.argv[2])))
    elif way == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    elif way == "careless":
        answer_carelessly()
    else:
        print("hello from stderr", file=sys.stderr, flush=True)
        server.run("stdio")


if __name__ == "__main__":
    main()
