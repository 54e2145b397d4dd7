"""The TensorRT Inference Server v1 API on a running server, with the clients of both generations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from sie.proto import message_class
from tests import onnx_models
from tests.process.harness import Server, start_server
from tests.process.wire import Response, raw_request, send_raw, wait_no_extents

BATCHED = 'max_batch_size: 8\ninput { name: "x" data_type: TYPE_FP32 dims: 2 }\noutput { name: "y" data_type: TYPE_FP32 dims: 2 }'
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
NEW = 'batch_size: 3 id: 7 input { name: "x" } output { name: "y" }'
OLD = 'batch_size: 3 input { name: "x" byte_size: 8 } output { name: "y" byte_size: 8 }'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("repository")
    onnx_models.write(folder, "m", onnx_models.identity(), "2", BATCHED)
    onnx_models.write(folder, "strings", onnx_models.identity("BYTES", ("n",)), config="max_batch_size: 0")
    onnx_models.write(
        folder, "labelled", onnx_models.identity(), config=BATCHED[:-1] + ' label_filename: "labels.txt" }'
    )
    (folder / "labelled" / "labels.txt").write_text("cold\nwarm\n")
    with start_server("--model-repository", str(folder)) as running:
        yield running
        wait_no_extents(running.port)


def message(name: str) -> Any:
    return message_class("trtis", f"nvidia.inferenceserver.{name}")


def call(server: Server, path: str, header: str = "", body: bytes = b"", method: str = "POST") -> Response:
    headers = {"host": "127.0.0.1", **({"NV-InferRequest": header} if header else {})}
    return send_raw(server.port, raw_request(path, body, headers, method=method))


def status_of(response: Response) -> Any:
    return text_format.Parse(response.headers["nv-status"], message("RequestStatus")())


def check_good(server: Server) -> None:
    response = call(server, "/api/infer/m?format=binary", NEW, ROWS.tobytes())
    assert response.status == 200
    assert response.body[:24] == ROWS.tobytes()


@pytest.mark.parametrize("path", ["/api/infer/m", "/api/infer/m/2", "/api/infer/m?format=binary"])
def test_a_request_of_the_second_generation(server: Server, path: str):
    response = call(server, path, NEW, ROWS.tobytes())
    assert (response.status, status_of(response).code, status_of(response).server_id) == (200, 1, "inference:0")
    header = text_format.Parse(response.headers["nv-inferresponse"], message("InferResponseHeader")())
    assert (header.model_name, header.model_version, header.batch_size, header.id) == ("m", 2, 3, 7)
    assert (list(header.output[0].raw.dims), header.output[0].raw.batch_byte_size) == ([2], 24)
    assert response.body[:24] == ROWS.tobytes()
    trailer = response.body[24:]
    read = message("InferResponseHeader")
    assert header == (read.FromString(trailer) if "binary" in path else text_format.Parse(trailer.decode(), read()))


def test_a_request_of_the_first_generation(server: Server):
    response = call(server, "/api/infer/m", OLD, ROWS.tobytes())
    assert response.body[:24] == ROWS.tobytes()
    header = text_format.Parse(response.body[24:].decode(), message("InferResponseHeaderOfFirstGeneration")())
    assert header.output[0].raw.byte_size == 8


def test_strings_and_classes(server: Server):
    data = b"\2\0\0\0ab\0\0\0\0"
    response = call(
        server,
        "/api/infer/strings",
        'batch_size: 1 input { name: "x" dims: 2 batch_byte_size: 10 } output { name: "y" }',
        data,
    )
    assert response.body[:10] == data
    asks = 'batch_size: 3 input { name: "x" } output { name: "y" cls { count: 1 } }'
    response = call(server, "/api/infer/labelled", asks, ROWS.tobytes())
    header = text_format.Parse(response.headers["nv-inferresponse"], message("InferResponseHeader")())
    assert [(row.cls[0].idx, row.cls[0].value, row.cls[0].label) for row in header.output[0].batch_classes] == [
        (1, 1.0, "warm"), (1, 3.0, "warm"), (1, 5.0, "warm"),
    ]  # fmt: skip
    assert response.body.startswith(b"model_name")


def test_health(server: Server):
    for mode in ("live", "ready"):
        response = call(server, f"/api/health/{mode}", method="GET")
        assert (response.status, response.body, status_of(response).code) == (200, b"", 1)


@pytest.mark.parametrize("form", ["text", "binary", "json"])
def test_the_status_has_what_a_client_needs_to_ask(server: Server, form: str):
    response = call(server, f"/api/status/m?format={form}", method="GET")
    assert (response.status, status_of(response).code) == (200, 1)
    if form == "json":
        assert '"ready_state": "MODEL_READY"' in response.body.decode()
        return
    read = message("ServerStatus")
    status = read.FromString(response.body) if form == "binary" else text_format.Parse(response.body.decode(), read())
    assert list(status.model_status) == ["m"]
    model = status.model_status["m"]
    assert (model.config.max_batch_size, model.config.input[0].name, list(model.config.input[0].dims)) == (8, "x", [2])
    assert model.version_status[2].ready_state == 1
    assert status.ready_state == 2
    everything = text_format.Parse(call(server, "/api/status", method="GET").body.decode(), read())
    assert sorted(everything.model_status) == ["labelled", "m", "strings"]


def test_numbers_of_requests_grow(server: Server):
    first, second = (status_of(call(server, "/api/health/live", method="GET")).request_id for _ in range(2))
    assert second > first > 0


@pytest.mark.parametrize(
    ("path", "header", "body", "code", "text"),
    [
        ("/api/infer/m", NEW, ROWS.tobytes()[:-4], 5, "expecting 4 bytes for model 'm'"),
        ("/api/infer/m", NEW, ROWS.tobytes() + b"x", 5, "unexpected additional input data for model 'm'"),
        ("/api/infer/m", NEW.replace("3", "9"), bytes(72), 5, "batch-size must be <= 8"),
        ("/api/infer/m", "", ROWS.tobytes(), 5, "batch-size must be >= 1"),
        ("/api/infer/m", "nonsense {", ROWS.tobytes(), 5, "unable to parse"),
        ("/api/infer/m", NEW.replace('"x"', '"z"'), ROWS.tobytes(), 5, "unexpected inference input 'z'"),
        ("/api/infer/m", NEW.replace('"y"', '"z"'), ROWS.tobytes(), 5, "unexpected inference output 'z'"),
        ("/api/infer/m", NEW.replace('"x"', '"x" dims: 4611686018427387904'), b"", 5, "unexpected shape"),
        ("/api/infer/nobody", NEW, ROWS.tobytes(), 6, "unknown model: 'nobody'"),
        ("/api/infer/m/9", NEW, ROWS.tobytes(), 6, "version 9 is not found"),
        ("/api/infer/m/99999999999999999999", NEW, ROWS.tobytes(), 6, "version 99999999999999999999 is not found"),
        ("/api/infer/m", OLD.replace('"y" byte_size: 8', '"y"'), ROWS.tobytes(), 5, "unexpected size 0 for output 'y', expecting 8"),
        ("/api/status/nobody", "", b"", 5, "no status available for unknown model 'nobody'"),
        ("/api/modelcontrol/load/m", "", b"", 6, "explicit model load / unload is not allowed"),
        ("/api/sharedmemorycontrol/unregisterall", "", b"", 7, "shared memory is not supported"),
    ],
)  # fmt: skip
def test_every_failure_is_a_400_with_its_code(
    server: Server, path: str, header: str, body: bytes, code: int, text: str
):
    response = call(server, path, header, body, "GET" if path.startswith("/api/status") else "POST")
    assert (response.status, response.body) == (400, b"")
    status = status_of(response)
    assert (status.code, status.server_id) == (code, "inference:0")
    assert text in status.msg
    check_good(server)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (NEW.replace("3", "9"), "id: 7"), (NEW + ' output { name: "y" }', "id: 7"), (NEW + " cls {", ""),
        (NEW.replace('"y"', '"y" cls { }'), "id: 7"), (NEW.replace('"x"', '"x" shared_memory { name: "r" }'), "id: 7"),
        (OLD.replace("3", "9"), ""), ("batch_size: 1 id: 18446744073709551615", "id: 18446744073709551615"),
    ],
)  # fmt: skip
def test_a_failed_request_is_told_its_id_whatever_is_wrong_with_it(server: Server, header: str, expected: str):
    response = call(server, "/api/infer/m", header, ROWS.tobytes())
    assert (response.status, status_of(response).code) == (400, 5)
    assert (response.headers["nv-inferresponse"], response.headers["content-type"]) == (
        expected,
        "application/octet-stream",
    )


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/infer/m", 405), ("POST", "/api/status", 405), ("POST", "/api/infer/m/x", 400),
        ("POST", "/api/infer/", 400), ("GET", "/api/health/", 400),
    ],
)  # fmt: skip
def test_what_is_no_route_has_no_status_line(server: Server, method: str, path: str, expected: int):
    response = call(server, path, method=method)
    assert (response.status, response.body, "nv-status" in response.headers) == (expected, b"", False)


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/chat"), ("GET", "/api/tags"), ("GET", "/api/")])
def test_a_client_of_ollama_is_told_what_to_use_instead(server: Server, method: str, path: str):
    response = call(server, path, method=method)
    assert (response.status, response.headers["content-type"]) == (404, "application/json")
    assert "/v1/chat/completions" in response.json()["error"]


def test_a_header_cannot_smuggle_lines_into_the_answer(server: Server):
    response = call(server, "/api/infer/m", 'batch_size: 1 input { name: "a\\r\\nX-Evil: 1" }', b"")
    assert "x-evil" not in response.headers
    assert re.search(r"a\\r\\nX-Evil", response.headers["nv-status"])


def test_models_are_controlled_on_request(tmp_path: Path):
    onnx_models.write(tmp_path, "m", onnx_models.identity(), "2", BATCHED)
    with start_server("--model-repository", str(tmp_path), "--repository-control", "explicit") as running:
        assert call(running, "/api/health/ready", method="GET").status == 200
        assert status_of(call(running, "/api/infer/m", NEW, ROWS.tobytes())).code == 6
        assert status_of(call(running, "/api/modelcontrol/load/m")).code == 1
        check_good(running)
        assert status_of(call(running, "/api/modelcontrol/load/nobody")).code == 5
        assert status_of(call(running, "/api/modelcontrol/unload/m")).code == 1
