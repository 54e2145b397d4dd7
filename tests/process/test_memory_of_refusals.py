"""Refused and abandoned requests leave nothing behind: their bodies are freed at once, not by the garbage collector."""

from __future__ import annotations

import contextlib
import functools
import select
import socket
from collections.abc import Callable, Iterator

import grpc
import msgpack
import pytest

from tests.chaos.cluster import PeakMemory
from tests.process.grpc_floods import a_request
from tests.process.harness import Role, Server, eventually, free_port, start_server
from tests.process.wire import connect, raw_request, read_response

MIB = 1 << 20
BODY_BYTES = 8 * MIB
NUM_REQUESTS = 40
MAX_HELD_BYTES = 64 * MIB
MOST_BYTES = 160 * MIB
"""A request and its copies take three times its size, and the allocator keeps some; all requests together have 320 MiB."""
PACKED = {"content-type": "application/msgpack"}
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "stub/a=stub:dense=16", "--model", "stub/image=stub:dense=16,image", "--model", "id=stub:tensor",
        "--model", "slow=stub:tensor,latency_ms=200", "--frontends", "1", "--grpc-port", str(free_port()),
        "--max-held-bytes", str(MAX_HELD_BYTES), "--body-idle-timeout-s", "300",
    ) as running:  # fmt: skip
        yield running


def send_unfinished_bodies(server: Server) -> None:
    """Send bodies that do not end, of which the server refuses the largest: together they are over `max_held_bytes`."""
    head = raw_request("/v1/encode/stub/a", b"", {**PACKED, "content-length": str(2 * BODY_BYTES)}, length=False)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(NUM_REQUESTS)]
        for sock in socks:
            with contextlib.suppress(ConnectionError):  # refused meanwhile
                sock.sendall(head + bytes(BODY_BYTES))
        most_left = MAX_HELD_BYTES // BODY_BYTES
        eventually(lambda: NUM_REQUESTS - len(readable(socks)) <= most_left, "bodies over the limit are refused")


def readable(socks: list[socket.socket]) -> list[socket.socket]:
    return select.select(socks, [], [], 0)[0]


def send_bad_images(server: Server) -> None:
    """Send images that cannot be decoded."""
    body = msgpack.packb({"items": [{"images": [{"data": bytes(BODY_BYTES), "format": "png"}]}]})
    with connect(server.port) as sock:
        for _ in range(NUM_REQUESTS):
            sock.sendall(raw_request("/v1/encode/stub/image", body, PACKED))
            assert read_response(sock).status == 400


def infer(server: Server, model: str, timeout_s: float, expected: grpc.StatusCode) -> None:
    """Send tensors over gRPC, each of which must fail."""
    request = a_request(model, BODY_BYTES // 4)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for _ in range(NUM_REQUESTS):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(INFER)(request, timeout=timeout_s)
            assert caught.value.code() is expected


@pytest.mark.parametrize(
    ("role", "send"),
    [
        ("frontend", send_unfinished_bodies),
        ("frontend", send_bad_images),
        ("grpc", functools.partial(infer, model="nobody", timeout_s=60, expected=grpc.StatusCode.NOT_FOUND)),
        ("grpc", functools.partial(infer, model="slow", timeout_s=0.05, expected=grpc.StatusCode.DEADLINE_EXCEEDED)),
    ],
    ids=["bodies that do not end", "images that cannot be decoded", "tensors for an unknown model", "calls given up"],
)  # fmt: skip
def test_requests_that_fail_are_freed(server: Server, role: Role, send: Callable[[Server], None]):
    memory = PeakMemory(server, role)
    send(server)
    assert memory.growth_bytes() < MOST_BYTES
