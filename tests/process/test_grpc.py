"""gRPC on a running server: Triton's own clients unmodified, raw messages of both protocols, and refusals."""

from __future__ import annotations

import asyncio
import os
import queue
import random
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf import descriptor_pool
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, shared_memory, triton_to_np_dtype

from sie.frontend.grpc.methods import METHODS, Method
from sie.proto import message_class
from tests import onnx_models
from tests.process.harness import WAIT_S, Server, eventually, free_port, paused, start_server
from tests.process.wire import extents_in_use, total, wait_no_extents

BATCHED = 'max_batch_size: 8\ninput { name: "x" data_type: TYPE_FP32 dims: 2 }\noutput { name: "y" data_type: TYPE_FP32 dims: 2 }'
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
TYPES = ("FP32", "FP64", "FP16", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL")
MAX_MESSAGE_BYTES = 4 << 20
KSERVE = "inference.GRPCInferenceService"
TRTIS = "nvidia.inferenceserver.GRPCService"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("repository")
    for datatype in (*TYPES, "BYTES"):
        config = "max_batch_size: 0"
        onnx_models.write(folder, f"is_{datatype}", onnx_models.identity(datatype, ("n", "m")), config=config)
    onnx_models.write(folder, "batched", onnx_models.identity(), "1")
    onnx_models.write(folder, "batched", onnx_models.identity(), "2", BATCHED + "\nversion_policy { all {} }")
    labelled = BATCHED[:-1] + ' label_filename: "labels.txt" }'
    onnx_models.write(folder, "labelled", onnx_models.identity(), config=labelled)
    (folder / "labelled" / "labels.txt").write_text("cold\nwarm\n")
    onnx_models.write(folder, "broken", b"no model")
    with start_server(
        "--model-repository", str(folder), "--model", "id=stub:tensor", "--model", "slow=stub:tensor,latency_ms=1000",
        "--grpc-port", str(free_port()), "--max-grpc-message-bytes", str(MAX_MESSAGE_BYTES),
        "--max-client-regions", "1",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


def an_input(values: NDArray[Any], name: str = "x", datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, list(values.shape), datatype).set_data_from_numpy(values)


def check_good(client: triton.InferenceServerClient) -> None:
    np.testing.assert_array_equal(client.infer("batched", [an_input(ROWS)]).as_numpy("y"), ROWS)


def status(caught: pytest.ExceptionInfo[InferenceServerException]) -> str:
    return caught.value.status().removeprefix("StatusCode.")


def message(name: str, **fields: Any) -> Any:
    return message_class("kserve", f"inference.{name}")(**fields)


def v1(name: str, **fields: Any) -> Any:
    return message_class("trtis", f"nvidia.inferenceserver.{name}")(**fields)


def call(channel: grpc.Channel, method: str, data: bytes, timeout_s: float = WAIT_S) -> bytes:
    return channel.unary_unary(method)(data, timeout=timeout_s)


# --- the client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", TYPES)
def test_every_datatype_comes_back_as_it_was(client: triton.InferenceServerClient, datatype: str):
    values = (np.arange(6).reshape(3, 2) * (1 if datatype == "BOOL" else 7)).astype(triton_to_np_dtype(datatype))
    found = client.infer(f"is_{datatype}", [an_input(values, datatype=datatype)]).as_numpy("y")
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype


def test_strings_of_any_length_come_back(client: triton.InferenceServerClient):
    values = np.array([["", "a"], ["x" * 100_000, "\N{SNOWMAN}"]], dtype=np.object_)
    found = client.infer("is_BYTES", [an_input(values, datatype="BYTES")]).as_numpy("y")
    assert [element.decode() for element in found.ravel()] == list(values.ravel())


def test_typed_elements_are_answered_raw(channel: grpc.Channel):
    request = message("ModelInferRequest", model_name="is_INT16", id="7")
    request.inputs.add(name="x", datatype="INT16", shape=[2, 1]).contents.int_contents.extend([-5, 300])
    reply = message("ModelInferResponse").FromString(
        call(channel, f"/{KSERVE}/ModelInfer", request.SerializeToString())
    )
    assert (reply.id, reply.model_version, list(reply.outputs[0].shape)) == ("7", "1", [2, 1])
    assert list(reply.raw_output_contents) == [np.array([-5, 300], "<i2").tobytes()]


def test_what_the_server_and_its_models_say_of_themselves(client: triton.InferenceServerClient):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert (client.is_model_ready("batched", "2"), client.is_model_ready("broken")) == (True, False)
    assert (client.is_model_ready("nobody"), client.is_model_ready("batched", "9")) == (False, False)
    assert client.get_server_metadata().name == "sie"
    metadata = client.get_model_metadata("batched")
    assert (list(metadata.versions), metadata.inputs[0].datatype, list(metadata.inputs[0].shape)) == (
        ["1", "2"],
        "FP32",
        [-1, 2],
    )
    assert list(client.get_model_metadata("batched", "1").versions) == ["1"]
    assert client.get_model_config("batched").config.max_batch_size == 8
    states = {(model.name, model.version): model.state for model in client.get_model_repository_index().models}
    assert (states["batched", "1"], states["broken", "1"]) == ("READY", "UNAVAILABLE")
    check_good(client)

    def is_counted() -> bool:  # the worker counts a step after its replies have left, one figure after the other
        (figures,) = client.get_inference_statistics("batched", "2").model_stats
        steps = [one for one in figures.batch_stats if one.batch_size == 3]
        return (
            figures.inference_count >= 3
            and figures.inference_stats.success.count >= 1
            and any(one.compute_infer.count >= 1 for one in steps)
            and any(min(one.compute_input.ns, one.compute_infer.ns, one.compute_output.ns) > 0 for one in steps)
        )

    eventually(is_counted, "the step and its rows in the statistics")
    assert {one.version for one in client.get_inference_statistics("batched").model_stats} == {"1", "2"}


def test_outputs_by_name_and_as_classes(client: triton.InferenceServerClient):
    outputs = [triton.InferRequestedOutput("y", class_count=1)]
    found = client.infer("labelled", [an_input(ROWS)], outputs=outputs).as_numpy("y")
    assert [element.decode() for element in found.ravel()] == ["1.000000:1:warm", "3.000000:1:warm", "5.000000:1:warm"]


def test_sixteen_clients_at_once_get_each_its_own(server: Server):
    async def ask(client: triton_aio.InferenceServerClient, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            values = rng.standard_normal((rng.integers(1, 9), 2)).astype(np.float32)
            result = await client.infer("batched", [an_input(values)], request_id=str(seed))
            np.testing.assert_array_equal(result.as_numpy("y"), values)
            assert result.get_response().id == str(seed)

    async def ask_all() -> None:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    asyncio.run(ask_all())


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages_are_read(client: triton.InferenceServerClient, algorithm: str):
    values = np.zeros((8, 2), np.float32)
    found = client.infer("batched", [an_input(values)], compression_algorithm=algorithm).as_numpy("y")
    np.testing.assert_array_equal(found, values)


def test_what_is_done_here_is_counted(server: Server, client: triton.InferenceServerClient):
    labels = {"path": f"/{KSERVE}/ModelInfer", "model": "batched/versions/2", "status": "200"}
    before = total(server.port, "http_requests_total", **labels)
    check_good(client)
    eventually(lambda: total(server.port, "http_requests_total", **labels) == before + 1, "the call counted")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "version", "inputs", "code"),
    [
        ("nobody", "", [an_input(ROWS)], "NOT_FOUND"),
        ("batched", "9", [an_input(ROWS)], "NOT_FOUND"),
        ("batched", "new", [an_input(ROWS)], "INVALID_ARGUMENT"),
        ("broken", "", [an_input(ROWS)], "UNAVAILABLE"),
        ("batched", "", [an_input(ROWS, "z")], "INVALID_ARGUMENT"),
        ("batched", "", [an_input(ROWS.astype(np.int32), datatype="INT32")], "INVALID_ARGUMENT"),
        ("batched", "", [an_input(np.zeros((9, 2), np.float32))], "INVALID_ARGUMENT"),
    ],
)  # fmt: skip
def test_failures_have_the_codes_of_the_protocol(
    client: triton.InferenceServerClient, model: str, version: str, inputs: list[triton.InferInput], code: str
):
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, inputs, version)
    assert status(caught) == code
    check_good(client)


