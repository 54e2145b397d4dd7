"""Clients that leave at any time, over gRPC and HTTP: afterwards no extent is in use, and the next request is answered."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator

import grpc
import pytest

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.frames import Code
from sie.proto import message_class
from sie.values.bytes_tensor import frame_elements
from tests.process.harness import WAIT_S, Server, free_port, start_server
from tests.process.test_grpc import v1
from tests.process.wire import connect, encode, raw_request, wait_no_extents
from tests.unit.frontend.grpc.transport.client_bytes import OPENING, block, data, headers, prefixed

KSERVE = "/inference.GRPCInferenceService/ModelInfer"
TRTIS = "/nvidia.inferenceserver.GRPCService/Infer"
NUM_WAVES = 100
NUM_CALLS = 40
"""Of a wave, which has a connection of its own."""
WAVE_S = 0.02
"""About what a wave takes: it is left after any part of this."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "id=stub:tensor", "--model", "dense=stub:dense=8", "--model", "gen=stub:generate",
        "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running


def kserve_request(model: str, name: str, datatype: str, num: int, content: bytes) -> bytes:
    request = message_class("kserve", "inference.ModelInferRequest")(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=[num])
    request.raw_input_contents.append(content)
    return request.SerializeToString()


def v1_request() -> bytes:
    header = v1(
        "InferRequestHeader", batch_size=1, input=[{"name": "INPUT0", "dims": [4]}], output=[{"name": "OUTPUT0"}]
    )
    return v1(
        "InferRequest", model_name="id", meta_data=header.SerializeToString(), raw_input=[bytes(16)]
    ).SerializeToString()


def leave_grpc(server: Server, calls: list[tuple[bytes, bytes]], rng: random.Random) -> None:
    """Make calls on one connection, and reset each at a time of its own; cut the connection with the last one."""
    with socket.create_connection(("127.0.0.1", server.grpc_port)) as sock:
        streams = range(1, 2 * NUM_CALLS, 2)
        asked = [rng.choice(calls) for _ in streams]
        sock.sendall(OPENING + b"".join(
            headers(stream, path) + data(stream, prefixed(request))
            for stream, (path, request) in zip(streams, asked, strict=True)
        ))  # fmt: skip
        for stream in rng.sample(streams, NUM_CALLS):
            with contextlib.suppress(ConnectionError):
                sock.sendall(frames.reset_frame(stream, Code.CANCEL))
            time.sleep(rng.random() * 2 * WAVE_S / NUM_CALLS)


def leave_http(server: Server, requests: list[bytes], rng: random.Random) -> None:
    """Send a request on a connection, and close that at any time."""
    with connect(server.port) as sock:
        sock.sendall(rng.choice(requests))
        time.sleep(rng.random() * WAVE_S / 4)


def test_clients_that_leave_at_any_time_leave_no_extent_in_use(server: Server):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = bytes(frame_elements([b"some text"]))
    infer = kserve_request("id", "INPUT0", "FP32", 4, bytes(16))
    calls = [
        (block(path=KSERVE), infer),
        (block(path=KSERVE), kserve_request("dense", "text", "BYTES", 1, text)),
        (block(path=KSERVE), kserve_request("gen", "text_input", "BYTES", 1, text)),
        (block(path=TRTIS), v1_request()),
    ]
    requests = [
        raw_request(path, json.dumps(body).encode())
        for path, body in (
            ("/v1/encode/dense", {"items": [{"text": "some text"}] * 20}),
            ("/v1/completions", {"model": "gen", "prompt": "some text", "stream": True}),
            ("/v2/models/id/infer", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}),
        )
    ]
    for _ in range(NUM_WAVES):
        leave_grpc(server, calls, rng)
        leave_http(server, requests, rng)
    wait_no_extents(server.port)
    assert encode(server.port, "dense", ["a"]).status == 200
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        assert channel.unary_unary(KSERVE)(infer, timeout=WAIT_S)
