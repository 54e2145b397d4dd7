"""Features of tensor requests beside tensors, over HTTP and gRPC: images, priorities, settings, and their errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from numpy.typing import NDArray
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests import onnx_models
from tests.process.harness import Server, eventually, free_port, paused, start_server
from tests.process.wire import Response, connect, get, post_json, raw_request, send_raw, total, wait_no_extents

HEIGHT, WIDTH = 12, 10
QUEUES = """dynamic_batching {
    priority_levels: 2 default_priority_level: 2
    default_queue_policy { default_timeout_microseconds: 30000000 allow_timeout_override: true }
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("repository")
    onnx_models.write(folder, "nchw", onnx_models.identity(shape=("n", 3, HEIGHT, WIDTH)))
    onnx_models.write(folder, "nhwc", onnx_models.identity("UINT8", ("n", HEIGHT, WIDTH, 3)))
    onnx_models.write(folder, "ranked", onnx_models.identity(), config=QUEUES)
    with start_server(
        "--model-repository", str(folder), "--model", "slow=stub:tensor", "--grpc-port", str(free_port()),
        "--max-images", "4",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture(params=[triton_http, triton_grpc], ids=["http", "grpc"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Triton's clients of both protocols, with `module` beside their own methods."""
    port = server.port if request.param is triton_http else server.grpc_port
    with request.param.InferenceServerClient(f"127.0.0.1:{port}") as opened:
        opened.module = request.param
        yield opened


def pictures(count: int) -> tuple[NDArray[np.uint8], list[bytes]]:
    """Return (n, h, w, 3) pixels in BGR, as a model sees them, and the files that hold them."""
    values = np.random.default_rng(count).integers(0, 256, (count, HEIGHT, WIDTH, 3), np.uint8)
    files: list[bytes] = []
    for one in values:
        file = io.BytesIO()
        Image.fromarray(one[..., ::-1]).save(file, "PNG")
        files.append(file.getvalue())
    return values, files


def images(client: Any, files: list[bytes]) -> Any:
    return client.module.InferInput("x", [len(files)], "BYTES").set_data_from_numpy(np.array(files, np.object_))


def rows(client: Any) -> Any:
    return client.module.InferInput("x", [3, 2], "FP32").set_data_from_numpy(np.ones((3, 2), np.float32))


def check_good(client: Any) -> None:
    assert client.infer("ranked", [rows(client)]).as_numpy("y").shape == (3, 2)


def error(response: Response, status: int = 400) -> str:
    assert response.status == status, response.body
    return json.loads(response.body)["error"]


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_images_are_tensors_of_the_models_own_layout(client: Any, count: int):
    values, files = pictures(count)
    np.testing.assert_array_equal(client.infer("nhwc", [images(client, files)]).as_numpy("y"), values)
    found = client.infer("nchw", [images(client, files)]).as_numpy("y")
    np.testing.assert_array_equal(found, np.moveaxis(values, 3, 1).astype(np.float32))


def test_an_image_may_be_the_whole_body_or_base64(server: Server):
    values, (file,) = pictures(1)
    for shown in (base64.b64encode(file).decode(), {"b64": base64.b64encode(file).decode()}):
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [shown]}]}
        answer = json.loads(post_json(server.port, "/v2/models/nhwc/infer", body).body)
        assert answer["outputs"][0]["data"] == values.ravel().tolist()
    headers = {"inference-header-content-length": "0"}
    answer = send_raw(server.port, raw_request("/v2/models/nhwc/infer", file, headers))
    assert answer.body[int(answer.headers["inference-header-content-length"]) :] == values.tobytes()
    head = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES"}]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = send_raw(server.port, raw_request("/v2/models/nhwc/infer", head + file, headers))
    assert json.loads(answer.body)["outputs"][0]["shape"] == [1, HEIGHT, WIDTH, 3]


@pytest.mark.parametrize("file", [b"", b"text", b"\xff\xd8\xff\xe0 no jpeg", b"\x89PNG\r\n\x1a\n" + bytes(60)])
def test_what_is_no_image_is_refused_and_the_next_request_served(client: Any, file: bytes):
    _, files = pictures(1)
    with pytest.raises(InferenceServerException, match=r"not a decodable image - at `inputs\[name=x\].data\[1\]`"):
        client.infer("nhwc", [images(client, [*files, file])])
    check_good(client)


def test_too_many_images_and_other_shapes_are_refused(client: Any):
    _, files = pictures(5)
    with pytest.raises(InferenceServerException, match=r"max_images \(4\)"):
        client.infer("nhwc", [images(client, files)])
    given = client.module.InferInput("x", [2, 1], "BYTES").set_data_from_numpy(np.array(files[:2], np.object_)[:, None])
    with pytest.raises(InferenceServerException, match=r"Expected \[-1\], got \[2, 1\]"):
        client.infer("nhwc", [given])
    with pytest.raises(InferenceServerException, match="data-type is 'BYTES'"):
        client.infer("ranked", [images(client, files[:1])])
    check_good(client)


@pytest.mark.parametrize("module", [triton_http_aio, triton_grpc_aio], ids=["http", "grpc"])
def test_the_clients_of_asyncio_send_images_and_priorities(server: Server, module: Any):
    values, files = pictures(2)
    given = module.InferInput("x", [2], "BYTES").set_data_from_numpy(np.array(files, np.object_))
    ones = module.InferInput("x", [1, 2], "FP32").set_data_from_numpy(np.ones((1, 2), np.float32))

    async def ask() -> tuple[NDArray[Any], NDArray[Any], dict[str, Any]]:
        port = server.port if module is triton_http_aio else server.grpc_port
        async with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            found = await client.infer("nhwc", [given])
            first = await client.infer("ranked", [ones], priority=1, timeout=20_000_000)
            with pytest.raises(InferenceServerException, match="'priority' is 3"):
                await client.infer("ranked", [ones], priority=3)
            return found.as_numpy("y"), first.as_numpy("y"), await client.get_log_settings()

    found, first, log = asyncio.run(ask())
    np.testing.assert_array_equal(found, values)
    assert first.tolist() == [[1, 1]]
    assert log


# --- priorities -------------------------------------------------------------------------------------------------------


def test_a_priority_and_a_timeout_are_the_queues(client: Any):
    for priority in (0, 1, 2):
        assert client.infer("ranked", [rows(client)], priority=priority).as_numpy("y").shape == (3, 2)
    with pytest.raises(InferenceServerException, match="'priority' is 3, and model 'ranked' has 2 levels"):
        client.infer("ranked", [rows(client)], priority=3)
    with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
        client.infer("ranked", [rows(client)], timeout=1)
    assert caught.value.status() in ("503", "StatusCode.UNAVAILABLE")
    config = client.get_model_config("ranked")
    batching = config["dynamic_batching"] if isinstance(config, dict) else config.config.dynamic_batching
    levels = batching["priority_levels"] if isinstance(batching, dict) else batching.priority_levels
    assert levels == 2
    check_good(client)


# --- settings and regions ---------------------------------------------------------------------------------------------


def test_settings_can_be_read_and_are_not_changed(client: Any):
    trace = client.get_trace_settings("ranked")
    assert list(trace["trace_level"] if isinstance(trace, dict) else trace.settings["trace_level"].value) == ["OFF"]
    log = client.get_log_settings()
    assert log["log_error"] if isinstance(log, dict) else log.settings["log_error"].bool_param
    client.update_trace_settings(settings={"trace_level": ["OFF"], "trace_rate": None, "trace_count": "-1"})
    client.update_log_settings({"log_error": True, "log_format": "default"})
    for settings in ({"trace_level": ["TIMESTAMPS"]}, {"trace_rate": "1"}, {"unknown": "1"}):
        with pytest.raises(InferenceServerException):
            client.update_trace_settings(settings=settings)
    for settings in ({"log_error": False}, {"log_verbose_level": 3}, {"unknown": True}):
        with pytest.raises(InferenceServerException):
            client.update_log_settings(settings)
    with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
        client.get_trace_settings("nobody")
    check_good(client)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/systemsharedmemory/region/r/status", 404), ("POST", "/v2/cudasharedmemory/region/r/unregister", 200),
        ("POST", "/v2/systemsharedmemory/region/r/register", 400), ("GET", "/v2/cudasharedmemory/region/r/register", 405),
        ("POST", "/v2/systemsharedmemory/region/r", 404), ("POST", "/v2/repository/own/index", 200),
        ("POST", "/v2/repository/own/models/m/load", 400), ("POST", "/v2/repository/own/other", 404),
        ("GET", "/v2/repository/own/index", 405), ("POST", "/v2/trace/setting", 200), ("PUT", "/v2/logging", 405),
        ("POST", "/v2/models/ranked/explode", 404), ("POST", "/v2/models/ranked/versions/1/explode", 404),
        ("POST", "/v2/models/ranked/infer/", 404), ("PUT", "/v2/models/ranked/versions/x", 404),
        ("POST", "/v2/models/ranked", 405), ("POST", "/v2/models/ranked/versions/1", 405), ("POST", "/v2/models/nobody", 405),
        ("GET", "/v2/models/nobody/stats", 400), ("GET", "/v2/models/ranked/versions/7/stats", 400),
        ("GET", "/v2/models/ranked/versions/001/stats", 200), ("GET", "/api/profile?cmd=start", 400),
        ("GET", "/api/sharedmemorycontrol/status", 400), ("POST", "/api/infer/ranked/1/x", 400),
        ("POST", "/api/sharedmemorycontrol/status", 405), ("GET", "/api/sharedmemorycontrol/register/r//k/0/64", 405),
        ("POST", "/api/sharedmemorycontrol/register/r//k/0/64", 400), ("POST", "/api/sharedmemorycontrol/explode", 400),
    ],
)  # fmt: skip
def test_what_there_is_not_is_told_as_the_protocols_do(server: Server, method: str, path: str, status: int):
    response = send_raw(server.port, raw_request(path, b"", {}, method=method))
    assert response.status == status
    if path.startswith("/v2") and status >= 400:
        assert error(response, status)
    if path.endswith(("?cmd=start", "/api/sharedmemorycontrol/status", "/64")) and status == 400:
        assert "code: UNSUPPORTED" in response.headers["nv-status"]
    elif path.startswith("/api"):
        assert "nv-status" not in response.headers


