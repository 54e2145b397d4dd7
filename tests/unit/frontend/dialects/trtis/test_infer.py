"""The TensorRT Inference Server v1 wire: the examples of its documentation, both generations, and what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf import text_format

from sie.frontend.dialects.trtis.infer import (
    answered,
    decode_infer,
    decode_raw_inputs,
    encode_infer,
    parse_infer_head,
)
from sie.frontend.dialects.trtis.message_text import in_lines, one_line
from sie.frontend.dialects.trtis.status import (
    Described,
    ServerState,
    choose_format,
    encode_message,
    repository_index,
    server_status,
    status_line,
    status_of,
)
from sie.frontend.tensors.states import ModelStatistics, RequestStatistics
from sie.proto import message_class
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest, DeadlineExceeded, Internal, NotFound, Overloaded, SieError
from sie.values.inference import Timing
from sie.values.tensor import Tensor, TensorReply, TensorRule, TensorSpec

ADD_SUB = TensorRule(
    name="add_sub", version="1", platform="onnxruntime_onnx", max_batch_size=8,
    inputs=tuple(TensorSpec(name=f"INPUT{i}", datatype="INT32", shape=(-1, 16)) for i in range(2)),
    outputs=tuple(TensorSpec(name=f"OUTPUT{i}", datatype="INT32", shape=(-1, 16)) for i in range(2)),
    config={"name": "add_sub", "platform": "onnxruntime_onnx", "max_batch_size": 8,
            "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [16]}]},
)  # fmt: skip
PLAIN = TensorRule(
    name="plain", version="4", platform="onnxruntime_onnx",
    inputs=(TensorSpec(name="X", datatype="FP32", shape=(-1, 3)), TensorSpec(name="S", datatype="BYTES", shape=(2,), optional=True)),
    outputs=(TensorSpec(name="Y", datatype="FP32", shape=(-1, 3)),),
)  # fmt: skip
NEW = (
    'batch_size: 2 id: 7 input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 } output { name: "OUTPUT0" } '
    'output { name: "OUTPUT1" }'
)
OLD = (
    'batch_size: 2 input { name: "INPUT0" byte_size: 64 } input { name: "INPUT1" byte_size: 64 } '
    'output { name: "OUTPUT0" byte_size: 64 } output { name: "OUTPUT1" byte_size: 64 }'
)
ROWS = np.arange(64, dtype=np.int32).reshape(2, 2, 16)
BODY = memoryview(ROWS.tobytes())


def decode(text: str, body: bytes | memoryview = BODY, rule: TensorRule = ADD_SUB):
    return decode_infer(parse_infer_head(text), memoryview(body), "m", rule)


def refusal(text: str, body: bytes | memoryview = BODY, rule: TensorRule = ADD_SUB) -> str:
    with pytest.raises(BadRequest) as caught:
        decode(text, body, rule)
    return caught.value.message


@pytest.mark.parametrize(
    "text", [NEW, OLD, NEW.replace(" dims: 16", ""), NEW.replace("dims: 16", "dims: 16 batch_byte_size: 128")]
)
def test_both_generations_give_the_same_tensors(text: str):
    request = decode(text)
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs] == [
        ("INPUT0", "INT32", (2, 16)), ("INPUT1", "INT32", (2, 16)),
    ]  # fmt: skip
    np.testing.assert_array_equal(np.frombuffer(request.inputs[1].data, "<i4"), ROWS[1].ravel())
    assert request.outputs == ("OUTPUT0", "OUTPUT1")


def test_the_text_format_is_read_as_protobuf_reads_it():
    head = parse_infer_head("batch_size:2, id:0x7;input<name:'IN' \"PUT0\" dims:[16]> # a comment")
    assert (head.batch_size, head.id, head.inputs[0].name, head.inputs[0].dims) == (2, 7, "INPUT0", (16,))
    assert not head.is_first_generation


def test_strings_need_their_size_and_may_have_it_for_an_item():
    data = frame_elements([b"ab", b""])
    text = 'batch_size: 1 input { name: "X" dims: [0, 3] } input { name: "S" batch_byte_size: 10 } output { name: "Y" }'
    assert bytes(decode(text, data, PLAIN).inputs[1].data) == data


def test_a_variable_size_has_to_be_said_or_follows_from_the_bytes_of_the_first_generation():
    message = "model supports variable-size for input 'X', request must specify input shape for model 'plain'"
    assert refusal('batch_size: 1 input { name: "X" }', b"", PLAIN) == message
    (tensor,) = decode('batch_size: 1 input { name: "X" byte_size: 24 }', bytes(24), PLAIN).inputs
    assert tensor.shape == (2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "batch-size must be >= 1"), (NEW.replace("batch_size: 2", ""), "batch-size must be >= 1 for 'add_sub'"),
        (NEW.replace("batch_size: 2", "batch_size: 9"), "inference request batch-size must be <= 8 for 'add_sub'"),
        ('batch_size: 2 input { name: "INPUT0" }', "expected 2 inputs but got 1 inputs for model 'add_sub'"),
        (NEW.replace("INPUT1", "X"), "unexpected inference input 'X' for model 'add_sub'"),
        (NEW.replace("INPUT1", "INPUT0"), "input 'INPUT0' already exists in request"),
        (NEW.replace("OUTPUT1", "OUTPUT0"), "output 'OUTPUT0' already requested"),
        (NEW.replace("dims: 16", "dims: 15", 1), "unexpected shape for input 'INPUT0' for model 'add_sub'. Expected [16], got [15]"),
        (NEW.replace("dims: 16", "dims: -16", 1), "unexpected shape for input 'INPUT0'"),
        (NEW.replace("dims: 16", "dims: 4611686018427387904", 1), "unexpected shape for input 'INPUT0'"),
        (NEW.replace("dims: 16", "dims: 16 batch_byte_size: 64", 1), "specific batch-byte-size for input 'INPUT0' does not match"),
        (NEW.replace("dims: 16", "batch_byte_size: 18446744073709551615", 1), "specific batch-byte-size"),
        (OLD.replace("byte_size: 64", "byte_size: 32", 1), "specific batch-byte-size"),
        (NEW.replace("dims: 16", 'shared_memory { name: "r" byte_size: 64 }', 1), "shared memory is not supported"),
        (NEW + ' output { name: "c" cls { count: 0 } }', "output 'c' asks for 0 classes"),
        ("nonsense", "unable to parse NV-InferRequest"), ("batch_size: 2 batch_size: 2", "unable to parse"),
        ("batch_size: -1", "unable to parse"), ("input {" * 5000, "unable to parse"), ("# " * 40_000, "over 65536 characters"),
        ('input { name: "\\xff" }', "unable to parse"), ("output { name: 'a' } " * 1025, "more than 1024"),
        ("".join(f"output {{ name: 'a{i}' }} " for i in range(1025)), "more than 1024 inputs or outputs"),
    ],
)  # fmt: skip
def test_a_header_that_is_wrong_is_refused(text: str, message: str):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (252, "unexpected size for input 'INPUT1', expecting 4 bytes for model 'add_sub'"),
        (0, "unexpected size for input 'INPUT0', expecting 128 bytes for model 'add_sub'"),
        (257, "unexpected additional input data for model 'add_sub'"),
    ],
)  # fmt: skip
def test_a_body_of_another_size_is_refused(nbytes: int, message: str):
    assert refusal(NEW, bytes(nbytes)) == message


def test_a_model_without_batches_takes_one():
    assert "batch-size must be <= 1 for 'plain'" in refusal(
        'batch_size: 2 input { name: "X" dims: [1, 3] }', bytes(24), PLAIN
    )
    assert decode('batch_size: 1 input { name: "X" dims: [1, 3] }', bytes(12), PLAIN).inputs[0].shape == (1, 3)


def test_tensors_that_come_one_by_one_are_judged_alike():
    head = parse_infer_head(NEW)
    request = decode_raw_inputs(head, [BODY[:128], BODY[128:]], "m", ADD_SUB)
    assert [bytes(tensor.data) for tensor in request.inputs] == [bytes(BODY[:128]), bytes(BODY[128:])]
    for raw, message in (
        ([BODY[:128]], "expected tensor data for 2 inputs but got 1 sets of data"),
        ([BODY[:128], BODY[:60]], "unexpected size 60 for input 'INPUT1', expecting 128"),
    ):
        with pytest.raises(BadRequest, match=message):
            decode_raw_inputs(head, raw, "m", ADD_SUB)


# --- replies ----------------------------------------------------------------------------------------------------------


def reply_of(*outputs: Tensor) -> TensorReply:
    return TensorReply(model="m", outputs=list(outputs), timing=Timing())


SUMS = reply_of(*[Tensor(f"OUTPUT{i}", "INT32", (2, 16), BODY[128 * i : 128 * i + 128]) for i in range(2)])


def test_a_reply_has_its_header_behind_the_tensors_and_in_one_line():
    head = parse_infer_head(NEW)
    body, line = encode_infer(head, SUMS, ADD_SUB, as_binary=False)
    assert line == (
        'model_name: "add_sub" model_version: 1 batch_size: 2 output { name: "OUTPUT0" raw { dims: 16 batch_byte_size: 128 } } '
        'output { name: "OUTPUT1" raw { dims: 16 batch_byte_size: 128 } } id: 7'
    )
    assert body[:256] == bytes(BODY)
    message = message_class("trtis", "nvidia.inferenceserver.InferResponseHeader")
    as_text = text_format.Parse(body[256:].decode(), message())
    binary, _ = encode_infer(head, SUMS, ADD_SUB, as_binary=True)
    assert message.FromString(binary[256:]) == as_text == text_format.Parse(line, message())
    assert body.endswith(b"\n")


def test_the_first_generation_reads_the_bytes_of_one_item():
    head = parse_infer_head(OLD)
    body, line = encode_infer(head, SUMS, ADD_SUB, as_binary=False)
    assert "raw { byte_size: 64 }" in line
    assert b"byte_size: 64" in body[256:]


def test_an_output_of_the_first_generation_has_the_size_that_was_announced():
    head = parse_infer_head(OLD.replace('"OUTPUT1" byte_size: 64', '"OUTPUT1" byte_size: 32'))
    with pytest.raises(BadRequest, match="unexpected size 32 for output 'OUTPUT1', expecting 64 for model 'add_sub'"):
        answered(head, SUMS, ADD_SUB)
    none = parse_infer_head(OLD.replace('"OUTPUT1" byte_size: 64', '"OUTPUT1"'))
    with pytest.raises(BadRequest, match="unexpected size 0 for output 'OUTPUT1', expecting 64 for model 'add_sub'"):
        answered(none, SUMS, ADD_SUB)
    of_classes = parse_infer_head(OLD.replace('"OUTPUT1" byte_size: 64', '"OUTPUT1" cls { count: 1 }'))
    for head in (of_classes, parse_infer_head(OLD), parse_infer_head(NEW)):
        assert [output.tensor for output in answered(head, SUMS, ADD_SUB)] == SUMS.outputs


@pytest.mark.parametrize("num_classes", [2000, 2500])  # the second number can never fit
def test_classes_stand_in_the_header_and_not_in_the_body(num_classes: int):
    head = parse_infer_head('batch_size: 1 input { name: "X" dims: [1, 3] } output { name: "prob" cls { count: 2 } }')
    spec = TensorSpec(name="prob", datatype="FP32", shape=(-1, 3), labels=("alpha", "beta", "gamma"))
    values = np.array([[1.0, 3.25, 6.0]], np.float32)
    reply = reply_of(Tensor("prob", "FP32", (1, 3), memoryview(values.tobytes())))
    body, line = encode_infer(head, reply, msgspec.structs.replace(PLAIN, outputs=(spec,)), as_binary=False)
    assert 'batch_classes { cls { idx: 2 value: 6.0 label: "gamma" } cls { idx: 1 value: 3.25 label: "beta" } }' in line
    assert body.startswith(b"model_name")
    many = parse_infer_head(
        f'batch_size: 1 input {{ name: "X" dims: [1, 3] }} output {{ name: "prob" cls {{ count: {num_classes} }} }}'
    )
    spec = msgspec.structs.replace(spec, labels=("label",) * num_classes)
    reply = reply_of(Tensor("prob", "FP32", (1, num_classes), memoryview(bytes(4 * num_classes))))
    body, line = encode_infer(many, reply, msgspec.structs.replace(PLAIN, outputs=(spec,)), as_binary=False)
    assert len(line) < 1000
    assert body.count(b"label:") == num_classes


_FLOATS = [0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, 1e-5, 16_777_216.0, 3.4028235e38, np.inf, -np.inf, np.nan]
_FEW_DIGITS = [1e-45, 1.1754944e-38, 6.82446e-41, *(2.0**power for power in range(-149, 128))]
_LABELS = [
    "",
    "plain",
    'a "quoted" text',
    "it's",
    "back\\slash",
    "tab\t",
    "line\nend",
    "\x00\x7f",
    "größe",
    "日本",
    "a b~ ",
]


def header_of_classes(name: str, values: list[float]) -> Any:
    message = message_class("trtis", f"nvidia.inferenceserver.{name}")(model_name="größe", batch_size=3)
    message.output.add(name="none").batch_classes.add()
    output = message.output.add(name="o")
    for start in range(3):
        row = output.batch_classes.add()
        for index, value in enumerate(values[start:], -start):
            row.cls.add(idx=index, value=value, label=_LABELS[index % len(_LABELS)])
    return message


@pytest.mark.parametrize("name", ["InferResponseHeader", "InferResponseHeaderOfFirstGeneration"])
def test_classes_are_written_as_the_library_writes_them(name: str):
    drawn = np.random.default_rng(0).standard_normal(2000, np.float32)
    message = header_of_classes(name, [*_FLOATS, *drawn.tolist()])
    assert in_lines(message) == text_format.MessageToString(message)
    assert one_line(message) == text_format.MessageToString(message, as_one_line=True, as_utf8=False).rstrip()


def test_a_value_of_a_class_is_read_as_the_same_value():
    drawn = np.random.default_rng(0).integers(0, 0x7F80_0000, 2000, np.uint32).view(np.float32)
    message = header_of_classes("InferResponseHeader", [*_FLOATS[:-1], *_FEW_DIGITS, *drawn.tolist()])
    for text in (in_lines(message), one_line(message)):
        assert text_format.Parse(text, type(message)()) == message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("x"), "INVALID_ARG"), (NotFound("x"), "NOT_FOUND"), (Overloaded("x"), "UNAVAILABLE"),
        (DeadlineExceeded("x"), "UNAVAILABLE"), (Internal("x"), "INTERNAL"), (SieError("x"), "UNKNOWN"),
    ],
)  # fmt: skip
def test_every_failure_has_its_code(error: SieError, code: str):
    line = status_line(status_of(error))
    assert line.startswith(f'code: {code} msg: "x" server_id: "inference:0" request_id: ')


def test_a_status_line_is_one_line_of_ascii_whatever_the_message_holds():
    line = status_line(status_of(BadRequest('a\nb\r"c"\0\N{SNOWMAN}' + "x" * 5000)))
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 1200


def test_a_server_status_reads_back_in_every_form():
    requests = {
        2: RequestStatistics(count=3, success_ns=30, input_ns=1, infer_ns=2, output_ns=3, num_failed=1, failed_ns=4)
    }
    statistics = ModelStatistics(
        num_succeeded=3, num_failed=3, failure_ns=9, requests=requests, num_rows=7, num_steps=2, last_used_ms=5
    )
    models = [Described(ADD_SUB, "loaded", "", statistics), Described(PLAIN, "failed", "no memory", ModelStatistics())]
    message = server_status(ServerState("SERVER_READY", 9, models))
    assert message.model_status["add_sub"].config.input[0].dims == [16]
    assert message.model_status["add_sub"].version_status[1].model_inference_count == 7
    stats = message.model_status["add_sub"].version_status[1].infer_stats
    assert (stats[2].success.count, stats[2].compute.total_time_ns, stats[2].compute_output.total_time_ns) == (3, 6, 3)
    assert (stats[0].success.count, stats[0].failed.count, stats[0].failed.total_time_ns) == (0, 2, 5)
    assert message.model_status["plain"].version_status[4].ready_state_reason.message == "no memory"
    kind, binary = encode_message(message, "binary")
    assert (kind, type(message).FromString(binary)) == ("application/octet-stream", message)
    assert text_format.Parse(encode_message(message, "text")[1].decode(), type(message)()) == message
    assert b'"ready_state": "MODEL_READY"' in encode_message(message, "json")[1]
    assert [model.name for model in repository_index(["a", "b"]).models] == ["a", "b"]


def test_long_headers_leave_no_memory_behind():
    """A client that sent hundreds of different ones held a hundred MiB of each frontend."""
    inputs = " ".join(f'input {{ name: "x{number}" dims: 1 dims: 2 }}' for number in range(500))
    tracemalloc.start()
    try:
        for number in range(10):
            parse_infer_head(f"batch_size: 1 id: {number} {inputs}")
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("query", "accept", "expected"),
    [("", "", "text"), ("format=binary", "", "binary"), ("a=1&format=json", "", "json"), ("format=x", "application/json", "text"),
     ("", "application/json", "json"), ("", "application/json, */*", "text")],
)  # fmt: skip
def test_the_form_of_a_status_is_chosen(query: str, accept: str, expected: str):
    assert choose_format(query, accept) == expected
