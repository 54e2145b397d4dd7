"""Decodes and encodes gRPC inference of the TensorRT Inference Server v1 API, in both of its generations. Pure.

Only the bytes of the request's header show the generation. Both use the same field number of an input: the first for
`byte_size`, one number, and the second for `dims`, a packed list. Source: TRTIS v1 sheet, sections 2 and 7.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf.unknown_fields import UnknownFieldSet

from sie.frontend.dialects.kserve.protobuf_wire import BYTES, VARINT, append_bytes, parse, parse_with_views, wire_fields
from sie.frontend.dialects.trtis.infer import MAX_HEADER_BYTES, InferHead, InputHead, answered, head_of, response_header
from sie.frontend.dialects.trtis.status import request_status
from sie.proto import message_class
from sie.values.errors import BadRequest
from sie.values.tensor import TensorReply, TensorRule

_PACKAGE: Final = "nvidia.inferenceserver"
_REQUEST: Final = message_class("trtis", f"{_PACKAGE}.InferRequest")
_HEADER: Final = message_class("trtis", f"{_PACKAGE}.InferRequestHeader")
_RESPONSE: Final = message_class("trtis", f"{_PACKAGE}.InferResponse")
_RESPONSE_HEADER: Final = message_class("trtis", f"{_PACKAGE}.InferResponseHeader")
_RAW_INPUT: Final = 4
_RAW_OUTPUT: Final = 3
_VERSION: Final = 2
_INPUT: Final = 2
_OUTPUT: Final = 3
_SIZE_OR_DIMS: Final = 2
_MAX_TENSOR_FIELDS: Final = 16
"""Fields of an announced tensor; it has four."""


class InferMessage(NamedTuple):
    """A parsed InferRequest. version is empty for the latest; a version that release 0.8 sends may be any text."""

    model: str
    version: str
    header: bytes
    raw: list[memoryview]


def parse_infer(data: bytes) -> InferMessage:
    """Return the message in data. Raises MalformedMessage."""
    message, raw = parse_with_views(_REQUEST, data, _RAW_INPUT)
    version = str(message.model_version) if message.model_version > 0 else _text_version(message)
    return InferMessage(message.model_name, version, message.meta_data, raw)


def _text_version(message: Any) -> str:
    """Return the version as release 0.8 sends it, or an empty text. Real versions are at least 1."""
    for field in UnknownFieldSet(message):
        if field.field_number == _VERSION and field.wire_type == BYTES:
            return bytes(field.data).decode(errors="replace")
    return ""


def parse_head(header: bytes) -> InferHead:
    """Return the request's header, of either generation. Raises BadRequest."""
    if len(header) > MAX_HEADER_BYTES:
        raise BadRequest(f"the request's header is over {MAX_HEADER_BYTES} bytes")
    head = head_of(parse(_HEADER, header))
    if not _is_first_generation(header):
        return head
    inputs = tuple(InputHead(i.name, (), 0, i.dims[0] if i.dims else 0) for i in head.inputs)
    return msgspec.structs.replace(head, inputs=inputs, is_first_generation=True)


def id_of(header: bytes) -> int:
    """Return the request's id, or 0 if it cannot be read."""
    try:
        return parse(_HEADER, header).id if len(header) <= MAX_HEADER_BYTES else 0
    except BadRequest:
        return 0


def _is_first_generation(header: bytes) -> bool:
    view = memoryview(header)
    for field in wire_fields(view):
        if field.number in (_INPUT, _OUTPUT) and field.wire_type == BYTES:
            for inner in wire_fields(view[field.value_start : field.end], _MAX_TENSOR_FIELDS):
                if inner.number == _SIZE_OR_DIMS and inner.wire_type == VARINT:
                    return True
    return False


def encode_infer(head: InferHead, reply: TensorReply, rule: TensorRule) -> bytes:
    """Return an InferResponse. Raises the errors of `answered`."""
    outputs = answered(head, reply, rule)
    header = response_header(head, rule, outputs)
    response = _RESPONSE(request_status=request_status(), meta_data=header.SerializeToString())
    raw = [tensor.data for tensor, classes in outputs if classes is None]
    return append_bytes(response.SerializeToString(), _RAW_OUTPUT, raw)


def encode_failure(status: Any, request_id: int) -> bytes:
    """Return an InferResponse with an error."""
    header = _RESPONSE_HEADER(id=request_id).SerializeToString()
    return _RESPONSE(request_status=status, meta_data=header).SerializeToString()
