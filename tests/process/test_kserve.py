"""The KServe v2 REST dialect on a running server: Triton's own clients unmodified, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, shared_memory

from tests import onnx_models
from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.wire import Response, get, raw_request, send_raw, total, wait_no_extents

BATCHED = 'max_batch_size: 8\ninput { name: "x" data_type: TYPE_FP32 dims: 2 }\noutput { name: "y" data_type: TYPE_FP32 dims: 2 }'
LABELLED = BATCHED.replace("dims: 2 }", 'dims: 2 label_filename: "labels.txt" }', 2).replace(
    ' label_filename: "labels.txt"', "", 1
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for datatype in ("FP32", "FP16", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL",
                     "BYTES"):  # fmt: skip
        onnx_models.write(
            folder, f"is_{datatype}", onnx_models.identity(datatype, ("n", "m")), config="max_batch_size: 0"
        )
    onnx_models.write(folder, "batched", onnx_models.identity(), "1")
    onnx_models.write(folder, "batched", onnx_models.identity(), "2", BATCHED + "\nversion_policy { all {} }")
    onnx_models.write(folder, "labelled", onnx_models.identity(), config=LABELLED)
    (folder / "labelled" / "labels.txt").write_text("cold\nwarm\n")
    onnx_models.write(folder, "affine", onnx_models.affine(), config="dynamic_batching { }")
    onnx_models.write(folder, "row_softmax", onnx_models.softmax_over_rows("batch"))
    onnx_models.write(folder, "one_text", onnx_models.identity("BYTES", (1,)), config="max_batch_size: 0")
    onnx_models.write(folder, "lookup", onnx_models.lookup())
    onnx_models.write(folder, "constant", onnx_models.constant())
    onnx_models.write(folder, "broken", b"no model")
    return folder


def listed_config(repository: Path, *more: str) -> Path:
    """Write OpenVINO Model Server's configuration of a model that is elsewhere, and of others at the same place."""
    if not more:
        onnx_models.write(repository.parent / "elsewhere", "files", onnx_models.identity())
    path = repository.parent / "config.json"
    entries = [{"config": {"name": name, "base_path": "elsewhere/files"}} for name in ("listed", *more)]
    path.write_text(json.dumps({"model_config_list": entries}))
    return path


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with start_server(
        "--model-repository", str(repository), "--model", "id=stub:tensor", "--max-tensor-values", "1000",
        "--max-client-regions", "2", "--load-retry-s", "1800",
        "--model-repository", str(listed_config(repository)),
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as opened:
        yield opened


def an_input(
    values: NDArray[Any], name: str = "x", datatype: str = "FP32", *, binary: bool = True
) -> triton.InferInput:
    return triton.InferInput(name, list(values.shape), datatype).set_data_from_numpy(values, binary_data=binary)


ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


# --- the client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    "datatype", ["FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL"]
)
def test_every_datatype_comes_back_as_it_was(client: triton.InferenceServerClient, datatype: str, binary: bool):
    values = (np.arange(6).reshape(3, 2) * (1 if datatype == "BOOL" else 7)).astype(triton.triton_to_np_dtype(datatype))
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    result = client.infer(f"is_{datatype}", [an_input(values, datatype=datatype, binary=binary)], outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("y"), values)
    assert result.as_numpy("y").dtype == values.dtype


def test_halves_cross_as_binary_and_are_refused_as_json(client: triton.InferenceServerClient, server: Server):
    values = ROWS.astype(np.float16)
    np.testing.assert_array_equal(client.infer("is_FP16", [an_input(values, datatype="FP16")]).as_numpy("y"), values)
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP16", "data": [1, 2]}]}
    assert "via JSON is not supported" in error(infer(server, "is_FP16", body))


