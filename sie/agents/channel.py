"""Carries `sie.agents.messages` over a Unix socket: many questions at once on one connection, each answered once.

A message is a 4-byte little-endian size and msgpack. When a connection ends, the work on its questions is cancelled: a
frontend that died waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from sie.agents.messages import Answer, Answered, Asked, Cancel, Question
from sie.ipc.channel import peer_credentials
from sie.runtime.logs import get_logger
from sie.values.errors import Internal, SieError, Unavailable, from_wire, to_wire

_log = get_logger(__name__)
_SIZE: Final = struct.Struct("<I")
_MAX_BYTES: Final = 512 << 20
_CONNECT_TIMEOUT_S: Final = 5.0
_AGAIN_S: Final = 0.05
_encode: Final = msgspec.msgpack.Encoder().encode
_asked: Final = msgspec.msgpack.Decoder(Asked)
_answered: Final = msgspec.msgpack.Decoder(Answered)
_AnswerT = TypeVar("_AnswerT", bound=Answer)
Handler = Callable[[Question], Awaitable[Answer]]


class AgentClient:
    """A frontend's connection to the agent process. It connects with the first question, and again after a loss."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._connecting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._num_asked = 0
        self._reader: asyncio.Task[None] | None = None

    async def ask(self, question: Question, kind: type[_AnswerT]) -> _AnswerT:
        """Return the answer. A cancelled caller stops the work. Raises Unavailable if the agent process ends first."""
        writer = await self._connect()
        self._num_asked += 1
        number = self._num_asked
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await _send(writer, Asked(number, question))
            answer = await future
        except BaseException as error:
            if not isinstance(error, SieError):
                with contextlib.suppress(OSError):
                    writer.write(_packed(Asked(number, Cancel(number))))
            raise _lost() if isinstance(error, ConnectionError) else error from None
        finally:
            self._waiting.pop(number, None)
        if not isinstance(answer, kind):
            raise Internal(f"the agent process answered with {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Close the connection; the work on its questions ends."""
        if self._reader is not None:
            self._reader.cancel()
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = None

    async def _connect(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._streams is None:
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        self._streams = await self._try_connect()
                except TimeoutError:
                    raise _lost() from None
                self._reader = asyncio.get_running_loop().create_task(self._read(self._streams[0]))
            return self._streams[1]

    async def _try_connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. Retry until the agent process listens; the caller sets the limit of time."""
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(_AGAIN_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out answers until the connection ends, then fail those that still wait."""
        try:
            while (body := await _receive(reader)) is not None:
                message = _answered.decode(body)
                future = self._waiting.get(message.number)
                if future is None or future.done():
                    continue
                if message.error is not None:
                    future.set_exception(from_wire(message.error))
                elif message.answer is not None:
                    future.set_result(message.answer)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("the connection to the agent process failed: %s", error)
        finally:
            self._streams = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_lost())


class AgentServer:
    """The agent process's listener. handle answers one question."""

    def __init__(self, path: str, handle: Handler) -> None:
        self._path = path
        self._handle = handle
        self._allowed_uid = os.getuid()
        self._server: asyncio.Server | None = None

    async def open(self, given: socket.socket | None = None) -> None:
        """Listen on a socket that only this user may open, or on a given one, which the owner of its path may open."""
        if given is not None:
            self._allowed_uid = os.stat(self._path).st_uid  # noqa: PTH116  # once, at the start
            self._server = await asyncio.start_unix_server(self._serve, sock=given)
            return
        if await asyncio.to_thread(Path(self._path).is_socket):  # of a process that has ended
            await asyncio.to_thread(Path(self._path).unlink)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            sock.bind(self._path)
        finally:
            os.umask(before)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        _pid, uid = peer_credentials(writer.get_extra_info("socket"))
        try:
            while uid == self._allowed_uid and (body := await _receive(reader)) is not None:
                message = _asked.decode(body)
                if isinstance(message.question, Cancel):
                    if (task := running.get(message.question.number)) is not None:
                        task.cancel()
                    continue
                task = asyncio.create_task(self._answer(message, writer))
                running[message.number] = task
                task.add_done_callback(lambda _task, number=message.number: running.pop(number, None))
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("a frontend's connection failed: %s", error)
        finally:
            for task in list(running.values()):
                task.cancel()
            writer.close()

    async def _answer(self, message: Asked, writer: asyncio.StreamWriter) -> None:
        try:
            answered = Answered(message.number, await self._handle(message.question))
        except SieError as error:
            answered = Answered(message.number, error=to_wire(error))
        except Exception:
            _log.exception("%s failed", type(message.question).__name__)
            answered = Answered(message.number, error=to_wire(Internal("the tool failed on the server")))
        with contextlib.suppress(OSError):  # the frontend is gone
            await _send(writer, answered)


async def _send(writer: asyncio.StreamWriter, message: Asked | Answered) -> None:
    writer.write(_packed(message))
    await writer.drain()


def _packed(message: Asked | Answered) -> bytes:
    body = _encode(message)
    return _SIZE.pack(len(body)) + body


async def _receive(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message, or None at the end. Raises OSError for one that is too large."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if size > _MAX_BYTES:
            raise OSError(f"a message of {size} bytes")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return None


def _lost() -> Unavailable:
    return Unavailable("The agent process is not running; its sessions are lost", code="AGENT_LOST", retry_after_s=1)
