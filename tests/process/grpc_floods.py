"""Floods of gRPC's transport: bytes that cost their sender little and a server much. Run as a process, it sends one.

`python -m tests.process.grpc_floods NAME PORT [CONNECTIONS]` sends until it is killed, and comes back when it is cut.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.frames import Code
from sie.proto import message_class
from tests.unit.frontend.grpc.transport.breaches import window
from tests.unit.frontend.grpc.transport.client_bytes import OPENING, block, data, headers, prefixed

KSERVE: Final = "/inference.GRPCInferenceService"
_CALL: Final = block(path=f"{KSERVE}/ModelInfer")
_STREAM: Final = block(path=f"{KSERVE}/ModelStreamInfer")
_LIVE: Final = block(path=f"{KSERVE}/ServerLive")
_STREAMS: Final = range(1, 2001, 2)
_LONG: Final = (30 << 20).to_bytes(5, "big")
"""The prefix of a message that is too long to end soon."""


def a_request(model: str, num_values: int) -> bytes:
    """Return the bytes of an inference of zeros."""
    request = message_class("kserve", "inference.ModelInferRequest")(model_name=model)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[num_values])
    request.raw_input_contents.append(bytes(4 * num_values))
    encoded: bytes = request.SerializeToString()
    return encoded


def _repeat(one: bytes, num_bytes: int = 1 << 18) -> Iterator[bytes]:
    return itertools.repeat(one * max(1, num_bytes // len(one)))


def _streams(make: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield what `make` returns for each client stream, a quarter of a thousand at a time."""
    for first in range(1, 1 << 30, 500):
        yield b"".join(make(stream) for stream in range(first, first + 500, 2))


def _blocks(entries: bytes) -> Iterator[bytes]:
    return _streams(lambda stream: headers(stream, entries))


def _windows_of_open_streams() -> Iterator[bytes]:
    yield b"".join(headers(stream, _CALL) for stream in _STREAMS)
    yield from _repeat(b"".join(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 65_535 + i}) for i in range(2)))


def _small_parts() -> Iterator[bytes]:
    yield headers(1, _CALL) + data(1, _LONG, 0)
    yield from _repeat(data(1, b"x", 0))


def _padded_parts() -> Iterator[bytes]:
    yield headers(1, _CALL) + data(1, _LONG, 0)
    yield from _repeat(frames.frame(frames.DATA, frames.PADDED, 1, b"\xff" + b"x" + bytes(255)))


def _empty_messages() -> Iterator[bytes]:
    streams = range(1, 65, 2)
    yield b"".join(headers(stream, _STREAM) for stream in streams)
    for stream in itertools.cycle(streams):
        yield data(stream, prefixed(b"") * 13_000, 0)


def _empty_messages_of_a_frame_each() -> Iterator[bytes]:
    yield headers(1, _STREAM)
    yield from _repeat(data(1, prefixed(b""), 0))


def _parts_of_answers() -> Iterator[bytes]:
    """Open windows one byte at a time for many answers that wait."""
    request = prefixed(a_request("id", 4000))
    yield frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0})
    yield b"".join(headers(stream, _CALL) + data(stream, request) for stream in range(1, 401, 2))
    yield from _repeat(b"".join(window(stream, 1) for stream in range(1, 401, 2)))


def _windows_of_answers() -> Iterator[bytes]:
    """Open the windows of many answers that wait by SETTINGS, one byte at a time."""
    request = prefixed(a_request("id", 4000))
    yield frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0})
    yield b"".join(headers(stream, _CALL) + data(stream, request) for stream in range(1, 801, 2))
    for width in itertools.cycle(range(1, 4001)):
        yield frames.settings_frame({frames.INITIAL_WINDOW_SIZE: width})


def _resets() -> Iterator[bytes]:
    request = prefixed(a_request("id", 4))
    return _streams(
        lambda stream: headers(stream, _CALL) + data(stream, request) + frames.reset_frame(stream, Code.CANCEL)
    )


def _calls() -> Iterator[bytes]:
    request = prefixed(a_request("id", 4))
    yield window(0, 1 << 30) + b"".join(headers(stream, _CALL) + data(stream, request) for stream in range(1, 2000, 2))
    for first in range(2001, 1 << 30, 500):
        yield b"".join(headers(stream, _CALL) + data(stream, request) for stream in range(first, first + 500, 2))


def _continuations() -> Iterator[bytes]:
    def make(stream: int) -> bytes:
        parts = [frames.frame(frames.CONTINUATION, 0, stream, b"\x81" * 40)] * 60
        return headers(stream, b"\x81", 0) + b"".join(parts) + frames.frame(frames.CONTINUATION, 4, stream, b"\x81")

    return _streams(make)


