"""The KServe v2 gRPC wire of inference: messages to typed requests, replies to messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sie.frontend.dialects.kserve import infer_protobuf
from sie.frontend.dialects.kserve.infer import InferCall
from sie.frontend.dialects.kserve.protobuf_wire import MalformedMessage, parse, parse_with_views, wire_fields
from sie.proto import message_class
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest
from sie.values.inference import Timing
from sie.values.tensor import DATATYPES, RegionPart, Tensor, TensorReply, TensorRequest, TensorRule, TensorSpec
from tests.unit.frontend.inputs.test_json_parts import longest_turn_s

REQUEST = message_class("kserve", "inference.ModelInferRequest")
RESPONSE = message_class("kserve", "inference.ModelInferResponse")
RULE = TensorRule(
    name="m", version="3", platform="stub", inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1,)),),
)  # fmt: skip
TIMING = Timing(queue_ms=0, tokenization_ms=0, inference_ms=0, postprocessing_ms=0, total_ms=0)
TYPED: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False]), "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(1 << 15), 5]), "INT32": ("int_contents", [-(1 << 31), 5]),
    "INT64": ("int64_contents", [-(1 << 63), 5]), "UINT8": ("uint_contents", [255, 0]),
    "UINT16": ("uint_contents", [65535, 0]), "UINT32": ("uint_contents", [(1 << 32) - 1, 0]),
    "UINT64": ("uint64_contents", [(1 << 64) - 1, 0]), "FP32": ("fp32_contents", [0.5, float("inf")]),
    "FP64": ("fp64_contents", [0.1, float("nan")]),
}  # fmt: skip


def decoded(message: Any, max_values: int = 100) -> InferCall:
    return infer_protobuf.decode_infer(
        infer_protobuf.parse_infer(*infer_protobuf.cut_raw(message.SerializeToString())),
        "m/versions/3",
        RULE,
        max_values,
    )


def refusal(message: Any, max_values: int = 100) -> str:
    with pytest.raises(BadRequest) as caught:
        decoded(message, max_values)
    return caught.value.message


def asking(
    datatype: str = "FP32", shape: tuple[int, ...] = (2,), raw: list[bytes] | None = None, **contents: Any
) -> Any:
    message = REQUEST(model_name="m", raw_input_contents=raw or [])
    message.inputs.add(name="x", datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(message.inputs[0].contents, field).extend(values)
    return message


def test_everything_a_request_says_is_read():
    message = asking(raw=[b"12345678"])
    message.id = "an id"
    message.parameters["priority"].uint64_param = 3
    message.parameters["timeout"].int64_param = 4000
    message.parameters["mine"].double_param = 0.5
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    call = decoded(message)
    request = call.request
    assert (request.model, request.id, request.priority, request.timeout_us) == ("m/versions/3", "an id", 3, 4000)
    assert (request.outputs, call.wanted[0].num_classes) == (("y",), 2)
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs] == [("x", "FP32", (2,), b"12345678")]


def test_requests_that_differ_in_their_elements_alone_keep_them():
    """They share what is read of the rest."""
    first, second = (decoded(asking(raw=[data])) for data in (b"12345678", b"abcdefgh"))
    assert [bytes(call.request.inputs[0].data) for call in (first, second)] == [b"12345678", b"abcdefgh"]
    shorter = decoded(asking(raw=[b"1234"]))
    assert len(shorter.request.inputs[0].data) == 4, "whether that is enough is judged against the model"
    refused = asking(raw=[b"12345678", b"more"])
    for _ in range(2):
        assert "different than number of inputs" in refusal(refused)


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_elements_are_what_numpy_packs(datatype: str):
    field, values = TYPED[datatype]
    (tensor,) = decoded(asking(datatype, **{field: values})).request.inputs
    assert bytes(tensor.data) == np.array(values, DATATYPES[datatype]).tobytes()


def test_typed_strings_are_framed_and_no_elements_are_none():
    (tensor,) = decoded(asking("BYTES", bytes_contents=[b"", b"ab"])).request.inputs
    assert bytes(tensor.data) == frame_elements([b"", b"ab"])
    assert bytes(decoded(asking(shape=(0, 4))).request.inputs[0].data) == b""


def with_parameter(message: Any, name: str, **value: Any) -> Any:
    parameter = message.inputs[0].parameters[name] if name == "shared_memory_region" else message.parameters[name]
    for field, content in value.items():
        setattr(parameter, field, content)
    return message


def in_region(message: Any) -> Any:
    parameters = message.inputs[0].parameters
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_byte_size"].int64_param = 8
    return message


def test_inputs_and_outputs_in_shared_memory_are_told_apart_from_those_that_are_sent():
    message = in_region(asking())
    message.inputs.add(name="z", datatype="FP32", shape=[1])
    message.raw_input_contents.append(b"abcd")
    wanted = message.outputs.add(name="y")
    for name, field, value in (
        ("region", "string_param", "out"),
        ("offset", "int64_param", 4),
        ("byte_size", "int64_param", 8),
    ):
        setattr(wanted.parameters[f"shared_memory_{name}"], field, value)
    request = decoded(message).request
    assert [(tensor.part, bytes(tensor.data)) for tensor in request.inputs] == [
        (RegionPart("r", 0, 8), b""),
        (None, b"abcd"),
    ]
    assert request.stores == {"y": RegionPart("out", 4, 8)}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (asking(raw=[b""], fp32_contents=[1, 2]), "contents field must not be specified when using raw_input_contents"),
        (asking(raw=[b"", b""]), "Size of raw_input_contents: 2 is different than number of inputs: 1"),
        (REQUEST(inputs=[{"name": "x"}, {"name": "z"}], raw_input_contents=[b""]), "unable to find data for input tensor 'z'"),
        (asking(int_contents=[1, 2]), "must be sent in fp32_contents, not in int_contents"),
        (asking(fp32_contents=[1]), "Shape does not match"),
        (asking(fp32_contents=[1, 2], bool_contents=[True]), "not in bool_contents"),
        (asking(shape=(-1, -2), fp32_contents=[1, 2]), "Shape does not match"),
        (asking(shape=(1 << 62, 1 << 62), fp32_contents=[1, 2]), "Shape does not match"),
        (asking("FP16", fp32_contents=[1, 2]), "must be sent in raw_input_contents"),
        (asking("FP8", fp32_contents=[1, 2]), "invalid datatype 'FP8'"),
        (asking("INT8", int_contents=[128, 0]), "does not fit into INT8"),
        (asking("UINT16", uint_contents=[65536, 0]), "does not fit into UINT16"),
        (asking(shape=(101,), fp32_contents=[0.0] * 101), "over max_tensor_values"),
        (with_parameter(asking(raw=[b""]), "priority", int64_param=-1), "'priority' must be an integer"),
        (with_parameter(asking(raw=[b""]), "timeout", string_param="1"), "'timeout' must be an integer"),
        (with_parameter(asking(raw=[b""]), "empty"), "parameter 'empty' has no value"),
        (with_parameter(asking(raw=[b""]), "triton_x", bool_param=True), "reserved"),
        (with_parameter(asking(raw=[b""]), "sequence_id", bool_param=True), "'sequence_id' must be an integer"),
        (with_parameter(asking(raw=[b""]), "sequence_start", int64_param=1), "'sequence_start' must be a bool"),
        (with_parameter(asking(raw=[b""]), "shared_memory_region", string_param="r"), "'shared_memory_byte_size' is missing"),
        (in_region(asking(fp32_contents=[1, 2])), "is in shared memory, and its contents must not be set"),
        (in_region(asking(raw=[b""])), "Size of raw_input_contents: 1 is different than number of inputs: 0"),
        (REQUEST(outputs=[{"name": "y"}] * 1025), "at most 1024"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(message: Any, reason: str):
    assert reason in refusal(message)


@pytest.mark.parametrize("value", [{"int64_param": -5}, {"uint64_param": (1 << 64) - 1}, {"string_param": "a"}])
def test_a_sequence_has_an_id_of_64_bits_or_a_text(value: dict[str, Any]):
    decoded(with_parameter(asking(raw=[b"12345678"]), "sequence_id", **value))


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.inputs[0], lambda m: m.outputs.add(name="Y")])
def test_countless_parameters_are_refused(part: Callable[[Any], Any]):
    message = asking(raw=[bytes(8)])
    asked = part(message)
    for number in range(1025):
        asked.parameters[f"p{number}"].int64_param = number
    assert "at most 1024 parameters" in refusal(message)


def test_countless_parameters_of_tensors_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    message = asking(raw=[bytes(8)])
    for number in range(20_000):
        message.inputs[0].parameters[f"p{number}"].int64_param = number
    monkeypatch.setattr(infer_protobuf, "parse", None)
    assert "too many fields" in refusal(message)


@pytest.mark.parametrize("datatype", [*TYPED, "BYTES"])
def test_typed_elements_of_a_large_request_are_those_of_its_message(datatype: str):
    """They come packed and one by one, in two parts that are merged, and with strings of all lengths."""
    field, values = TYPED.get(
        datatype, ("bytes_contents", [b"", b"ab", b"c" * 127, b"d" * 128, b"e"] * 100 + [b"f" * 70_000])
    )
    times = 50_000 // len(values)
    message = asking(datatype, (1,), **{field: values * times})
    unpacked = b"".join(
        infer_protobuf.append_bytes(b"", 5, [one_by_one(field, values * (times // 10))]) for _ in range(2)
    )
    message.inputs.add().CopyFrom(asking(datatype, (len(values) * (times // 10) * 2,)).inputs[0])
    message.inputs[0].contents.MergeFrom(message.inputs[0].contents)
    message.inputs[0].shape[:] = [len(getattr(message.inputs[0].contents, field))]
    tensors = [message.inputs[0].SerializeToString(), message.inputs[1].SerializeToString() + unpacked]
    message.ClearField("inputs")
    data = infer_protobuf.append_bytes(message.SerializeToString(), 5, tensors)
    parsed = infer_protobuf.parse_infer(*infer_protobuf.cut_raw(data))
    found = infer_protobuf.decode_infer(parsed, "m/versions/3", RULE, 1 << 20).request.inputs
    pack = frame_elements if datatype == "BYTES" else lambda every: np.array(every, DATATYPES[datatype]).tobytes()
    assert [
        bytes(tensor.data) == pack(values * copies)
        for tensor, copies in zip(found, (2 * times, times // 10 * 2), strict=True)
    ] == [True] * 2


def one_by_one(field: str, values: list[Any]) -> bytes:
    """Return typed contents whose elements are not packed."""
    contents = message_class("kserve", "inference.InferTensorContents")
    number = contents.DESCRIPTOR.fields_by_name[field].number
    parts: list[bytes] = []
    for value in values:
        packed = contents(**{field: [value]}).SerializeToString()
        wire_type = {6: 5, 7: 1}.get(number, 0)
        parts.append(packed if number == 8 else bytes([number << 3 | wire_type]) + packed[2:])
    return b"".join(parts)


@pytest.mark.parametrize(
    ("contents", "shape", "reason"),
    [
        ({"bytes_contents": [b"x"] * 40_000}, (40_001,), "has 40000 elements and its shape is"),
        ({"bytes_contents": [b"x"] * 90_000}, (40_000,), "elements or more and its shape is"),
        ({"bytes_contents": [b"x"] * 90_000}, (90_000,), "over max_tensor_values"),
        ({"bytes_contents": [b"x"] * 40_000, "int_contents": [1]}, (40_000,), "not in int_contents"),
    ],
)  # fmt: skip
def test_a_fault_in_a_large_request_is_named(contents: dict[str, Any], shape: tuple[int, ...], reason: str):
    assert reason in refusal(asking("BYTES", shape, **contents), max_values=50_000)
    raw = asking("BYTES", shape, raw=[b""], **contents)
    assert "contents field must not be specified" in refusal(raw, max_values=50_000)


@pytest.mark.parametrize(
    "tensor", [{"shape": [1] * 200_000}, {"shape": [20_000]}], ids=["sizes", "numbers that are not packed"]
)  # fmt: skip
def test_countless_numbers_are_refused(tensor: dict[str, Any]):
    unpacked = b"" if len(tensor["shape"]) > 1 else infer_protobuf.append_bytes(b"", 5, [b"\x10\0" * 20_000])
    message = REQUEST(inputs=[{"name": "x", "datatype": "INT32"} | tensor]).inputs[0].SerializeToString() + unpacked
    data = infer_protobuf.append_bytes(b"", 5, [message])
    with pytest.raises(MalformedMessage, match="too many fields"):
        infer_protobuf.decode_infer(infer_protobuf.parse_infer(data, []), "m", RULE, 50_000)


@pytest.mark.timing
def test_countless_empty_strings_let_other_threads_run():
    data = asking("BYTES", (4_000_000,), bytes_contents=[b""] * 4_000_000).SerializeToString()

    def decode() -> InferCall:
        return infer_protobuf.decode_infer(infer_protobuf.parse_infer(data, []), "m", RULE, 4_000_000)

    whole_s, parts_s = (
        min(longest_turn_s(read) for _ in range(2)) for read in (lambda: REQUEST.FromString(data), decode)
    )
    assert parts_s < whole_s / 2


def test_typed_elements_of_several_pieces_keep_their_places():
    values = np.arange(40_000, dtype=np.int32)
    message = asking("INT32", (40_000,), int_contents=values.tolist())
    (found,) = decoded(message, max_values=40_000).request.inputs
    np.testing.assert_array_equal(np.frombuffer(found.data, np.int32), values)


def test_values_of_all_inputs_count_together():
    message = asking(shape=(60,), fp32_contents=[0.0] * 60)
    message.inputs.add().CopyFrom(message.inputs[0])
    assert "over max_tensor_values" in refusal(message)


def test_a_reply_is_read_by_the_message_class():
    outputs = [
        Tensor("y", "FP32", (2, 1), memoryview(b"12345678")), Tensor("z", "BYTES", (1,), memoryview(frame_elements([b"s"]))),
        Tensor("none", "INT8", (0,), memoryview(b"")), Tensor("long", "UINT8", (300,), memoryview(bytes(300))),
    ]  # fmt: skip
    call = InferCall(request=TensorRequest(model="m/versions/3", inputs=[], id="7"))
    reply = TensorReply(model="m/versions/3", outputs=outputs, timing=TIMING)
    read = RESPONSE.FromString(infer_protobuf.encode_infer(call, reply, RULE, is_final=True))
    assert (read.model_name, read.model_version, read.id) == ("m", "3", "7")
    assert read.parameters["triton_final_response"].bool_param
    assert [(o.name, o.datatype, tuple(o.shape)) for o in read.outputs] == [
        (t.name, t.datatype, t.shape) for t in outputs
    ]
    assert list(read.raw_output_contents) == [bytes(t.data) for t in outputs]
    streamed = message_class("kserve", "inference.ModelStreamInferResponse").FromString(
        infer_protobuf.stream_reply(infer_protobuf.encode_infer(call, reply, RULE))
    )
    assert (streamed.error_message, streamed.infer_response.id) == ("", "7")
    assert not streamed.infer_response.parameters


def test_views_are_what_the_message_class_reads():
    message = asking(raw=[b"", b"ab", b"c" * 1000])
    message.id = "after"
    rest, views = parse_with_views(REQUEST, message.SerializeToString(), 7)
    assert [bytes(view) for view in views] == list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    assert rest == message


def test_broken_bytes_are_refused_and_never_read_differently():
    rng = random.Random(3)
    good = asking(raw=[b"12345678", b"ab"]).SerializeToString()
    num_refused = 0
    for _ in range(3000):
        broken = bytearray(good[: rng.randrange(len(good) + 1)])
        for _ in range(rng.randrange(3)):
            if broken:
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        data = bytes(broken)
        try:
            rest, views = parse_with_views(REQUEST, data, 7)
        except MalformedMessage:
            num_refused += 1
            continue
        rest.raw_input_contents.extend(bytes(view) for view in views)
        assert rest == parse(REQUEST, data)
    assert 500 < num_refused < 3000


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05ab", b"\x00", b"\x0b", b"\xff" * 11, b"\x08", b"\x0d123", b"\x07"])
def test_bytes_that_are_no_message_are_refused(data: bytes):
    with pytest.raises(MalformedMessage):
        list(wire_fields(data))


@pytest.mark.parametrize("field", [b"\x3a\0", b"\x0a\0", b"\x78\1"], ids=["raw", "name", "unknown"])
def test_message_of_countless_fields_is_refused(field: bytes):
    """Eight million of them held the event loop for 2 to 9 s."""
    assert infer_protobuf.cut_raw(field * 1000)
    with pytest.raises(MalformedMessage, match="too many fields"):
        infer_protobuf.cut_raw(field * 20_000)
    with pytest.raises(MalformedMessage, match="too many fields"):
        parse(REQUEST, field * 20_000)


def test_id_of_a_refused_request_is_read():
    assert infer_protobuf.id_of(REQUEST(model_name="m", id="7", raw_input_contents=[b"x"]).SerializeToString()) == "7"
    assert infer_protobuf.id_of(b"\x1a\xff") == infer_protobuf.id_of(b"") == ""
