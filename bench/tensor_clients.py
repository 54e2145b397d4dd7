"""Provides the clients of the tensor benchmark, the same for every contender.

They keep connections busy and count answers.

HTTP is spoken over plain sockets, so that the client takes little of the cores that it shares with the servers; gRPC
through grpc.aio with messages as bytes, which is what a Python client pays at least.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import time
from typing import Final

import grpc
import grpc.aio
import numpy as np

from sie.proto import message_class

MODEL: Final = "identity"
METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
_TIMEOUT_S: Final = 60.0


def infer_message(num_values: int) -> bytes:
    """Return a ModelInferRequest of FP32 [num_values] in raw contents."""
    request = message_class("kserve", "inference.ModelInferRequest")(model_name=MODEL)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[num_values])
    request.outputs.add(name="OUTPUT0")
    request.raw_input_contents.append(np.arange(num_values, dtype="<f4").tobytes())
    message: bytes = request.SerializeToString()
    return message


def infer_request(num_values: int) -> bytes:
    """Return a KServe v2 request of FP32 [num_values] as binary data, the answer's, too."""
    tail = np.arange(num_values, dtype="<f4").tobytes()
    tensor = {
        "name": "INPUT0",
        "shape": [num_values],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(tail)},
    }
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    path, header = f"/v2/models/{MODEL}/infer", f"Inference-Header-Content-Length: {len(head)}\r\n"
    return _request(path, header, len(head) + len(tail)) + head + tail


def plain_request(num_values: int) -> bytes:
    """Return a request whose body is the same tensor and nothing else."""
    return _request("/", "", 4 * num_values) + np.arange(num_values, dtype="<f4").tobytes()


def _request(path: str, header: str, nbytes: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}Content-Length: {nbytes}\r\n\r\n".encode()


def run_http(port: int, request: bytes, num_connections: int, seconds: float) -> list[float]:
    """Keep connections busy with one request each; return the latency of every answer in seconds.

    Raises RuntimeError for an answer that is no 200 or does not end in what the request ends in.
    """
    tail, latencies = request[-64:], list[float]()
    socks = {sock.fileno(): sock for sock in [_connect(port) for _ in range(num_connections)]}
    poll = select.epoll()
    for fd in socks:
        poll.register(fd, select.EPOLLIN)
    sent, kept = dict.fromkeys(socks, 0.0), dict.fromkeys(socks, b"")
    end = time.perf_counter() + seconds
    for fd, sock in socks.items():
        sent[fd] = time.perf_counter()
        sock.sendall(request)
    busy = num_connections
    while busy:
        for fd, _ in poll.poll(_TIMEOUT_S):
            data = kept[fd] + socks[fd].recv(65536)
            if not _is_whole(data):
                kept[fd] = data
                continue
            if not data.startswith(b"HTTP/1.1 200") or not data.endswith(tail):
                raise RuntimeError(f"a wrong answer: {data[:500]!r}")
            kept[fd], now = b"", time.perf_counter()
            latencies.append(now - sent[fd])
            if now < end:
                sent[fd] = now
                socks[fd].sendall(request)
            else:
                busy -= 1
    poll.close()
    for sock in socks.values():
        sock.close()
    return latencies


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _is_whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    found = _LENGTH.search(data, 0, end + 2) if end > 0 else None
    return found is not None and len(data) >= end + 4 + int(found[1])


class Carrier:
    """One connection that large tensors go over and come back, one at a time."""

    def __init__(self, port: int, request: bytes) -> None:
        self._sock = _connect(port)
        self._request = request
        self._buffer = memoryview(bytearray(len(request) + 65536))

    def run(self) -> float:
        """Send the request, read the answer and return the seconds that it took. Raises as `run_http`."""
        began = time.perf_counter()
        self._sock.sendall(self._request)
        num_read, wanted = 0, len(self._buffer)
        while num_read < wanted:
            count = self._sock.recv_into(self._buffer[num_read:])
            if not count:
                raise RuntimeError(
                    f"the answer ended after {num_read} bytes: {bytes(self._buffer[: min(num_read, 500)])!r}"
                )
            num_read += count
            if wanted == len(self._buffer):
                head = bytes(self._buffer[: min(num_read, 65536)])
                end = head.find(b"\r\n\r\n")
                found = _LENGTH.search(head, 0, end + 2) if end > 0 else None
                wanted = end + 4 + int(found[1]) if found is not None else wanted
        took = time.perf_counter() - began
        if (
            bytes(self._buffer[:12]) != b"HTTP/1.1 200"
            or self._buffer[wanted - 65536 : wanted] != self._request[-65536:]
        ):
            raise RuntimeError(f"a wrong answer: {bytes(self._buffer[:500])!r}")
        return took

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


async def run_grpc(port: int, message: bytes, num_connections: int, seconds: float) -> list[float]:
    """Do as `run_http` over gRPC."""
    latencies: list[float] = []

    async def ask(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], end: float) -> None:
        while (began := time.perf_counter()) < end:
            answer = await call(message, timeout=_TIMEOUT_S)
            if not answer.endswith(message[-64:]):
                raise RuntimeError(f"a wrong answer: {answer[:500]!r}")
            latencies.append(time.perf_counter() - began)

    target = f"127.0.0.1:{port}"
    channels = [grpc.aio.insecure_channel(target, options=_UNLIMITED) for _ in range(num_connections)]
    calls = [channel.unary_unary(METHOD) for channel in channels]
    for call in calls:
        await call(message, timeout=_TIMEOUT_S)
    latencies.clear()
    end = time.perf_counter() + seconds
    await asyncio.gather(*[ask(call, end) for call in calls])
    for channel in channels:
        await channel.close()
    return latencies