@pytest.mark.parametrize("binary", [True, False])
def test_strings_of_any_length_come_back(client: triton.InferenceServerClient, binary: bool):
    values = np.array([["", "a"], ["x" * 100_000, "\N{SNOWMAN}"]], dtype=np.object_)
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    found = client.infer("is_BYTES", [an_input(values, datatype="BYTES", binary=binary)], outputs=outputs).as_numpy("y")
    assert [v if isinstance(v, str) else v.decode() for v in found.ravel()] == list(values.ravel())


def test_a_model_of_two_inputs_is_what_onnxruntime_computes(client: triton.InferenceServerClient):
    session = onnxruntime.InferenceSession(onnx_models.affine())
    x, a = np.random.default_rng(1).standard_normal((4, 3), np.float32), np.ones((4, 2), np.float32)
    expected = session.run(None, {"x": x, "a": a})[0]
    found = client.infer("affine", [an_input(a, "a"), an_input(x)]).as_numpy("y")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_model_without_inputs_is_asked_for_nothing(client: triton.InferenceServerClient):
    assert client.infer("constant", []).as_numpy("y").tolist() == [0, 1, 2]
    with pytest.raises(InferenceServerException, match="expected 1 inputs but got 0 inputs for model 'lookup'"):
        client.infer("lookup", [])