def test_models_that_were_never_loaded_are_bare_names(tmp_path: Path):
    onnx_models.write(tmp_path, "m", onnx_models.identity())
    onnx_models.write(tmp_path, "m", onnx_models.identity(), "2", "version_policy { all {} }")
    with (
        start_server("--model-repository", str(tmp_path), "--repository-control", "explicit") as server,
        triton_http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60) as client,
    ):
        assert client.get_model_repository_index() == [{"name": "m"}]
        assert get(server.port, "/api/health/ready").status == 200
        client.load_model("m")
        for parameters in ({"unload_dependents": True}, {"zz": 1}, {"config": {}}):
            body = json.dumps({"parameters": parameters}).encode()
            response = send_raw(server.port, raw_request("/v2/repository/models/m/load", body, {"host": "127.0.0.1"}))
            assert f"parameter '{next(iter(parameters))}'" in error(response, 400)
        assert [found["state"] for found in client.get_model_repository_index()] == ["READY", "READY"]
        client.unload_model("m")
        gone = [{"name": "m", "version": n, "state": "UNAVAILABLE", "reason": "unloaded"} for n in "12"]
        eventually(lambda: client.get_model_repository_index() == gone, "the end of both versions")
        for ask in (client.get_model_metadata, client.get_model_config):
            with pytest.raises(InferenceServerException, match="'m' version 2 is not loaded"):
                ask("m", "2")
        body = json.dumps({"ready": True}).encode()
        assert send_raw(server.port, raw_request("/v2/repository/index", body, {})).body == b"[]"


