"""Runs the load of a chaos row: an open loop over keep-alive connections that keeps a history of every request.

A program of its own, so that what the test does beside it cannot delay it: requests are due at fixed times, and their
latency counts from there. It ends when its standard input does, waits for what is on its way, and writes its history
as one JSON object. It imports nothing of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import random
import re
import sys
import time
from collections import deque
from typing import Any

import msgpack
import numpy as np

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_INSTANCE = re.compile(rb"\r\nx-sie-runtime-instance: (\w+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: (\d+)", re.IGNORECASE)
_CODE = re.compile(rb'"code":"(\w+)"')
_CLOSES = re.compile(rb"\r\nconnection: close", re.IGNORECASE)
_PROBE_S = 0.1
_PROBE_PATHS = ("/healthz", "/readyz")
_STOP_S = 0.05
_REOPEN_S = 0.1


class Ask:
    """One request and what became of it."""

    __slots__ = ("due_s", "ended_s", "expected", "index", "instance", "outcome", "request", "retry_after_s", "sent_s")

    def __init__(self, index: int, due_s: float, request: bytes, expected: list[bytes]) -> None:
        self.index = index
        self.due_s = due_s
        self.request = request
        self.expected = expected
        self.sent_s = 0.0
        self.ended_s = 0.0
        self.outcome = "none"
        self.instance = ""
        self.retry_after_s = 0

    def end(self, outcome: str) -> None:
        self.ended_s = time.monotonic()
        self.outcome = outcome

    def row(self) -> list[Any]:
        return [self.index, self.due_s, self.sent_s, self.ended_s, self.outcome, self.instance, self.retry_after_s]


class Connection(asyncio.Protocol):
    """One keep-alive connection: at most one request on its way."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._ask: Ask | None = None
        self._instance = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, ask: Ask) -> None:
        assert self._transport is not None
        self._ask = ask
        ask.instance = self._instance
        ask.sent_s = time.monotonic()
        self._transport.write(ask.request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[: head_end + 2]
        length = _LENGTH.search(head)
        body_end = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < body_end:
            return
        body, rest = self._buffer[head_end + 4 : body_end], self._buffer[body_end:]
        self._buffer = b""
        ask, self._ask = self._ask, None
        if ask is None or rest:
            self._client.num_unasked += 1
            return
        if match := _INSTANCE.search(head):
            self._instance = ask.instance = match[1].decode()[:12]
        if match := _RETRY_AFTER.search(head):
            ask.retry_after_s = int(match[1])
        ask.end(_outcome(int(head[9:12]), body, ask.expected))
        self._client.on_free(self, closes=_CLOSES.search(head) is not None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ask is not None:
            self._ask.end("closed")
            self._ask = None
        self._client.on_lost(self)


def _outcome(status: int, body: bytes, expected: list[bytes]) -> str:
    if status == 200:
        return "right" if _holds(body, expected) else "wrong"
    code = _CODE.search(body)
    return f"{status} {code[1].decode()}" if code else str(status)


def _holds(body: bytes, expected: list[bytes]) -> bool:
    """Return whether a msgpack reply holds exactly these rows, in this order, as its array data."""
    start = 0
    for row in expected:
        start = body.find(row, start)
        if start < 0:
            return False
        start += len(row)
    return body.count(b"\xc4\x04data") + body.count(b"\xa4data") == len(expected)


class Client:
    """The open loop."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._random = random.Random(config["seed"])
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        self._waiting: deque[Ask] = deque()
        self._num_open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.asks: list[Ask] = []
        self.probes: list[list[Any]] = []
        self.num_unasked = 0

    async def run(self) -> dict[str, Any]:
        stopped = asyncio.Event()
        await self._loop.connect_read_pipe(lambda: _Stdin(stopped), sys.stdin)
        probing = [self._loop.create_task(self._probe(path)) for path in _PROBE_PATHS if self._config["probes"]]
        await self._ask_until(stopped)
        deadline_s = time.monotonic() + self._config["timeout_s"] + self._config["late_s"]
        while any(ask.outcome == "none" for ask in self.asks) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for task in probing:
            task.cancel()
        return {"asks": [ask.row() for ask in self.asks], "probes": self.probes, "num_unasked": self.num_unasked}

    async def _ask_until(self, stopped: asyncio.Event) -> None:
        for _ in range(self._config["min_connections"]):
            self._open()
        while len(self._idle) < self._config["min_connections"]:  # noqa: ASYNC110  # their errors are not events
            await asyncio.sleep(0.005)
        began_s, rate, index = time.monotonic(), self._config["rate"], 0
        print("started", flush=True)
        while True:
            now_s = time.monotonic()
            while began_s + index / rate <= now_s:
                self._fire(index, began_s + index / rate)
                index += 1
            if stopped.is_set():  # after the requests that were due until now: this process may have stood still
                return
            await asyncio.sleep(max(0.0, min(_STOP_S, began_s + index / rate - time.monotonic())))

    def _fire(self, index: int, due_s: float) -> None:
        ask = self._make(index, due_s)
        self.asks.append(ask)
        if self._idle:
            self._idle.popleft().send(ask)
            return
        self._waiting.append(ask)
        self._open()

    def _make(self, index: int, due_s: float) -> Ask:
        config = self._config
        num_items = self._random.randint(1, config["max_items"])
        texts = [f"{config['seed']} {index} {item} ".ljust(config["num_chars"], "x") for item in range(num_items)]
        body = msgpack.packb({"items": [{"text": text} for text in texts]})
        head = (
            f"POST /v1/encode/{config['model']} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/msgpack\r\n"
            f"x-sie-timeout-ms: {int(config['timeout_s'] * 1000)}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return Ask(index, due_s, head.encode() + body, [_row(text, config["dense"]) for text in texts])

    def _open(self) -> None:
        if self._num_open >= self._config["max_connections"]:
            return
        self._num_open += 1
        task = self._loop.create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self), "127.0.0.1", self._config["port"]
            )
        except OSError as error:
            self._num_open -= 1
            if self._waiting:
                self._waiting.popleft().end(f"refused: {type(error).__name__}")
            elif self._num_open < self._config["min_connections"]:
                self._loop.call_later(_REOPEN_S, self._open)
            return
        self.on_free(connection, closes=False)

    def on_free(self, connection: Connection, closes: bool) -> None:
        if closes:
            connection.close()
        elif self._waiting:
            connection.send(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def on_lost(self, connection: Connection) -> None:
        self._num_open -= 1
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        if self._waiting or self._num_open < self._config["min_connections"]:
            self._open()

    async def _probe(self, path: str) -> None:
        """Ask a route of the control plane at fixed times, each time on a connection of its own."""
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        due_s = time.monotonic()
        while True:
            due_s += _PROBE_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            status = 0
            try:
                async with asyncio.timeout(5.0):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._config["port"])
                    writer.write(request)
                    line = await reader.readline()
                    status = int(line.split()[1]) if line else 0
                    writer.close()
            except OSError:
                pass
            self.probes.append([path, due_s, time.monotonic(), status])


class _Stdin(asyncio.Protocol):
    def __init__(self, stopped: asyncio.Event) -> None:
        self._stopped = stopped

    def eof_received(self) -> None:
        self._stopped.set()


def _row(text: str, dense: int) -> bytes:
    """Return the bytes of the vector that a stub must answer."""
    digest = np.frombuffer(hashlib.shake_256(text.encode()).digest(dense), np.int8)
    return (digest.astype(np.float32) / np.float32(127)).tobytes()


async def _main() -> None:
    gc.disable()  # a collection would stall every request that is due meanwhile
    history = await Client(json.loads(sys.argv[1])).run()
    sys.stdout.write(json.dumps(history) + "\n")


if __name__ == "__main__":
    asyncio.run(_main())