def test_clients_of_a_model_without_a_configuration_never_share_a_batch(server: Server):
    """Its rows depend on each other, so an answer beside another client's rows would be a mixture."""
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            for _ in range(40):
                x = rng.standard_normal((int(rng.integers(1, 5)), 2), np.float32)
                found = client.infer("row_softmax", [an_input(x)]).as_numpy("y")
                if not np.allclose(found, np.exp(x) / np.exp(x).sum(axis=0), rtol=1e-5, atol=1e-5):
                    wrong.append(f"seed {seed}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert not wrong
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        config = client.get_model_config("row_softmax")
        assert client.get_model_metadata("row_softmax")["inputs"][0]["shape"] == [-1, 2]
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (64, [2])
    assert "dynamic_batching" not in config


def test_sixteen_clients_at_once_get_each_its_own(server: Server):
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            for _ in range(20):
                x = rng.standard_normal((int(rng.integers(1, 5)), 3), np.float32)
                a = rng.standard_normal((len(x), 2), np.float32)
                found = client.infer("affine", [an_input(x), an_input(a, "a")]).as_numpy("y")
                expected = x @ np.arange(6, dtype=np.float32).reshape(3, 2) + a
                if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
                    wrong.append(f"seed {seed}")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_the_client_of_asyncio(server: Server):
    async def ask() -> list[NDArray[Any]]:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_model_ready("batched", "1")
            results = await asyncio.gather(*(client.infer("batched", [an_input(ROWS + i)]) for i in range(20)))
            return [result.as_numpy("y") for result in results]

    for i, found in enumerate(asyncio.run(ask())):
        np.testing.assert_array_equal(found, ROWS + i)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compressed_both_ways(client: triton.InferenceServerClient, coding: str, binary: bool):
    values = np.zeros((200, 2), np.float32)
    result = client.infer(
        "is_FP32", [an_input(values, binary=binary)], outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
        request_compression_algorithm=coding, response_compression_algorithm=coding,
    )  # fmt: skip
    np.testing.assert_array_equal(result.as_numpy("y"), values)


def test_classes_have_value_index_and_label(client: triton.InferenceServerClient):
    outputs = [triton.InferRequestedOutput("y", class_count=5)]
    found = client.infer("labelled", [an_input(np.array([[1, 3], [2, -1]], np.float32))], outputs=outputs).as_numpy("y")
    assert found.tolist() == [[b"3.000000:1:warm", b"1.000000:0:cold"], [b"2.000000:0:cold", b"-1.000000:1:warm"]]


def test_what_the_server_tells_of_itself(client: triton.InferenceServerClient, server: Server):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("batched") == {
        "name": "batched", "versions": ["1", "2"], "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }  # fmt: skip
    assert client.get_model_metadata("batched", "1")["versions"] == ["1"]
    config = client.get_model_config("labelled")
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (8, "TYPE_FP32")
    index = {(entry["name"], entry.get("version")): entry for entry in client.get_model_repository_index()}
    assert index["batched", "2"]["state"] == "READY"
    assert index["broken", "1"]["state"] == "UNAVAILABLE"
    assert "not an ONNX model" in index["broken", "1"]["reason"]
    assert not client.is_model_ready("broken")
    assert not client.is_model_ready("nobody")
    states = get(server.port, "/v1/config").json()
    assert states["batched"]["model_version_status"][0] == {
        "version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": "OK"},
    }  # fmt: skip
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported"):
        client.register_cuda_shared_memory("r", b"", 0, 64)


def test_tensors_cross_in_shared_memory(client: triton.InferenceServerClient):
    key = f"/sie-test-http-{os.getpid()}"
    handle = shared_memory.create_shared_memory_region("io", key, 64)
    try:
        shared_memory.set_shared_memory_region(handle, [ROWS])
        client.register_system_shared_memory("io", key, 64)
        with pytest.raises(InferenceServerException, match="'io' already in manager"):
            client.register_system_shared_memory("io", key, 64)
        shown = {"name": "io", "key": key, "offset": 0, "byte_size": 64}
        assert client.get_system_shared_memory_status() == client.get_system_shared_memory_status("io") == [shown]
        given = triton.InferInput("x", list(ROWS.shape), "FP32")
        given.set_shared_memory("io", ROWS.nbytes)
        wanted = triton.InferRequestedOutput("y")
        wanted.set_shared_memory("io", 32, offset=32)
        for _ in range(2):
            result = client.infer("batched", [given], outputs=[wanted])
            assert "data" not in result.get_output("y")
            assert result.get_output("y")["parameters"]["shared_memory_byte_size"] == ROWS.nbytes
        assert shared_memory.get_contents_as_numpy(handle, np.float32, ROWS.shape, 32).tolist() == ROWS.tolist()
        assert client.infer("batched", [given]).as_numpy("y").tolist() == ROWS.tolist()
        wanted.set_shared_memory("io", 8, offset=32)
        with pytest.raises(InferenceServerException, match="should be at least 24 bytes"):
            client.infer("batched", [given], outputs=[wanted])
        client.unregister_system_shared_memory("io")
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'io'"):
            client.infer("batched", [given])
    finally:
        shared_memory.destroy_shared_memory_region(handle)
    client.unregister_system_shared_memory()
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
        client.register_system_shared_memory("io", key, 64)


def test_models_of_a_configuration_of_ovms_are_served_and_read_again(
    client: triton.InferenceServerClient, server: Server, repository: Path
):
    assert client.infer("listed", [an_input(ROWS)]).as_numpy("y").tolist() == ROWS.tolist()
    assert "later" not in get(server.port, "/v1/config").json()
    listed_config(repository, "later")
    reloaded = send_raw(server.port, raw_request("/v1/config/reload", b"", {}))
    assert "'broken/versions/1' cannot be loaded" in error(reloaded), "the others are read nevertheless"
    assert get(server.port, "/v1/config").json()["later"]["model_version_status"][0]["state"] == "AVAILABLE"
    assert client.infer("later", [an_input(ROWS)]).as_numpy("y").tolist() == ROWS.tolist()


def test_statistics_count_rows_and_runs(client: triton.InferenceServerClient, server: Server):
    before = client.get_inference_statistics("lookup")["model_stats"][0]
    for _ in range(3):
        client.infer("lookup", [an_input(np.array([1, 2]), "i", "INT64")])
    with pytest.raises(InferenceServerException):
        client.infer("lookup", [an_input(np.array([9]), "i", "INT64")])

    def counted() -> dict[str, Any] | None:  # a request is counted behind its answer
        found = client.get_inference_statistics("lookup")["model_stats"][0]
        return found if found["inference_stats"]["fail"]["count"] > before["inference_stats"]["fail"]["count"] else None

    after = eventually(counted, "the failure in the statistics")
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
    assert after["inference_stats"]["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 1
    assert after["inference_count"] - before["inference_count"] >= 6
    assert after["last_inference"] > before["last_inference"]
    for phase in ("compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][phase]["ns"] > before["inference_stats"][phase]["ns"], phase
    sizes = {one["batch_size"]: one for one in after["batch_stats"]}
    assert sizes[2]["compute_infer"]["count"] >= 3
    assert min(sizes[2][phase]["ns"] for phase in ("compute_input", "compute_infer", "compute_output")) > 0
    assert total(server.port, "sie_requests_total", model="lookup/versions/1", endpoint="infer", status="success") >= 3


def test_a_version_that_is_named_answers(client: triton.InferenceServerClient):
    for version in ("1", "2"):
        result = client.infer("batched", [an_input(ROWS)], model_version=version, request_id="r")
        assert (result.get_response()["model_version"], result.get_response()["id"]) == (version, "r")
    assert client.infer("batched", [an_input(ROWS)]).get_response()["model_version"] == "2"


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("nobody", [an_input(ROWS)], "Request for unknown model: 'nobody' is not found"),
        ("broken", [an_input(ROWS)], "not an ONNX model"),
        ("batched", [an_input(ROWS, "z")], "unexpected inference input 'z' for model 'batched'"),
        ("batched", [an_input(ROWS), an_input(ROWS)], "input 'x' already exists in request"),
        ("affine", [an_input(np.ones((1, 3), np.float32))], "but missing required input(s) ['a']"),
        ("batched", [an_input(ROWS.astype(np.int32), datatype="INT32")], "data-type is 'INT32', but model 'batched' expects 'FP32'"),
        ("batched", [an_input(np.ones((1, 3), np.float32))], "Expected [-1,2], got [1,3]"),
        ("batched", [an_input(np.ones((9, 2), np.float32))], "batch-size must be <= 8 for 'batched'"),
        ("affine", [an_input(np.ones((1, 3), np.float32)), an_input(np.ones((2, 2), np.float32), "a")], "does not match other inputs"),
        ("lookup", [an_input(np.array([9]), "i", "INT64")], "lookup"),
    ],
)  # fmt: skip
def test_the_client_is_told_what_is_wrong(
    client: triton.InferenceServerClient, model: str, inputs: list[Any], message: str
):
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, inputs)
    assert message in caught.value.message()
    assert caught.value.status().startswith("4") or model == "broken"
    np.testing.assert_array_equal(client.infer("batched", [an_input(ROWS)]).as_numpy("y"), ROWS)