def test_tensors_cross_in_shared_memory(client: triton.InferenceServerClient):
    key = f"/sie-test-grpc-{os.getpid()}"
    handle = shared_memory.create_shared_memory_region("io", key, 64)
    try:
        shared_memory.set_shared_memory_region(handle, [ROWS])
        client.register_system_shared_memory("io", key, 64)
        assert client.get_system_shared_memory_status().regions["io"].byte_size == 64
        given = triton.InferInput("x", list(ROWS.shape), "FP32")
        given.set_shared_memory("io", ROWS.nbytes)
        wanted = triton.InferRequestedOutput("y")
        wanted.set_shared_memory("io", 32, offset=32)
        result = client.infer("batched", [given], outputs=[wanted])
        assert result.get_output("y").parameters["shared_memory_byte_size"].int64_param == ROWS.nbytes
        assert shared_memory.get_contents_as_numpy(handle, np.float32, ROWS.shape, 32).tolist() == ROWS.tolist()
        assert client.infer("batched", [given]).as_numpy("y").tolist() == ROWS.tolist()
        with pytest.raises(InferenceServerException, match="max_client_regions is 1") as caught:
            client.register_system_shared_memory("more", key, 8)
        assert status(caught) == "INVALID_ARGUMENT"
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
        with pytest.raises(InferenceServerException) as caught:
            client.infer("batched", [given])
        assert status(caught) == "NOT_FOUND"
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_models_are_managed_only_where_that_is_asked_for_and_memory_of_a_gpu_is_never_shared(
    client: triton.InferenceServerClient,
):
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("batched")
    assert status(caught) == "UNAVAILABLE"
    with pytest.raises(InferenceServerException) as caught:
        client.register_cuda_shared_memory("r", b"", 0, 8)
    assert status(caught) == "UNIMPLEMENTED"
    with pytest.raises(InferenceServerException) as caught:
        client.get_cuda_shared_memory_status("r")
    assert status(caught) == "NOT_FOUND"
    client.unregister_cuda_shared_memory()


