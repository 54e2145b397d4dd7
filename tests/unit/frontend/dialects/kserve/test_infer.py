"""The KServe v2 wire of inference: requests as Triton's own client writes them, replies as it reads them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.http as triton

from sie.config.limits import Limits
from sie.frontend.dialects.kserve.infer import InferCall, decode_infer, encode_infer
from sie.frontend.tensors.classification import as_class_tensor
from sie.values.bytes_tensor import frame_elements, split_elements
from sie.values.errors import BadRequest
from sie.values.inference import Timing
from sie.values.tensor import Tensor, TensorReply, TensorRule, TensorSpec

LIMITS = Limits(max_tensor_values=1000)
RULE = TensorRule(
    name="m", version="3", platform="stub", max_batch_size=8,
    inputs=(TensorSpec(name="A", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="Y", datatype="FP32", shape=(-1, 4), labels=("zero", "one")),),
)  # fmt: skip
A = np.arange(8, dtype=np.float32).reshape(2, 4)


def decode(
    body: bytes | dict[str, Any], length: str | None = None, rule: TensorRule = RULE, **limits: Any
) -> InferCall:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    return decode_infer(data, length, "m/versions/3", rule, Limits(max_tensor_values=1000, **limits))


def refusal(body: bytes | dict[str, Any], length: str | None = None, rule: TensorRule = RULE) -> str:
    with pytest.raises(BadRequest) as caught:
        decode(body, length, rule)
    return caught.value.message


def an_input(**changes: Any) -> dict[str, Any]:
    return {"name": "A", "shape": [2, 4], "datatype": "FP32", "data": A.tolist()} | changes


def with_tail(body: dict[str, Any], tail: bytes) -> tuple[bytes, str]:
    text = json.dumps(body).encode()
    return text + tail, str(len(text))


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_bodies_that_differ_in_their_binary_data_alone_keep_it():
    """They share what is read of their JSON."""
    body = {"inputs": [{"name": "A", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}]}
    for values in (A, A + 1):
        np.testing.assert_array_equal(array(decode(*with_tail(body, values.tobytes())).request.inputs[0]), values)
    for _ in range(2):
        assert "expecting 4 additional bytes" in refusal(*with_tail(body, A.tobytes()[:-4]))
        assert "unexpected additional input data" in refusal(*with_tail(body, A.tobytes() + b"more"))
    np.testing.assert_array_equal(array(decode(*with_tail(body, A.tobytes())).request.inputs[0]), A)


@pytest.mark.parametrize("is_binary", [False, True])
def test_a_request_of_the_client(is_binary: bool):
    first, second = triton.InferInput("A", [2, 4], "FP32"), triton.InferInput("S", [2, 1], "BYTES")
    first.set_data_from_numpy(A, binary_data=is_binary)
    second.set_data_from_numpy(np.array([[b"x"], ["\N{SNOWMAN}".encode()]], object), binary_data=True)
    outputs = [triton.InferRequestedOutput("Y", binary_data=True), triton.InferRequestedOutput("Z", binary_data=False),
               triton.InferRequestedOutput("C", binary_data=False, class_count=2)]  # fmt: skip
    body, length = triton.InferenceServerClient.generate_request_body(
        [first, second], outputs=outputs, request_id="r1", priority=2, timeout=5000, parameters={"mine": "x"}
    )
    call = decode(body, None if length is None else str(length))
    request = call.request
    assert (request.model, request.id, request.priority, request.timeout_us) == ("m/versions/3", "r1", 2, 5000)
    np.testing.assert_array_equal(array(request.inputs[0]), A)
    assert split_elements(request.inputs[1].data) == [b"x", "\N{SNOWMAN}".encode()]
    assert request.outputs == ("Y", "Z", "C")
    assert [(wanted.is_binary, wanted.num_classes) for wanted in call.wanted] == [(True, 0), (False, 0), (False, 2)]


def test_a_request_of_the_client_without_outputs_wants_all_as_binary():
    tensor = triton.InferInput("A", [2, 4], "FP32").set_data_from_numpy(A)
    body, length = triton.InferenceServerClient.generate_request_body([tensor])
    call = decode(body, str(length))
    assert (call.request.outputs, call.is_binary) == ((), True)


def test_the_size_of_a_binary_input_may_be_left_out():
    entry = {"name": "A", "shape": [2, 4], "datatype": "FP32"}
    body, length = with_tail({"inputs": [entry, entry]}, A.tobytes() + (2 * A).tobytes())
    first, second = decode(body, length).request.inputs
    np.testing.assert_array_equal(array(second), 2 * array(first))
    image = {"inputs": [{"name": "I", "shape": [1], "datatype": "BYTES"}]}
    for tail in (b"JPEG", frame_elements([b"JPEG"])):
        (tensor,) = decode(*with_tail(image, tail)).request.inputs
        assert split_elements(tensor.data) == [b"JPEG"]
    image["inputs"][0]["shape"] = [2]
    assert "needs the parameter 'binary_data_size'" in refusal(*with_tail(image, frame_elements([b"a", b"b"])))


def test_data_of_both_kinds_in_one_request():
    entries = [an_input(), {"name": "B", "shape": [3], "datatype": "UINT8", "parameters": {"binary_data_size": 3}}]
    first, second = decode(*with_tail({"inputs": entries}, b"\1\2\3")).request.inputs
    assert (bytes(first.data), bytes(second.data)) == (A.tobytes(), b"\1\2\3")


def test_an_output_asked_for_twice_comes_once_and_its_own_word_wins():
    outputs = [{"name": "Y", "parameters": {"binary_data": False}}, {"name": "Z"}, {"name": "Y"}]
    call = decode({"inputs": [an_input()], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert [(wanted.name, wanted.is_binary) for wanted in call.wanted] == [("Y", False), ("Z", True)]


@pytest.mark.parametrize("sequence", [0, (1 << 64) - 1, "", "a"])
def test_a_request_may_name_its_sequence_and_use_all_of_64_bits(sequence: int | str):
    most = (1 << 64) - 1
    parameters = {
        "sequence_id": sequence,
        "sequence_start": True,
        "sequence_end": False,
        "priority": most,
        "timeout": most,
    }
    request = decode({"inputs": [an_input()], "parameters": parameters}).request
    assert (request.priority, request.timeout_us) == (most, most)


def test_unknown_members_are_ignored():
    assert decode({"model_name": "other", "inputs": [an_input(more=1)], "x": [{}]}).request.model == "m/versions/3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datatype": "STRING"}, "invalid datatype 'STRING' for input A"),
        ({"datatype": 3}, "Expected `str`, got `int` - at `$.inputs[0].datatype`"),
        ({"shape": [-1, 4]}, "Expected `int` >= 0"),
        ({"shape": [2.5]}, "$.inputs[0].shape[0]"),
        ({"shape": ["2"]}, "Expected `int`, got `str`"),
        ({"shape": [1] * 33}, "length <= 32"),
        ({"shape": [1 << 62, 1 << 62]}, "over max_tensor_values (1000)"),
        ({"shape": [0, 1 << 62]}, "Shape does not match"),
        ({"shape": [1 << 64]}, "shape"),
        ({"data": [[1, 2]]}, "Shape does not match true shape of 'data' field"),
        ({"parameters": {"binary_data_size": 32}}, "But set 'data' 'binary_data_size'"),
        ({"parameters": {"x": {"a": 1}}}, "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ({"parameters": {"shared_memory_region": "r"}}, "'A': parameter 'shared_memory_byte_size' is missing"),
        ({"parameters": {"shared_memory_region": 3}}, "'shared_memory_region' must be the name of a region"),
        ({"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 32}}, "But set 'data' 'shared_memory_region'"),
        ({"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": -1}}, "'shared_memory_byte_size' must be"),
    ],
)  # fmt: skip
def test_an_input_that_is_wrong_is_named(changes: dict[str, Any], message: str):
    assert message in refusal({"inputs": [an_input(**changes)]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "$.inputs"), ({"id": 3}, "$.id"),
        ({"inputs": [{}]}, "missing required field `name`"), ({"outputs": [{}]}, "missing required field `name`"),
        ({"parameters": []}, "$.parameters"), ({"parameters": {"timeout": -1}}, "parameter 'timeout'"),
        ({"parameters": {"priority": "high"}}, "parameter 'priority'"),
        ({"parameters": {"binary_data_output": 1}}, "parameter 'binary_data_output' must be a bool"),
        ({"parameters": {"triton_x": 1}}, "parameter 'triton_x' starts with 'triton_'"),
        ({"parameters": {"triton_enable_empty_final_response": True}}, "which is reserved"),
        ({"parameters": {"sequence_id": -1}}, "parameter 'sequence_id' must be an integer from 0, or a string"),
        ({"parameters": {"sequence_id": True}}, "parameter 'sequence_id'"),
        ({"parameters": {"sequence_start": 1}}, "parameter 'sequence_start' must be a bool"),
        ({"parameters": {"sequence_end": "true"}}, "parameter 'sequence_end' must be a bool"),
        ({"parameters": {"timeout": 1 << 64}}, "parameter 'timeout'"),
        ({"outputs": [{"name": "Y", "parameters": {"classification": -1}}]}, "parameter 'classification'"),
        ({"outputs": [{"name": "Y", "parameters": {"shared_memory_region": "r"}}]}, "'shared_memory_byte_size' is missing"),
        ({"outputs": [{"name": "Y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 1, "binary_data": True}}]},
         "shared memory excludes 'binary_data'"),
    ],
)  # fmt: skip
def test_a_request_that_is_wrong_is_refused(changes: dict[str, Any], message: str):
    assert message in refusal({"inputs": [an_input()]} | changes)


COUNTLESS = {f"p{number:0100}": number for number in range(700)}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"parameters": COUNTLESS}, "$.parameters"),
        ({"inputs": [an_input(parameters=COUNTLESS)]}, "$.inputs[name=A].parameters"),
        ({"outputs": [{"name": "Y", "parameters": COUNTLESS}]}, "$.outputs[name=Y].parameters"),
    ],
)
def test_countless_parameters_are_refused_before_they_are_read(body: dict[str, Any], where: str):
    """A million of them held the interpreter for two seconds."""
    assert f"Field '{where}' must hold at most 65536 bytes" in refusal({"inputs": [an_input()]} | body)


def test_parameters_may_be_null():
    body = {"inputs": [an_input(parameters=None)], "outputs": [{"name": "Y", "parameters": None}], "parameters": None}
    assert decode(body).request.parameters == {}


BINARY = {"name": "A", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}


@pytest.mark.parametrize(
    ("size", "tail", "message"),
    [
        (32, b"x" * 28, "unexpected size for input 'A', expecting 4 additional bytes for model 'm'"),
        (32, b"x" * 33, "unexpected additional input data for model 'm'"),
        (1 << 62, b"x" * 32, "additional bytes for model 'm'"),
        (-1, b"x" * 32, "parameter 'binary_data_size'"), ("32", b"x" * 32, "parameter 'binary_data_size'"),
        (True, b"x", "parameter 'binary_data_size'"), (3.5, b"x", "parameter 'binary_data_size'"),
    ],
)  # fmt: skip
def test_a_size_that_lies_is_refused(size: Any, tail: bytes, message: str):
    assert message in refusal(*with_tail({"inputs": [BINARY | {"parameters": {"binary_data_size": size}}]}, tail))


@pytest.mark.parametrize("length", ["-1", "99999", "1e3", "abc", "", "9" * 60, "\N{ARABIC-INDIC DIGIT ONE}", "--3"])
def test_a_length_of_the_json_that_lies_is_refused(length: str):
    assert "nference" in refusal(with_tail({"inputs": [BINARY]}, A.tobytes())[0], length)


def test_missing_body_is_not_a_raw_body():
    assert "truncated" in refusal(b"")


def test_no_data_at_all_is_refused():
    assert "But no field is set for input 'A'" in refusal({"inputs": [{"name": "A", "shape": [1], "datatype": "FP32"}]})


def test_depth_and_values_are_bounded_before_decoding():
    assert "at most" in refusal(b"[" * 1_000_000)
    assert "nested too deep" in refusal({"inputs": [an_input(data=json.loads("[" * 70 + "]" * 70))]})
    assert "values" in refusal(b'{"inputs":[' + b"{}," * 50_000 + b"{}]}")


# --- raw bodies -------------------------------------------------------------------------------------------------------


def raw_rule(shape: tuple[int, ...], datatype: str = "FP32", max_batch_size: int = 0) -> TensorRule:
    spec = TensorSpec(name="A", datatype=datatype, shape=shape)
    return TensorRule(name="m", version="1", platform="stub", inputs=(spec,), outputs=(), max_batch_size=max_batch_size)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(raw_rule((2, 4)), (2, 4)), (raw_rule((-1, 4)), (2, 4)), (raw_rule((-1, 8), max_batch_size=4), (1, 8)),
     (raw_rule((-1, -1), max_batch_size=4), (1, 8))],
)  # fmt: skip
def test_a_raw_body_is_the_only_input(rule: TensorRule, expected: tuple[int, ...]):
    call = decode(A.tobytes(), "0", rule)
    (tensor,) = call.request.inputs
    assert (tensor.shape, bytes(tensor.data), call.is_binary) == (expected, A.tobytes(), True)


def test_a_raw_body_of_bytes_is_one_element():
    (tensor,) = decode(b"JPEG", "0", raw_rule((1,), "BYTES")).request.inputs
    assert (tensor.shape, split_elements(tensor.data)) == ((1,), [b"JPEG"])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (raw_rule((2, 5)), "input byte size mismatch for input 'raw_input' for model 'm'. Expected 40, got 32"),
        (raw_rule((-1, 5)), "input byte size mismatch"), (raw_rule((-1, -1)), "more than one variable-sized dimension"),
        (raw_rule((2,), "BYTES"), "must have input shape [1]"), (raw_rule((-1,), "BYTES"), "must have input shape [1]"),
        (raw_rule((-1, -1), "BYTES"), "more than one variable-sized dimension"), (raw_rule((-1, 0)), "input byte size mismatch"),
        (TensorRule(name="m", version="1", platform="", inputs=RULE.inputs * 2, outputs=()), "got 2 inputs in 'm'"),
    ],
)  # fmt: skip
def test_a_raw_body_whose_shape_cannot_be_known_is_refused(rule: TensorRule, message: str):
    assert message in refusal(A.tobytes(), "0", rule)


# --- images and priorities ----------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n rest"
IMAGES = raw_rule((-1, 8, 6, 3), max_batch_size=4)


@pytest.mark.parametrize("data", [["iVBORw0KGgogcmVzdA=="], [{"b64": "iVBORw0KGgogcmVzdA=="}]])
def test_images_come_as_base64_in_json(data: list[Any]):
    body = {"inputs": [an_input(shape=[1], datatype="BYTES", data=data)]}
    (tensor,) = decode(body, rule=IMAGES).request.inputs
    assert (tensor.datatype, tensor.shape, split_elements(tensor.data)) == ("BYTES", (1,), [PNG])


@pytest.mark.parametrize(
    ("data", "message"),
    [(["no base64!"], "Base64"), ([{"b64": 1}], "Base64"), ([{"b64": "", "x": 1}], "Shape does not match"), ([], "Shape does not match"),
     (["", ""], "Shape does not match"), ("text", "Base64"), ([["iVBORw0KGgo="]], "Base64")],
)  # fmt: skip
def test_what_is_no_list_of_images_is_refused(data: Any, message: str):
    assert message in refusal({"inputs": [an_input(shape=[1], datatype="BYTES", data=data)]}, rule=IMAGES)


@pytest.mark.parametrize("body", [PNG, b"\xff\xd8\xff\xe0 jpeg"])
def test_a_raw_body_that_does_not_fit_may_be_an_image(body: bytes):
    (tensor,) = decode(body, "0", IMAGES).request.inputs
    assert (tensor.shape, split_elements(tensor.data)) == ((1,), [body])
    assert "byte size mismatch" in refusal(b"GIF", "0", IMAGES)
    (pixels,) = decode(PNG.ljust(576, b"."), "0", IMAGES).request.inputs
    assert pixels.shape == (1, 8, 6, 3)


def test_a_priority_is_one_that_the_model_has():
    def priority(value: Any, levels: int) -> int:
        rule = msgspec.structs.replace(RULE, num_priorities=levels)
        return decode({"inputs": [an_input()], "parameters": {"priority": value}}, rule=rule).request.priority

    assert (priority(0, 3), priority(3, 3), priority(9, 0)) == (0, 3, 9)
    for wrong, levels in ((4, 3), (-1, 3), (-1, 0), ("1", 3), (1.5, 3), (True, 3), (1 << 64, 0)):
        with pytest.raises(BadRequest, match="'priority'"):
            priority(wrong, levels)


# --- replies ----------------------------------------------------------------------------------------------------------


def reply_of(*tensors: Tensor) -> TensorReply:
    return TensorReply(model="m/versions/3", outputs=list(tensors), timing=Timing())


Y = Tensor("Y", "FP32", (2, 4), memoryview(A.tobytes()))
S = Tensor("S", "BYTES", (2,), memoryview(frame_elements([b"a", b"bc"])))


@pytest.mark.parametrize("is_binary", [False, True])
def test_a_reply_is_read_by_the_client(is_binary: bool):
    call = decode({"id": "r1", "inputs": [an_input()], "parameters": {"binary_data_output": is_binary}})
    body, length = encode_infer(call, reply_of(Y, S), RULE)
    result = triton.InferenceServerClient.parse_response_body(body, header_length=length)
    np.testing.assert_array_equal(result.as_numpy("Y"), A)
    assert [value if isinstance(value, bytes) else value.encode() for value in result.as_numpy("S")] == [b"a", b"bc"]
    head = result.get_response()
    assert (head["model_name"], head["model_version"], head["id"]) == ("m", "3", "r1")
    assert (length is not None) == is_binary


def test_a_reply_mixes_both_forms_in_the_order_asked_for():
    outputs = [{"name": "S", "parameters": {"binary_data": True}}, {"name": "Y"}]
    body, length = encode_infer(decode({"inputs": [an_input()], "outputs": outputs}), reply_of(S, Y), RULE)
    assert length is not None
    head = json.loads(body[:length])
    assert [output["name"] for output in head["outputs"]] == ["S", "Y"]
    assert head["outputs"][0] == {
        "name": "S",
        "datatype": "BYTES",
        "shape": [2],
        "parameters": {"binary_data_size": 11},
    }
    assert head["outputs"][1]["data"] == A.ravel().tolist()
    assert (body[length:], "id" in head) == (frame_elements([b"a", b"bc"]), False)


def test_an_empty_binary_output_says_so():
    call = decode({"inputs": [an_input()], "parameters": {"binary_data_output": True}})
    body, length = encode_infer(call, reply_of(Tensor("Y", "FP32", (0, 4), memoryview(b""))), RULE)
    assert length == len(body)
    assert json.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 0}


@pytest.mark.parametrize(
    ("values", "datatype", "expected"),
    [
        ([[1, 5, 3, 5]], "<f4", [b"5.000000:1:one", b"5.000000:3"]),
        ([[-7, -1, -9, -8]], "<i8", [b"-1:1:one", b"-7:0:zero"]),
        ([[1, 2, 3, 250], [9, 0, 0, 0]], "|u1", [b"250:3", b"3:2", b"9:0:zero", b"0:1:one"]),
    ],
)  # fmt: skip
def test_classes_are_the_largest_elements_of_each_item(values: list[list[int]], datatype: str, expected: list[bytes]):
    names = {"<f4": "FP32", "<i8": "INT64", "|u1": "UINT8"}
    data = np.array(values, datatype)
    found = as_class_tensor(
        Tensor("Y", names[datatype], data.shape, memoryview(data.tobytes())), RULE.outputs[0], 2, is_batched=True
    )
    assert (found.datatype, found.shape, split_elements(found.data)) == ("BYTES", (len(values), 2), expected)


@pytest.mark.parametrize(
    ("shape", "num_bytes", "expected"), [((), 4, (1, 1)), ((0, 4), 0, (0, 0)), ((2, 0), 0, (2, 0))]
)
def test_an_output_without_rows_or_elements_has_no_classes(
    shape: tuple[int, ...], num_bytes: int, expected: tuple[int, ...]
):
    output = Tensor("Y", "FP32", shape, memoryview(bytes(num_bytes)))
    assert as_class_tensor(output, RULE.outputs[0], 3, is_batched=True).shape == expected


def test_more_classes_than_there_are_are_clipped():
    found = as_class_tensor(Y, RULE.outputs[0], 30, is_batched=False)
    assert (found.shape, split_elements(found.data)[0]) == ((8,), b"7.000000:7")
    with pytest.raises(BadRequest, match="unsupported type 'BYTES'"):
        as_class_tensor(S, RULE.outputs[0], 1, is_batched=True)