# --- bytes ------------------------------------------------------------------------------------------------------------


def infer(server: Server, model: str, body: Any, headers: dict[str, str] | None = None) -> Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send_raw(server.port, raw_request(f"/v2/models/{model}/infer", data, headers))


def error(response: Response, status: int = 400) -> str:
    assert response.status == status, response
    assert set(response.json()) == {"error"}
    return response.json()["error"]


X = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
TEXT = json.dumps({"inputs": [X | {"parameters": {"binary_data_size": 8}}]}).encode()
HOSTILE: dict[str, tuple[bytes, dict[str, str]]] = {
    "empty": (b"", {}), "no JSON": (b"hello", {}), "a list": (b"[]", {}), "cut": (TEXT[:-3], {}), "deep": (b"[" * 100_000, {}),
    "invalid UTF-8": (b'{"inputs": [{"name": "\xff"}]}', {}),
    "negative length": (TEXT, {"inference-header-content-length": "-1"}),
    "length over the body": (TEXT, {"inference-header-content-length": "99999"}),
    "length over 64 bits": (TEXT, {"inference-header-content-length": "9" * 30}),
    "length within the JSON": (TEXT + bytes(8), {"inference-header-content-length": "10"}),
    "no tail": (TEXT, {"inference-header-content-length": str(len(TEXT))}),
    "a short tail": (TEXT + bytes(7), {"inference-header-content-length": str(len(TEXT))}),
    "a long tail": (TEXT + bytes(9), {"inference-header-content-length": str(len(TEXT))}),
    "overflowing shape": (json.dumps({"inputs": [X | {"shape": [1 << 40, 1 << 40], "data": [1]}]}).encode(), {}),
    "zero and a huge factor": (json.dumps({"inputs": [X | {"shape": [0, 1 << 62, 1 << 62], "data": []}]}).encode(), {}),
    "too many values": (json.dumps({"inputs": [X | {"shape": [1, 2000], "data": [0] * 2000}]}).encode(), {}),
    "raw of another size": (bytes(7), {"inference-header-content-length": "0"}),
    "gzip that is none": (TEXT, {"content-encoding": "gzip"}),
    "cut gzip": (gzip.compress(TEXT, mtime=0)[:-4], {"content-encoding": "gzip"}),
    "a timeout of text": (json.dumps({"inputs": [X | {"data": [1, 2]}], "parameters": {"timeout": "soon"}}).encode(), {}),
}  # fmt: skip