def test_a_message_over_the_limit_is_refused_however_it_is_packed(client: triton.InferenceServerClient):
    values = np.zeros((1, 4 * MAX_MESSAGE_BYTES), np.float32)
    for algorithm in (None, "gzip"):
        with pytest.raises(InferenceServerException) as caught:
            client.infer("is_FP32", [an_input(values)], compression_algorithm=algorithm)
        assert status(caught) == "RESOURCE_EXHAUSTED"
    check_good(client)


@pytest.mark.parametrize(
    "method",
    [method for method in METHODS if not (method.is_stream or method.is_watch)],
    ids=lambda method: method.name,
)
def test_garbage_is_the_clients_fault(channel: grpc.Channel, client: triton.InferenceServerClient, method: Method):
    rng = random.Random(method.name)
    for _ in range(20):
        data = b"\x0a\xff" + rng.randbytes(rng.randrange(60))
        with pytest.raises(grpc.RpcError) as caught:
            call(channel, method.route.template, data)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, data
    check_good(client)


def test_a_message_that_is_parsed_at_once_is_small(channel: grpc.Channel, client: triton.InferenceServerClient):
    """Fifteen million values of a setting held every other client up for a second."""
    asked = message("TraceSettingRequest")
    asked.settings["trace_level"].value.extend([""] * 33_000)
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "/inference.GRPCInferenceService/TraceSetting", asked.SerializeToString())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "a message to TraceSetting may have at most 65536 bytes"
    check_good(client)


