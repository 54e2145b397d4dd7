"""The gRPC process as part of the server: keys, TLS, deaths, drain, and how it is started."""

from __future__ import annotations

import os
import queue
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from sie.frontend.grpc.methods import METHODS, Method
from sie.proto import message_class
from tests import onnx_models
from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, free_port, paused, run_to_end, start_server
from tests.process.keys import ADMIN, INFER, METRICS, entry, write_keys
from tests.process.test_grpc import call, status, v1, v1_request
from tests.process.test_listen import needs_openssl, pki  # noqa: F401  # a fixture
from tests.process.wire import extents_in_use

FEW = "sie_test-few-0123456789abcdef"
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


def an_input(name: str = "INPUT0") -> triton.InferInput:
    return triton.InferInput(name, [3, 2], "FP32").set_data_from_numpy(ROWS)


def connect(server: Server, **options: Any) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}", **options)


def check_good(client: triton.InferenceServerClient, headers: dict[str, str] | None = None) -> None:
    np.testing.assert_array_equal(client.infer("id", [an_input()], headers=headers).as_numpy("OUTPUT0"), ROWS)


def ask(client: triton.InferenceServerClient, model: str) -> queue.Queue[Any]:
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, [an_input()], lambda result, error: done.put(error or result))
    return done


# --- keys, TLS, administration ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("locked")
    keys = write_keys(home / "keys.toml", entry("few", FEW, ["infer"], requests_per_minute=3))
    onnx_models.write(home / "repository", "m", onnx_models.identity())
    with start_server(
        "--model", "id=stub:tensor", "--model-repository", str(home / "repository"), "--repository-control", "explicit",
        "--api-keys", str(keys), "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "UNAUTHENTICATED"), ({"authorization": "Bearer nope"}, "UNAUTHENTICATED"), ({"x-api-key": "nope"}, "UNAUTHENTICATED"),
        ({"x-api-key": METRICS}, "PERMISSION_DENIED"), ({"x-api-key": INFER}, ""), ({"authorization": f"Bearer {INFER}"}, ""),
    ],
)  # fmt: skip
def test_a_key_opens_the_methods_of_its_scopes(locked: Server, headers: dict[str, str], code: str):
    with connect(locked) as client:
        assert client.is_server_live()
        if not code:
            check_good(client, headers)
            return
        with pytest.raises(InferenceServerException) as caught:
            client.infer("id", [an_input()], headers=headers)
        assert status(caught) == code
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("m", headers=headers)
        assert status(caught) == code


def test_v1_and_streams_tell_a_missing_key_by_the_status(locked: Server):
    with grpc.insecure_channel(f"127.0.0.1:{locked.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            call(channel, "/nvidia.inferenceserver.GRPCService/Infer", v1_request(b"").SerializeToString())
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(STREAM_PATH)(iter([b""]), timeout=60))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        reply = v1("HealthResponse").FromString(
            call(
                channel,
                "/nvidia.inferenceserver.GRPCService/Health",
                v1("HealthRequest", mode="live").SerializeToString(),
            )
        )
        assert reply.health


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.service}/{method.name}")
def test_no_method_answers_without_a_key_but_those_that_are_open(locked: Server, method: Method):
    with grpc.insecure_channel(f"127.0.0.1:{locked.grpc_port}") as channel:
        try:
            if method.is_watch:
                next(channel.unary_stream(method.route.template)(b"", timeout=60))
            elif method.is_stream:
                list(channel.stream_stream(method.route.template)(iter([b""]), timeout=60))
            else:
                call(channel, method.route.template, b"")
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
    is_open = method.name in ("ServerLive", "ServerReady", "Health", "Check", "List", "Watch")
    assert code == (grpc.StatusCode.OK if is_open else grpc.StatusCode.UNAUTHENTICATED)


def test_a_keys_rate_holds(locked: Server):
    with connect(locked) as client:
        for _ in range(3):
            check_good(client, {"x-api-key": FEW})
        with pytest.raises(InferenceServerException) as caught:
            client.infer("id", [an_input()], headers={"x-api-key": FEW})
        assert status(caught) == "RESOURCE_EXHAUSTED"