def those_who_serve(server: Server) -> list[int]:
    """Return the processes that live as long as the server; one that reads a model again may come and go."""
    return sorted([*server.frontends(), *server.pids("worker"), server.process.pid])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_bad_requests_and_cost_nobody_anything(server: Server, name: str):
    before = those_who_serve(server)
    assert error(infer(server, "batched", *HOSTILE[name]))
    good = infer(server, "batched", {"inputs": [X | {"data": [1, 2]}]})
    assert (good.status, good.json()["outputs"][0]["data"]) == (200, [1.0, 2.0])
    assert those_who_serve(server) == before


@pytest.mark.parametrize(
    "framing", [b"\1", struct.pack("<I", 1000) + b"abc", struct.pack("<I", 1) + b"a", struct.pack("<I", 2**32 - 1)]
)
def test_strings_whose_lengths_lie_are_refused(server: Server, framing: bytes):
    head = {"name": "x", "shape": [1, 2], "datatype": "BYTES", "parameters": {"binary_data_size": len(framing)}}
    text = json.dumps({"inputs": [head]}).encode()
    assert "string" in error(
        infer(server, "is_BYTES", text + framing, {"inference-header-content-length": str(len(text))})
    )


def test_a_bomb_is_refused_at_its_limit(server: Server):
    bomb = gzip.compress(bytes(64 << 20))
    assert "max_compression_ratio" in error(infer(server, "batched", bomb, {"content-encoding": "gzip"}), 413)
    unknown = infer(server, "batched", bomb, {"content-encoding": "br"})
    assert error(unknown, 415) == "Unsupported compression type"
    assert unknown.headers["accept-encoding"] == "gzip, deflate"


def ask_members(server: Server, path: str, body: Any) -> Response:
    return send_raw(server.port, raw_request(f"/v2/models/{path}", json.dumps(body).encode()))


