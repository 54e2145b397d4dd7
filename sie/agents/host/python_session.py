"""One Python interpreter of a session: it starts with the first code, stands still between calls, and may be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from sie.agents.host import process_tree
from sie.agents.host.sandboxed import Bounds, Sandboxed
from sie.runtime.sandbox import Program, Sandbox

_SIZE: Final = struct.Struct("<I")
_START_TIMEOUT_S: Final = 60.0
_GRACE_S: Final = 3.0
"""How long interrupted code may take to end."""
_MAX_REPLY_BYTES: Final = 64 << 20
_MODULE: Final = "agents/guest/interpreter.py"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Ran(msgspec.Struct, kw_only=True):
    """The result of one piece of code. Everything in it was written by a stranger's program."""

    result: str | None = None
    result_type: str | None = None
    exception: str | None = None
    images: list[str] = []
    frames: list[str] = []
    num_frames: _Count = 0
    num_left_out: _Count = 0
    """The pictures that the interpreter left out, because they were too many or too large."""
    number: int = 0
    """The number of the request that was run."""
    was_ended: bool = False
    """Whether the interpreter is gone, and its variables with it."""


_decode: Final = msgspec.json.Decoder(Ran).decode


class PythonSession:
    """One interpreter. Make a new one when `is_running` is false."""

    def __init__(self, sandbox: Sandbox, home: Path, bounds: Bounds, python: str) -> None:
        self._python = python
        self.box = Sandboxed(sandbox, home, bounds)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._num_asked = 0

    async def start(self) -> Ran:
        """Start it; return its first answer. One that could not start `was_ended`. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            program = Program(command=("python", str(fd)), module=_MODULE, python=self._python, has_packages=True)
            try:
                self.box.start(program, (fd,))
            except BaseException:
                ours.close()
                raise
        try:
            self._streams = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            self.box.end("its caller gave up")
            raise
        return await self._watched(self._read(), _START_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        """Whether it can run code."""
        return self.box.is_running and self._streams is not None

    async def run(self, code: str, timeout_s: float) -> Ran:
        """Run code. Over its time it is interrupted, and ended if that does not help."""
        assert self._streams is not None
        self._num_asked += 1
        body = msgspec.json.encode({"number": self._num_asked, "code": code})
        process_tree.thaw(self.box.pid)
        self._streams[1].write(_SIZE.pack(len(body)) + body)
        return await self._watched(self._read(), timeout_s)

    async def _watched(self, reading: Any, timeout_s: float) -> Ran:
        """Wait for an answer while the limits are watched; leave the interpreter standing still, or ended."""
        answer = asyncio.ensure_future(reading)
        watch = asyncio.ensure_future(self.box.watch())
        try:
            await asyncio.wait((answer, self.box.ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and self.box.is_running:
                self.box.interrupt()
                await asyncio.wait((answer, self.box.ended), timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    self.box.end(f"the code did not stop after its time ({timeout_s:g} s)")
            ran = await answer
            self.box.drain()
            process_tree.freeze(self.box.pid)
            return ran
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self.box.end("the interpreter broke off")
            await self.close()
            why = self.box.reason or "it ended itself"
            return Ran(exception=f"The Python session ended, and its variables are lost: {why}", was_ended=True)
        except BaseException:  # the caller gave up: nobody knows what the code has done
            self.box.end("its caller gave up")
            raise
        finally:
            answer.cancel()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await answer
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _read(self) -> Ran:
        """Return the answer to the latest request. Code that knows the socket may write others before it."""
        assert self._streams is not None
        reader = self._streams[0]
        while True:
            (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
            if size > _MAX_REPLY_BYTES:
                raise OSError("an answer that is too large")
            ran = _decode(await reader.readexactly(size))
            if ran.number == self._num_asked:
                return ran

    async def close(self) -> None:
        """End the interpreter, and wait until its process is gone."""
        self.box.end("its session ended")
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
        await asyncio.shield(self.box.ended)
