"""The v1 gRPC wire of inference, both generations of it."""

from __future__ import annotations

import pytest

from sie.frontend.dialects.trtis import infer_protobuf, status
from sie.frontend.dialects.trtis.infer import InferHead, InputHead, OutputHead
from sie.frontend.tensors.model_paths import check_version
from sie.proto import message_class
from sie.values.errors import BadRequest
from sie.values.inference import Timing
from sie.values.tensor import Tensor, TensorReply, TensorRule

HEADER = message_class("trtis", "nvidia.inferenceserver.InferRequestHeader")
REQUEST = message_class("trtis", "nvidia.inferenceserver.InferRequest")
RESPONSE = message_class("trtis", "nvidia.inferenceserver.InferResponse")
RESPONSE_HEADER = message_class("trtis", "nvidia.inferenceserver.InferResponseHeader")


def test_a_request_of_the_second_generation():
    header = HEADER(
        batch_size=2, id=7, input=[{"name": "x", "dims": [4], "batch_byte_size": 32}], output=[{"name": "y"}]
    )
    parsed = infer_protobuf.parse_infer(
        REQUEST(
            model_name="m", model_version=-1, meta_data=header.SerializeToString(), raw_input=[b"ab", b""]
        ).SerializeToString()
    )
    assert (parsed.model, parsed.version, [bytes(view) for view in parsed.raw]) == ("m", "", [b"ab", b""])
    head = infer_protobuf.parse_head(parsed.header)
    assert (head.batch_size, head.id, head.is_first_generation) == (2, 7, False)
    assert (head.inputs, head.outputs) == ((InputHead("x", (4,), 32, 0),), (OutputHead("y", None),))


def test_a_request_of_the_first_generation_shows_in_its_bytes():
    one_input = b"\x0a\x01x\x10\x40"  # name "x", byte_size 64
    header = b"\x08\x02" + b"\x12" + bytes([len(one_input)]) + one_input
    head = infer_protobuf.parse_head(header)
    assert (head.is_first_generation, head.inputs) == (True, (InputHead("x", (), 0, 64),))


@pytest.mark.parametrize(
    ("field", "version"), [(b"\x10\x03", "3"), (b"\x12\x013", "3"), (b"\x12\x00", ""), (b"", ""), (b"\x10\x00", "")]
)
def test_a_version_is_a_number_or_a_text(field: bytes, version: str):
    assert infer_protobuf.parse_infer(b"\x0a\x01m" + field).version == version


def test_a_version_that_is_no_number_is_refused():
    version = infer_protobuf.parse_infer(b"\x0a\x01m\x12\x02-x").version
    with pytest.raises(BadRequest, match="invalid model version '-x'"):
        check_version(version)
    for good in ("", "3", "9" * 30):
        check_version(good)


def test_replies_are_read_by_the_message_class():
    rule = TensorRule(name="m", version="3", platform="stub", inputs=(), outputs=())
    outputs = [
        Tensor("y", "UINT8", (2,), memoryview(b"ab")),
        Tensor("z", "UINT8", (0,), memoryview(b"")),
    ]
    head = InferHead(batch_size=1, inputs=(), outputs=(OutputHead("y", None), OutputHead("z", None)), id=7)
    data = infer_protobuf.encode_infer(head, TensorReply(model="m", outputs=outputs, timing=Timing()), rule)
    read = RESPONSE.FromString(data)
    assert (read.request_status.code, list(read.raw_output)) == (1, [b"ab", b""])
    header = RESPONSE_HEADER.FromString(read.meta_data)
    assert (header.model_name, header.model_version, header.id) == ("m", 3, 7)
    assert [output.raw.batch_byte_size for output in header.output] == [2, 0]
    failure = RESPONSE.FromString(infer_protobuf.encode_failure(status.status_of(BadRequest("no")), 9))
    assert (failure.request_status.code, failure.request_status.msg) == (5, "no")
    assert RESPONSE_HEADER.FromString(failure.meta_data).id == 9


def test_an_id_is_found_in_a_good_header_alone():
    assert infer_protobuf.id_of(HEADER(id=5).SerializeToString()) == 5
    assert infer_protobuf.id_of(b"\xff") == 0


def test_header_of_countless_fields_is_refused_and_of_countless_dims_is_cut():
    with pytest.raises(BadRequest, match="too many fields"):
        infer_protobuf.parse_head(b"\x12\xe8\x07" + b"\x78\1" * 500)
    head = infer_protobuf.parse_head(HEADER(input=[{"name": "x", "dims": [1] * 50_000}]).SerializeToString())
    assert len(head.inputs[0].dims) == 33


def test_a_long_header_is_refused_before_it_is_read():
    header = HEADER(id=5, input=[{"name": "x", "dims": [1] * 70_000}]).SerializeToString()
    with pytest.raises(BadRequest, match="the request's header is over 65536 bytes"):
        infer_protobuf.parse_head(header)
    assert infer_protobuf.id_of(header) == 0