def test_generate_takes_the_inputs_of_any_model_by_name(server: Server):
    numbers = {"x": [1, 2, 3], "a": [0.5, -0.5], "ignored": {"x": 1}, "id": "7", "parameters": {"priority": 0}}
    answer = json.loads(ask_members(server, "affine/generate", numbers).body)
    assert answer == {"id": "7", "model_name": "affine", "model_version": "1", "y": [16.5, 21.5]}
    assert json.loads(ask_members(server, "one_text/generate", {"x": "a, \N{SNOWMAN}"}).body)["y"] == "a, \N{SNOWMAN}"
    event = ask_members(server, "one_text/versions/1/generate_stream", {"x": ["b"]})
    assert (event.status, event.headers["content-type"]) == (200, "text/event-stream")
    assert event.body == b'data: {"model_name":"one_text","model_version":"1","y":"b"}\n\n'


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("affine/generate", {"x": [1, 2, 3]}, "expected 2 inputs but got 1"),
        ("affine/generate", {"x": [1, 2], "a": [0, 0]}, "unexpected shape for input 'x'"),
        ("affine/generate", {"x": ["1", "2", "3"], "a": [0, 0]}, "must be numbers"),
        ("affine/generate", {"x": {"y": 1}, "a": [0, 0]}, "must be numbers"),
        ("one_text/generate", {"x": 5}, "must be strings"), ("one_text/generate", {"x": ["a", "b"]}, "unexpected shape"),
        ("one_text/generate", {"x": [["a"]]}, "list of texts"), ("one_text/generate", {"x": None}, "must be strings"),
        ("one_text/generate", {"x": "a", "parameters": {"triton_x": 1}}, "reserved"),
        ("one_text/generate", {"x": "a", "id": 5}, "$.id"), ("one_text/generate_stream", [], "Expected `object`"),
        ("is_FP16/generate", {"x": 1}, "FP16 data via JSON"),
    ],
)  # fmt: skip
def test_what_generate_cannot_read_is_refused(server: Server, path: str, body: Any, message: str):
    assert message in error(ask_members(server, path, body))


@pytest.mark.parametrize(
    "path", ["logging", "trace/setting", "repository/index", "systemsharedmemory/region/r/register"]
)
def test_bodies_that_are_read_at_once_are_small(server: Server, path: str):
    """Two million settings held every other client up for seconds."""
    body = json.dumps({f"s{number}": number for number in range(10_000)}).encode()
    response = send_raw(server.port, raw_request(f"/v2/{path}", body))
    assert (response.status, response.json()) == (400, {"error": "The body must hold at most 65536 bytes"})


def test_a_model_that_did_not_load_is_unavailable_and_says_why(server: Server):
    assert "failed to load: model.onnx" in error(infer(server, "broken", {"inputs": [{"name": "x"}]}), 503)
    assert "failed to load: model.onnx" in error(ask_members(server, "broken/generate", {"x": 1}), 503)


@pytest.mark.parametrize("part", [b'"model_name":"\xff",', b'"z\xff":1,', b'"z":[{"z":"\xc3\x28"}],'])
def test_bytes_that_are_not_utf_8_are_refused_in_ignored_members_too(server: Server, part: bytes):
    rest = b'"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32"'
    assert "UTF-8" in error(infer(server, "is_FP32", b"{" + part + rest + b',"data":[1,2]}]}'))
    head = b"{" + part + rest + b"}]}"
    assert "UTF-8" in error(
        infer(server, "is_FP32", head + bytes(8), {"inference-header-content-length": str(len(head))})
    )


def test_outputs_are_those_asked_for(server: Server):
    request = {"inputs": [X | {"data": [1, 2]}]}
    response = infer(server, "batched", request | {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]})
    length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.body[length:] == np.array([1, 2], np.float32).tobytes()
    assert "unexpected inference output 'z' for model 'batched'" in error(
        infer(server, "batched", request | {"outputs": [{"name": "z"}]})
    )


def test_requests_that_differ_in_their_elements_alone_get_their_own(server: Server):
    """Each goes a way that the first, and the second one's answer, made shorter; a body that lies goes the long one."""
    wanted = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}], "id": "again"}
    text = json.dumps({"inputs": [X | {"parameters": {"binary_data_size": 8}}]} | wanted).encode()
    headers = {"inference-header-content-length": str(len(text))}
    heads: set[bytes] = set()
    for number in range(5):
        data = np.array([number, -number], np.float32).tobytes()
        response = infer(server, "batched", text + data, headers)
        length = int(response.headers["inference-header-content-length"])
        assert (response.status, response.body[length:]) == (200, data)
        heads.add(response.body[:length])
        assert "batched" in error(infer(server, "batched", text + data[number + 1 :], headers))
        assert error(infer(server, "batched", text + data, headers | {"x-sie-timeout-ms": "soon"}))
    assert [json.loads(head)["id"] for head in heads] == ["again"]


