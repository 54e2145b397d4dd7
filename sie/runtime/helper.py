"""Starts a confined process at the first request, bounds its memory and time, and ends it when it exceeds them.

`sie.runtime.confined` is the other side. A helper belongs to one event loop and answers one request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import threading
from typing import Final

from sie.runtime.confined import SIZE
from sie.runtime.own_modules import run_module

_START_TIMEOUT_S: Final = 30.0
"""A start takes 0.1 s of processor time, and far longer on a host without a free core."""
_OWN_MEMORY_BYTES: Final = 256 << 20
_MEMORY_PER_BYTE: Final = 32
"""Address space for each byte of a request: it is decoded, processed and encoded, at up to four bytes a character."""
_LONG_S: Final = 0.05
"""A longer request continues at the lowest priority. The process ends with it, since no process may raise its priority
again."""
_LOWEST_PRIORITY: Final = 19
_KEPT_VARIABLES: Final = ("TZ", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""A helper gets no other environment variables, because they may contain keys."""


class HelperFailed(Exception):
    """The process ended, or its answer was too large. The next request starts another process."""


class Helper:
    """One confined process that runs a module's `answer`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = asyncio.Lock()
        self._is_low = False
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes, *, timeout_s: float, max_reply_bytes: int) -> bytes:
        """Return the answer. timeout_s excludes the wait for an earlier request and the start of a process.

        Raises TimeoutError. Raises HelperFailed if the process ends, also for lack of memory, or answers more than
        max_reply_bytes.
        """
        async with self._lock:
            try:
                streams = self._streams
                if streams is None or self._has_ended():  # the kernel may have killed it while idle
                    self.close()
                    streams = await self._start()
                self._bound_memory(len(request))
                lowering = asyncio.get_running_loop().call_later(_LONG_S, self._lower_priority)
                try:
                    async with asyncio.timeout(timeout_s):
                        streams[1].write(SIZE.pack(len(request)) + request)
                        await streams[1].drain()
                        return await _read(streams[0], max_reply_bytes)
                finally:
                    lowering.cancel()
                    if self._is_low:
                        self.close()
            except (asyncio.IncompleteReadError, ConnectionError, ProcessLookupError) as error:
                self.close()
                raise HelperFailed("the process ended") from error
            except BaseException:  # a late answer must not be taken for the answer to the next request
                self.close()
                raise

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self._lock.locked()

    def _has_ended(self) -> bool:
        if self._process is None or self._streams is None or self._process.poll() is not None:
            return True
        return self._streams[0].at_eof()  # it is ending: the kernel closes its channel before it can be waited for

    def close(self) -> None:
        """End the process, if there is one. May be called at any time."""
        process, streams = self._process, self._streams
        self._process = self._streams = None
        self._is_low = False
        if streams is not None:
            streams[1].transport.abort()
        if process is not None:
            process.kill()
            threading.Thread(target=process.wait, daemon=True).start()  # freeing its memory may take a while

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._streams = await asyncio.open_unix_connection(sock=self._spawn())
        async with asyncio.timeout(_START_TIMEOUT_S):
            await _read(self._streams[0], 0)
        return self._streams

    def _spawn(self) -> socket.socket:
        """Start the process and return our end of its channel."""
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and modules
                [*run_module("sie.runtime.confined"), self._module, str(os.getpid())],
                stdin=other.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(), process_group=0,
            )  # fmt: skip
        return own

    def _lower_priority(self) -> None:
        assert self._process is not None
        self._is_low = True
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWEST_PRIORITY)

    def _bound_memory(self, request_bytes: int) -> None:
        assert self._process is not None
        _, most = resource.prlimit(self._process.pid, resource.RLIMIT_AS)
        limit = _OWN_MEMORY_BYTES + _MEMORY_PER_BYTE * request_bytes
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.prlimit(self._process.pid, resource.RLIMIT_AS, (limit, most))


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
    if size > max_bytes:
        raise HelperFailed("its answer is too large")
    return await reader.readexactly(size)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    # With a zone by name the C library reads the zone's file only once, before the process gives up files.
    return {"TZ": ":/etc/localtime", **kept}