# --- clients that leave -----------------------------------------------------------------------------------------------


def test_a_client_that_left_is_counted_the_same_over_both_protocols(server: Server):
    def count(status: str) -> float:
        return total(server.port, "sie_requests_total", model="slow", endpoint="infer", status=status)

    data = np.ones((1, 2), np.float32)
    cancelled, errors = count("cancelled"), count("error")
    given = triton_grpc.InferInput("INPUT0", [1, 2], "FP32").set_data_from_numpy(data)
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client, paused(server.worker()):
        call = client.async_infer("slow", [given], lambda **_: None)
        eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") >= 1, "work of gRPC")
        call.cancel()
        eventually(lambda: count("cancelled") == cancelled + 1, "the call that was cancelled")
    wait_no_extents(server.port)
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    with paused(server.worker()):
        with connect(server.port) as sock:
            sock.sendall(raw_request("/v2/models/slow/infer", json.dumps(body).encode(), {}))
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") >= 1, "work of HTTP")
        eventually(lambda: count("cancelled") == cancelled + 2, "the client that closed its connection")
    assert count("error") == errors
    figures = json.loads(get(server.port, "/v2/models/slow/stats").body)["model_stats"][0]["inference_stats"]
    assert figures["fail"]["count"] == cancelled + errors + 2
    assert figures["fail"]["ns"] > 0
    assert figures["success"] == {"count": 0, "ns": 0}


@pytest.mark.parametrize(
    ("header", "path"),
    [("inference-header-content-length", "/v2/models/ranked/infer"), ("content-encoding", "/v2/models/ranked/infer"),
     ("nv-inferrequest", "/api/infer/ranked")],
)  # fmt: skip
def test_a_header_that_is_no_text_is_refused(server: Server, header: str, path: str):
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    request = raw_request(path, json.dumps(body).encode(), {header: "HERE"}).replace(b"HERE", b"\xff\xfe")
    response = send_raw(server.port, request)
    assert response.status == 400
    assert "not ASCII" in response.body.decode() + response.headers.get("nv-status", "")
