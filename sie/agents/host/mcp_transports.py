"""Connects to one MCP server with bounds: a server that floods, hangs or dies is cut, and costs this process little.

A transport yields MCP's message streams. `mcp`'s own for processes reads a line without a limit, and it has none for
WebSocket, so these two are here. Streamable HTTP is `mcp`'s, over connections that count bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Final

import anyio
import httpx2
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from sie.config.mcp_config import Http, McpServer, Process, WebSocket
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_WINDOW_S: Final = 10.0
_GRACE_S: Final = 2.0
_MAX_LOGGED: Final = 20
"""Lines of a program's stderr that are logged for each of its starts."""
_LOGGED_CHARS: Final = 300
_LAUNCH: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Ends the program with this process (PR_SET_PDEATHSIG, SIGKILL), however this process ends."""
Streams = tuple[Any, Any]


class FloodError(OSError):
    """A server sent more than it may."""


class Meter:
    """Counts the bytes that a server sends; max_bytes is the most in ten seconds."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._since_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes. Raises FloodError over the limit."""
        now_s = time.monotonic()
        if now_s - self._since_s > _WINDOW_S:
            self._num_bytes, self._since_s = 0, now_s
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise FloodError(f"it sent more than mcp_max_bytes ({self._max_bytes}) in {_WINDOW_S:g} s")


def open_transport(server: McpServer, max_bytes: int, on_lost: Callable[[str], None]) -> Any:
    """Return the transport of a server: an async context manager. on_lost is called with the reason when it ends itself."""
    match server.source:
        case Process():
            return _open_process(server.source, max_bytes, on_lost)
        case Http():
            return _open_http(server.source, _headers(server), Meter(max_bytes))
        case WebSocket():
            return _open_websocket(server.source, _headers(server), max_bytes, on_lost)


def _headers(server: McpServer) -> dict[str, str]:
    assert not isinstance(server.source, Process)
    bearer = {"authorization": f"Bearer {server.bearer_token}"} if server.bearer_token else {}
    return {**server.source.headers, **bearer}


@contextlib.asynccontextmanager
async def _open_process(source: Process, max_bytes: int, on_lost: Callable[[str], None]) -> AsyncGenerator[Streams]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), source.command, *source.args,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=max_bytes,
        env={**get_default_environment(), **source.env}, cwd=source.work_dir, start_new_session=True,
    )  # fmt: skip
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None

    async def receive() -> bytes:
        try:
            return await stdout.readline()
        except ValueError:
            raise FloodError(f"it sent a line of more than mcp_max_bytes ({max_bytes})") from None

    async def send(text: str) -> None:
        stdin.write(text.encode() + b"\n")
        await stdin.drain()

    logs = asyncio.create_task(_log_lines(source.command, stderr))
    try:
        async with _pumped(receive, send, Meter(max_bytes), on_lost) as streams:
            yield streams
    finally:
        logs.cancel()
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and what it started: it may end itself when its stdin ends."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        with anyio.move_on_after(_GRACE_S):
            await process.wait()
    finally:  # a shield of anyio does not hold off a cancellation of asyncio
        _kill(process)
    with anyio.move_on_after(_GRACE_S):
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program and what it started, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Nothing public closes pipes of which a flood has left some unread, or which a program of the program still holds.
    process._transport.close()  # type: ignore[attr-defined]


async def _log_lines(command: str, stderr: asyncio.StreamReader) -> None:
    """Log the first lines of stderr, and read the rest, so that the program does not wait for a reader."""
    number = 0
    while data := await stderr.read(1 << 16):
        for line in data.decode(errors="replace").splitlines() if number < _MAX_LOGGED else ():
            number += 1
            _log.info("MCP server %s: %s", command, line[:_LOGGED_CHARS])


@contextlib.asynccontextmanager
async def _open_websocket(
    source: WebSocket, headers: dict[str, str], max_bytes: int, on_lost: Callable[[str], None]
) -> AsyncGenerator[Streams]:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, WebSocketException
    from websockets.typing import Subprotocol

    try:
        opened = await connect(
            source.url, subprotocols=[Subprotocol("mcp")], additional_headers=headers, max_size=max_bytes
        )
    except WebSocketException as error:
        raise OSError(str(error)) from error

    async def receive() -> bytes:
        try:
            data = await opened.recv(decode=False)
            return data.encode() if isinstance(data, str) else data
        except ConnectionClosed as error:
            raise OSError(str(error)) from None

    async def send(text: str) -> None:
        try:
            await opened.send(text)
        except ConnectionClosed as error:
            raise OSError(str(error)) from None

    try:
        async with _pumped(receive, send, Meter(max_bytes), on_lost) as streams:
            yield streams
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GRACE_S):
            await opened.close()
        opened.transport.abort()


@contextlib.asynccontextmanager
async def _pumped(
    receive: Callable[[], Awaitable[bytes]], send: Callable[[str], Awaitable[None]], meter: Meter,
    on_lost: Callable[[str], None],
) -> AsyncGenerator[Streams]:  # fmt: skip
    """Yield the streams between which messages are carried. receive returns empty bytes at the end, or raises OSError."""
    inbox, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outbox = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        reason = "it ended"
        async with inbox:
            try:
                while data := await receive():
                    meter.add(len(data))
                    await inbox.send(_parse(data))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # we are done with it
            except OSError as error:
                reason = str(error)
            on_lost(reason)

    async def write() -> None:
        async with outbox:
            async for message in outbox:
                try:
                    await send(message.message.model_dump_json(by_alias=True, exclude_unset=True))
                except OSError as error:
                    on_lost(str(error))
                    return

    async with inbox, read_stream, write_stream, outbox, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield read_stream, write_stream
        finally:
            tasks.cancel_scope.cancel()


def _parse(data: bytes) -> SessionMessage | Exception:
    """Return a message, or the error that a session skips: a program may print other lines, too."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
    except ValueError as error:
        return error


@contextlib.asynccontextmanager
async def _open_http(source: Http, headers: dict[str, str], meter: Meter) -> AsyncGenerator[Streams]:
    timeout = httpx2.Timeout(_WINDOW_S, read=300.0)  # reads of event streams wait long; calls have a time of their own
    transport = _Metered(httpx2.AsyncHTTPTransport(), meter)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport, trust_env=False) as client,
        streamable_http_client(source.url, http_client=client) as streams,
    ):
        yield streams


class _Metered(httpx2.AsyncBaseTransport):
    """Counts the bytes of every answer, which must come as they are: a small packed one unpacks to a thousand times more."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            await response.aclose()
            raise FloodError(f"it answered with the content-encoding {encoding!r}, which was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _MeteredStream(response.stream, self._meter)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _MeteredStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._inner:
            self._meter.add(len(data))
            yield data

    async def aclose(self) -> None:
        await self._inner.aclose()