def test_an_administrator_loads_and_unloads(locked: Server):
    headers = {"x-api-key": ADMIN}
    asking = {"x-api-key": INFER}
    with connect(locked) as client:
        assert not client.is_model_ready("m", headers=asking)
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("m", headers={"x-api-key": INFER})
        assert status(caught) == "PERMISSION_DENIED"
        client.load_model("m", headers=headers)
        assert client.is_model_ready("m", headers=asking)
        np.testing.assert_array_equal(client.infer("m", [an_input("x")], headers=asking).as_numpy("y"), ROWS)
        client.unload_model("m", headers=headers)
        eventually(lambda: not client.is_model_ready("m", headers=asking), "the model's end")
        for refused in ({"config": "{}"}, {"files": {"file:1/model.onnx": b"x"}, "config": "{}"}):
            with pytest.raises(InferenceServerException) as caught:
                client.load_model("m", headers=headers, **refused)
            assert status(caught) == "INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("../m", headers=headers)
        assert status(caught) == "INVALID_ARGUMENT"


def test_no_name_and_an_unknown_kind_of_control_unload_nothing(locked: Server):
    metadata = [("x-api-key", ADMIN)]
    with connect(locked) as client, grpc.insecure_channel(f"127.0.0.1:{locked.grpc_port}") as channel:
        client.load_model("m", headers=dict(metadata))
        client.unload_model("", headers=dict(metadata))
        control = channel.unary_unary("/nvidia.inferenceserver.GRPCService/ModelControl")
        for code, asked in ((1, {}), (5, {"type": 1}), (5, {"model_name": "m", "type": 7})):
            reply = control(v1("ModelControlRequest", **asked).SerializeToString(), timeout=WAIT_S, metadata=metadata)
            assert v1("ModelControlResponse").FromString(reply).request_status.code == code
        found = client.get_model_repository_index(headers={"x-api-key": INFER}).models
        assert [entry.state for entry in found if entry.name == "m"] == ["READY"]


@needs_openssl
def test_tls_is_as_on_http(pki: Path):  # noqa: F811  # the fixture
    def credentials(**shown: bytes) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes(), **shown)

    def live(channel: grpc.Channel) -> bytes:
        with channel:
            return call(channel, "/inference.GRPCInferenceService/ServerLive", b"")

    with start_server(
        "--model", "id=stub:tensor", "--grpc-port", str(free_port()), "--tls-cert", str(pki / "server.pem"),
        "--tls-key", str(pki / "server.key"), "--tls-client-ca", str(pki / "ca.pem"),
    ) as server:  # fmt: skip
        target = f"localhost:{server.grpc_port}"
        shown = credentials(
            private_key=(pki / "client.key").read_bytes(), certificate_chain=(pki / "client.pem").read_bytes()
        )
        assert live(grpc.secure_channel(target, shown)) == b"\x08\x01"
        for refused in (grpc.secure_channel(target, credentials()), grpc.insecure_channel(target)):
            with pytest.raises(grpc.RpcError) as caught:
                live(refused)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


# --- lives and deaths -------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_no_answer_and_the_process_itself_is_started_again():
    with start_server(
        "--model", "id=stub:tensor", "--model", "slow=stub:tensor,latency_ms=100", "--grpc-port", str(free_port())
    ) as server:
        with connect(server) as client:
            with paused(server.worker()):
                answer = ask(client, "slow")
                eventually(lambda: extents_in_use(server.port) == 1, "the request at the worker")
                server.kill_worker()
            np.testing.assert_array_equal(answer.get(timeout=WAIT_S).as_numpy("OUTPUT0"), ROWS)
            check_good(client)
        (dead,) = server.pids("grpc")
        os.kill(dead, signal.SIGKILL)
        eventually(lambda: server.pids("grpc") not in ([], [dead]), "a successor")

        def answers() -> bool:
            with connect(server) as successor:
                try:
                    return successor.is_server_ready()
                except InferenceServerException:
                    return False

        eventually(answers, "an answer of the successor")
        with connect(server) as client:
            check_good(client)