def test_broken_requests_never_break_the_server(channel: grpc.Channel, client: triton.InferenceServerClient):
    rng = random.Random(5)
    request = message("ModelInferRequest", model_name="batched", raw_input_contents=[ROWS.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[3, 2])
    good = request.SerializeToString()
    header = v1("InferRequestHeader", batch_size=3, input=[{"name": "x"}], output=[{"name": "y"}])
    old = v1("InferRequest", model_name="batched", meta_data=header.SerializeToString(), raw_input=[ROWS.tobytes()])
    codes: set[Any] = set()
    for path, whole in ((f"/{KSERVE}/ModelInfer", good), (f"/{TRTIS}/Infer", old.SerializeToString())):
        for _ in range(150):
            broken = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            try:
                call(channel, path, bytes(broken))
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(error.code())
    assert {"OK", grpc.StatusCode.INVALID_ARGUMENT} <= codes
    assert not codes & {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
    check_good(client)


def test_text_of_a_client_in_an_error_is_cut(client: triton.InferenceServerClient):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("\N{SNOWMAN}" * 5000, [an_input(ROWS)])
    assert status(caught) == "NOT_FOUND"
    assert "\N{SNOWMAN}" * 100 in caught.value.message()
    assert len(caught.value.message()) < 1100


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_clients_deadline_is_kept(server: Server, client: triton.InferenceServerClient):
    for deadline in ({"client_timeout": 0.2}, {"timeout": 200_000}):
        # No answer can come, however late the deadline is looked at.
        with paused(server.worker()), pytest.raises(InferenceServerException) as caught:
            client.infer("slow", [an_input(ROWS, "INPUT0")], **deadline)
        assert status(caught) == "DEADLINE_EXCEEDED"


def test_work_whose_client_left_never_runs(server: Server, client: triton.InferenceServerClient):
    """On a busy machine the first request may end before the others' leaving was heard, so there are several goes."""

    def count() -> int:
        return client.get_inference_statistics("slow").model_stats[0].inference_count

    def run_with_three_that_leave() -> int:
        wait_no_extents(server.port)
        before = count()
        done: queue.Queue[Any] = queue.Queue()
        client.async_infer("slow", [an_input(ROWS, "INPUT0")], lambda **found: done.put(found["error"]))
        eventually(lambda: extents_in_use(server.port) >= 1, "the first request at the worker")
        calls = [client.async_infer("slow", [an_input(ROWS, "INPUT0")], lambda **_: None) for _ in range(3)]
        eventually(lambda: extents_in_use(server.port) == 4 or not done.empty(), "the others behind it")
        is_in_time = done.empty()
        for one in calls:
            one.cancel()
        assert done.get(timeout=60) is None
        np.testing.assert_array_equal(client.infer("slow", [an_input(ROWS, "INPUT0")]).as_numpy("OUTPUT0"), ROWS)
        return count() - before if is_in_time else -1

    assert any(run_with_three_that_leave() == 2 for _ in range(5))
    wait_no_extents(server.port)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_answers_in_order_and_outlives_a_bad_request(client: triton.InferenceServerClient):
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(40):
        model = "nobody" if number == 7 else "batched"
        client.async_stream_infer(
            model, [an_input(ROWS + number)], request_id=str(number), enable_empty_final_response=number == 9
        )
    for number in range(40):
        result, error = answers.get(timeout=60)
        if number == 7:
            assert "nobody" in error.message()
            continue
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), ROWS + number)
        response = result.get_response()
        assert response.id == str(number)
        assert response.parameters["triton_final_response"].bool_param == (number == 9)
    client.stop_stream()