def _trickle() -> Iterator[bytes]:
    yield headers(1, _LIVE + b"\x81" * 120_000)[:20_000]
    yield from itertools.repeat(b"\x81")


def _hpack_bomb() -> Iterator[bytes]:
    """Refer to one large entry of the table again and again."""
    yield headers(1, _LIVE + b"\x40\x01a\x7f\xb1\x1e" + b"v" * 4017)
    yield from _blocks(b"\xbe" * 30)


def _leavers() -> Iterator[bytes]:
    """Leave when many calls are under way."""
    yield b"".join(headers(stream, _STREAM) for stream in _STREAMS)
    yield b""


FLOODS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "nothing": lambda: iter([]),
    "HEADERS of one-byte indexes": lambda: _blocks(b"\x81" * 3000),
    "HEADERS of many literals": lambda: _blocks(b"\x00\x01a\x00" * 3900 + b"\x00\x01a\x7f\x81\xf6\x05" + b"v" * 97_000),
    "HEADERS of table sizes": lambda: _blocks(b"\x20" * 120_000),
    "HEADERS of long codes": lambda: _blocks(b"\x00\x01a\xff\xd1\xa8\x07" + b"\xff\xff\xff\xf0" * 30_020),
    "HEADERS of additions": lambda: _blocks(b"\x40\x01a\x01b" * 250),
    "HEADERS that are refused": lambda: _blocks(_LIVE[:40] + b"\x82"),
    "HEADERS of unknown methods": lambda: _streams(lambda stream: headers(stream, block(path="/a/b"), 5)),
    "HPACK bomb": _hpack_bomb,
    "CONTINUATION": _continuations,
    "HEADERS in single bytes": _trickle,
    "SETTINGS of open streams": _windows_of_open_streams,
    "SETTINGS of answers": _windows_of_answers,
    "SETTINGS of many values": lambda: _repeat(frames.frame(frames.SETTINGS, 0, 0, b"\0\x63\0\0\0\0" * 2730)),
    "SETTINGS": lambda: _repeat(frames.settings_frame({})),
    "DATA of one byte": _small_parts,
    "DATA of padding": _padded_parts,
    "empty messages": _empty_messages,
    "empty messages of a frame each": _empty_messages_of_a_frame_each,
    "WINDOW_UPDATE of answers": _parts_of_answers,
    "WINDOW_UPDATE": lambda: _repeat(window(0, 1)),
    "PING": lambda: _repeat(frames.frame(frames.PING, 0, 0, b"12345678")),
    "PRIORITY": lambda: _repeat(frames.frame(frames.PRIORITY, 0, 1, b"12345")),
    "extensions": lambda: _repeat(frames.frame(0x42, 0, 1)),
    "resets": _resets,
    "calls": _calls,
    "connections": lambda: iter([b""]),
    "leavers": _leavers,
}  # fmt: skip


class _Sender:
    """One connection that sends as fast as the server reads, and comes back when it is ended."""

    def __init__(self, name: str, port: int, selector: selectors.BaseSelector) -> None:
        self._name, self._port, self._selector = name, port, selector
        self._rest = memoryview(b"")
        self._connect()

    def _connect(self) -> None:
        self._sock = socket.create_connection(("127.0.0.1", self._port))
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._chunks = itertools.chain([OPENING], FLOODS[self._name]())
        self._rest = memoryview(b"")
        self._selector.register(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def go_on(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._sock.recv(1 << 20):
                raise ConnectionError
            if events & selectors.EVENT_WRITE:
                if not self._rest:
                    self._rest = memoryview(next(self._chunks))
                    if not self._rest:
                        raise ConnectionError
                self._rest = self._rest[self._sock.send(self._rest) :]
        except BlockingIOError:
            pass
        except StopIteration:
            self._selector.modify(self._sock, selectors.EVENT_READ, self)
        except ConnectionError:
            self._selector.unregister(self._sock)
            self._sock.close()
            with contextlib.suppress(ConnectionError):
                self._connect()


def send_flood(name: str, port: int, num_connections: int) -> None:
    """Send a flood over some connections, for as long as this process lives."""
    with selectors.DefaultSelector() as selector:
        for _ in range(num_connections):
            _Sender(name, port, selector)
        print("begun", flush=True)
        while True:
            for key, events in selector.select(1.0):
                key.data.go_on(events)
            if not selector.get_map():
                time.sleep(0.1)


@contextlib.contextmanager
def flood(name: str, port: int, num_connections: int = 1) -> Iterator[None]:
    """Have another process send a flood until the block ends; it has begun when the block does."""
    command = [sys.executable, "-m", "tests.process.grpc_floods", name, str(port), str(num_connections)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield
        assert process.poll() is None, "the flood ended by itself"
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    send_flood(sys.argv[1], int(sys.argv[2]), int((*sys.argv, "1")[3]))