def test_a_raw_body_is_a_tensor(server: Server):
    response = infer(server, "batched", ROWS[:1].tobytes(), {"inference-header-content-length": "0"})
    assert response.body[int(response.headers["inference-header-content-length"]) :] == ROWS[:1].tobytes()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/batched/infer", 405), ("POST", "/v2/models/batched", 405), ("POST", "/v2/health/live", 405),
        ("GET", "/v2/nothing", 404), ("GET", "/v2/", 404), ("GET", "/v2/models/batched/versions/x", 404),
        ("GET", "/v2/models/batched/versions/9", 404), ("POST", "/v2/models/batched/versions/9/infer", 404),
        ("GET", "/v2/models/..%2f..%2fetc/ready", 404), ("GET", "/v2/models/batched/versions/99999999999999999999/ready", 404),
        ("POST", "/v2/repository/models/batched/load", 503), ("POST", "/v2/repository/models/batched/explode", 404),
    ],
)  # fmt: skip
def test_paths_and_methods(server: Server, method: str, path: str, status: int):
    request = raw_request(path, b"{}" if method == "POST" else b"", {"host": "127.0.0.1"}, method=method)
    assert error(send_raw(server.port, request), status)


def test_a_head_leaves_the_connection_in_order(server: Server):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
        connection.request("HEAD", "/v2/health/live")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    "path", ["/v2/systemsharedmemory/region/r/status", "/v2/cudasharedmemory/region/r/status", "/api/sharedmemorycontrol/status"]
)  # fmt: skip
def test_a_head_of_a_region_is_answered_as_its_get(server: Server, path: str):
    answers: dict[str, tuple[int, dict[str, str]]] = {}
    for method in ("GET", "HEAD", "POST"):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            answers[method] = response.status, {name.lower(): value for name, value in response.getheaders()}
    assert answers["HEAD"][0] == answers["GET"][0] != 405
    assert (answers["POST"][0], answers["POST"][1]["allow"]) == (405, "GET, HEAD")


def test_models_are_loaded_and_unloaded_on_request(repository: Path):
    with start_server("--model-repository", str(repository), "--repository-control", "explicit") as running, \
            triton.InferenceServerClient(f"127.0.0.1:{running.port}") as client:  # fmt: skip
        assert not client.is_model_ready("batched")
        with pytest.raises(InferenceServerException, match="has no available versions"):
            client.infer("batched", [an_input(ROWS)])
        client.load_model("batched")
        np.testing.assert_array_equal(client.infer("batched", [an_input(ROWS)]).as_numpy("y"), ROWS)
        with pytest.raises(InferenceServerException, match="failed to load 'nobody'"):
            client.load_model("nobody")
        with pytest.raises(InferenceServerException, match="'broken'"):
            client.load_model("broken")
        with pytest.raises(InferenceServerException, match="parameter 'config' is not supported"):
            client.load_model("batched", config="{}")
        client.unload_model("batched")
        client.unload_model("nobody")
        index = {(entry["name"], entry.get("version")): entry for entry in client.get_model_repository_index()}
        assert index["batched", "2"].get("state") in ("UNAVAILABLE", "UNLOADING")
        assert get(running.port, "/v1/models/batched/versions/2").json()["state"] in ("available", "unloading")


def test_without_a_repository_no_name_is_looked_for_anywhere():
    with start_server(
        "--model", "id=stub:tensor", "--repository-control", "explicit", env={"HF_ENDPOINT": "http://127.0.0.1:9"}
    ) as running:
        for name in ("org/name", "id"):
            request = raw_request(f"/v2/repository/models/{name}/load", b"{}", {"host": "127.0.0.1"})
            assert f"failed to load '{name}'" in error(send_raw(running.port, request))
        reload = send_raw(running.port, raw_request("/v1/config/reload", b"", {"host": "127.0.0.1"}))
        assert (reload.status, list(reload.json())) == (200, ["id"])