def test_garbage_on_a_stream_is_answered_and_the_stream_goes_on(channel: grpc.Channel):
    request = message("ModelInferRequest", model_name="batched", id="b", raw_input_contents=[ROWS.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[3, 2])
    stream = channel.stream_stream(f"/{KSERVE}/ModelStreamInfer")
    found = [
        message("ModelStreamInferResponse").FromString(data)
        for data in stream(iter([b"\xff\xff", request.SerializeToString()]), timeout=60)
    ]
    assert [bool(reply.error_message) for reply in found] == [True, False]
    assert found[1].infer_response.id == "b"


# --- v1 and health ----------------------------------------------------------------------------------------------------


def v1_call(channel: grpc.Channel, name: str, request: Any) -> Any:
    return v1(f"{name}Response").FromString(call(channel, f"/{TRTIS}/{name}", request.SerializeToString()))


def v1_request(header: bytes, model: str = "batched", version: int = -1) -> Any:
    return v1("InferRequest", model_name=model, model_version=version, meta_data=header, raw_input=[ROWS.tobytes()])


NEW = v1("InferRequestHeader", batch_size=3, id=7, input=[{"name": "x"}], output=[{"name": "y"}]).SerializeToString()
OLD = b"\x08\x03" + b"\x12\x05\x0a\x01x\x10\x08" + b"\x1a\x05\x0a\x01y\x10\x08"


def test_both_generations_of_v1_are_answered_in_their_form(channel: grpc.Channel):
    reply = v1_call(channel, "Infer", v1_request(NEW))
    assert (reply.request_status.code, list(reply.raw_output)) == (1, [ROWS.tobytes()])
    header = v1("InferResponseHeader").FromString(reply.meta_data)
    assert (header.model_version, header.batch_size, header.id, list(header.output[0].raw.dims)) == (2, 3, 7, [2])
    reply = v1_call(channel, "Infer", v1_request(OLD, version=1))
    header = v1("InferResponseHeaderOfFirstGeneration").FromString(reply.meta_data)
    assert (header.model_version, header.output[0].raw.byte_size) == (1, 8)


@pytest.mark.parametrize(
    ("request_", "code", "request_id"),
    [(v1_request(NEW, "nobody"), 6, 7), (v1_request(NEW[2:]), 5, 7), (v1_request(b"\xff"), 5, 0), (v1_request(NEW, version=9), 6, 7)],
)  # fmt: skip
def test_failures_of_v1_are_told_in_the_reply(channel: grpc.Channel, request_: Any, code: int, request_id: int):
    reply = v1_call(channel, "Infer", request_)
    assert (reply.request_status.code, list(reply.raw_output)) == (code, [])
    assert v1("InferResponseHeader").FromString(reply.meta_data).id == request_id
    assert v1_call(channel, "Infer", v1_request(NEW)).request_status.code == 1


def test_a_version_of_release_0_8_that_is_no_number_is_told_in_the_reply(channel: grpc.Channel):
    request_ = v1_request(NEW, version=0).SerializeToString() + b"\x12\x03abc"
    reply = v1("InferResponse").FromString(call(channel, f"/{TRTIS}/Infer", request_))
    assert (reply.request_status.code, reply.request_status.msg) == (
        5,
        "invalid model version 'abc': it must be a number",
    )
    assert v1("InferResponseHeader").FromString(reply.meta_data).id == 7


def test_a_v1_stream_answers_in_order_failures_among_it(channel: grpc.Channel):
    requests = [v1_request(NEW), v1_request(NEW, "nobody"), v1_request(NEW)]
    stream = channel.stream_stream(f"/{TRTIS}/StreamInfer")
    sent = [request.SerializeToString() for request in requests]
    sent.insert(1, b"\xff")
    found = [v1("InferResponse").FromString(data) for data in stream(iter(sent), timeout=60)]
    assert [reply.request_status.code for reply in found] == [1, 5, 6, 1]


def test_what_v1_says_of_the_server(channel: grpc.Channel):
    assert v1_call(channel, "Health", v1("HealthRequest", mode="live")).health
    unknown = v1_call(channel, "Health", v1("HealthRequest", mode="well"))
    assert (unknown.health, unknown.request_status.code, unknown.request_status.msg) == (
        False,
        2,
        "unknown health mode 'well'",
    )
    # A model of the repository has not loaded, and readiness is strict.
    assert not v1_call(channel, "Health", v1("HealthRequest", mode="ready")).health
    found = v1_call(channel, "Status", v1("StatusRequest", model_name="batched")).server_status
    assert (list(found.model_status), found.model_status["batched"].version_status[2].ready_state) == (["batched"], 1)
    assert v1_call(channel, "Status", v1("StatusRequest", model_name="nobody")).request_status.code == 5
    index = v1_call(channel, "Repository", v1("RepositoryRequest", index=True)).index
    assert {"batched", "id", "broken"} <= {model.name for model in index.models}
    assert (
        v1_call(channel, "ModelControl", v1("ModelControlRequest", model_name="batched", type=1)).request_status.code
        == 6
    )
    assert v1_call(channel, "SharedMemoryControl", v1("SharedMemoryControlRequest")).request_status.code == 7


@pytest.mark.parametrize("service", ["", KSERVE, TRTIS])
def test_the_health_service_knows_its_services(channel: grpc.Channel, service: str):
    request = message_class("health", "grpc.health.v1.HealthCheckRequest")(service=service)
    reply = call(channel, "/grpc.health.v1.Health/Check", request.SerializeToString())
    assert message_class("health", "grpc.health.v1.HealthCheckResponse").FromString(reply).status == 1
    request.service = "nobody"
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "/grpc.health.v1.Health/Check", request.SerializeToString())
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_every_service_with_its_methods(channel: grpc.Channel, version: str):
    request = message_class("reflection", "grpc.reflection.v1.ServerReflectionRequest")
    stream = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    read = message_class("reflection", "grpc.reflection.v1.ServerReflectionResponse").FromString

    def ask(**asked: str) -> Any:
        (data,) = stream(iter([request(**asked).SerializeToString()]), timeout=60)
        return read(data)

    services = [service.name for service in ask(list_services="*").list_services_response.service]
    assert {KSERVE, TRTIS, "grpc.health.v1.Health"} <= set(services)
    pool = descriptor_pool.DescriptorPool()
    for service in services:
        files = ask(
            file_containing_symbol=service.replace("v1alpha", "v1")
        ).file_descriptor_response.file_descriptor_proto
        for file in reversed(files):
            pool.AddSerializedFile(file)
    for method in METHODS:
        assert method.name in pool.FindServiceByName(method.service.replace("v1alpha", "v1")).methods_by_name
    assert ask(file_containing_symbol="nobody").error_response.error_code == 5
    assert ask(file_by_filename="model_config.proto").file_descriptor_response.file_descriptor_proto
    assert ask(all_extension_numbers_of_type="x").error_response.error_code == 12