def test_a_drain_finishes_what_was_accepted_and_no_idle_stream_holds_it_up():
    with (
        start_server(
            "--model", "id=stub:tensor", "--model", "slow=stub:tensor,latency_ms=100", "--grpc-port", str(free_port()),
            "--drain-timeout-s", "300", is_stopped=True,
        ) as server,
        connect(server) as client,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):  # fmt: skip
        requests: queue.Queue[bytes] = queue.Queue()
        stream = channel.stream_stream(STREAM_PATH)(iter(requests.get, None))
        requests.put(b"\xff")
        assert next(stream)
        with paused(server.worker()):
            answer = ask(client, "slow")
            eventually(lambda: extents_in_use(server.port) == 1, "the request at the worker")
            server.process.send_signal(signal.SIGTERM)
            server.log_line("SIGTERM")
        np.testing.assert_array_equal(answer.get(timeout=WAIT_S).as_numpy("OUTPUT0"), ROWS)
        with pytest.raises(grpc.RpcError, match="The server is stopping"):
            next(stream)
        assert stream.code() == grpc.StatusCode.UNAVAILABLE, "the client may have sent a request that nobody read"
        assert server.process.wait(WAIT_S) == 0  # well before drain_timeout_s
        assert server.complaints() == []
        requests.put(None)  # type: ignore[arg-type]  # ends the thread that reads them


def health(status: int) -> bytes:
    return message_class("health", "grpc.health.v1.HealthCheckResponse")(status=status).SerializeToString()


def test_who_watches_its_health_hears_of_every_change_until_the_end(tmp_path: Path):
    onnx_models.write(tmp_path, "m", onnx_models.identity())
    request = message_class("health", "grpc.health.v1.HealthCheckRequest")
    with (
        start_server(
            # Its load gives the test time to stop a new worker before it is ready.
            "--model", "slow=stub:tensor,latency_ms=100,load_ms=2000", "--model-repository", str(tmp_path), "--repository-control",
            "explicit", "--grpc-port", str(free_port()), is_stopped=True,
        ) as server,
        connect(server) as client,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):  # fmt: skip
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        every, one, none = (
            watch(request(service=name).SerializeToString(), timeout=2 * WAIT_S)
            for name in ("", "inference.GRPCInferenceService", "nobody")
        )
        assert [next(every), next(one), next(none)] == [health(1), health(1), health(3)]
        listed = message_class("health", "grpc.health.v1.HealthListResponse").FromString(
            call(channel, "/grpc.health.v1.Health/List", b"")
        )
        assert {name: status.status for name, status in listed.statuses.items()} == dict.fromkeys(
            ("", "inference.GRPCInferenceService", "nvidia.inferenceserver.GRPCService", "grpc.health.v1.Health"), 1
        )
        client.load_model("m")  # which changes nothing that they would hear of
        server.kill_worker()
        with paused(server.worker()):
            assert [next(every), next(one)] == [health(2), health(2)]
        assert [next(every), next(one)] == [health(1), health(1)]
        with paused(server.worker()):
            answer = ask(client, "slow")
            eventually(lambda: extents_in_use(server.port) == 1, "the request at the worker")
            server.process.send_signal(signal.SIGTERM)
            server.log_line("SIGTERM")
        assert list(every) == [health(2)]
        assert list(one) == [health(2)]
        assert list(none) == [health(3)]
        np.testing.assert_array_equal(answer.get(timeout=WAIT_S).as_numpy("OUTPUT0"), ROWS)
        assert server.process.wait(WAIT_S) == 0


def test_a_port_that_is_taken_stops_the_start_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        exit_status, text = run_to_end("--model", "id=stub:tensor", "--grpc-port", str(taken.getsockname()[1]))
    assert exit_status == EX_CONFIG
    assert "grpc_host/grpc_port: cannot listen" in text
