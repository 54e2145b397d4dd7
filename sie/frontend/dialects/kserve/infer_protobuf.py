"""Decodes a ModelInferRequest of KServe v2 gRPC to a typed request, and encodes the reply.

Pure. Tensors in `raw_input_contents` are views of the message; replies always fill `raw_output_contents`.
`sie.frontend.tensors.checks` compares names, types and shapes with the model. Source: Open Inference Protocol v2, gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

from sie.frontend.dialects.kserve.infer import TRUNCATED, InferCall, Wanted, classes_of, cut_text, ranked, stores_of
from sie.frontend.dialects.kserve.protobuf_wire import (
    BYTES,
    UNCHECKED_BYTES,
    append_bytes,
    cut_views,
    parse,
    wire_fields,
)
from sie.frontend.dialects.kserve.typed_contents import cut_contents, pieces_of, read_typed
from sie.frontend.tensors.parameters import (
    EMPTY_FINAL_RESPONSE,
    check_sequence,
    checked_parameters,
    checked_priority,
    flag,
    region_part,
    unsigned,
)
from sie.proto import message_class
from sie.values.errors import BadRequest
from sie.values.tensor import RegionPart, Tensor, TensorReply, TensorRequest, TensorRule

FINAL_RESPONSE: Final = "triton_final_response"
_RAW_INPUTS: Final = 7
_RAW_OUTPUTS: Final = 6
_INFER_RESPONSE: Final = 2
_RESPONSE_ID: Final = 3
_REQUEST_ID: Final = 3
_MAX_TENSORS: Final = 1024
_MAX_PARAMETERS: Final = 1024
"""Parameters of a request or of one of its tensors. Python reads them one by one."""
_WRAPPED: Final = 1 << 63
"""Triton's C++ client writes the unsigned id of a sequence as `int64_param`."""
_MAX_CACHED_BYTES: Final = 2048
"""Longer requests are not cached, because the caches hold hundreds of entries."""
_MAX_CACHED_OUTPUTS: Final = 16
_REQUEST: Final = message_class("kserve", "inference.ModelInferRequest")
_RESPONSE: Final = message_class("kserve", "inference.ModelInferResponse")


class InferMessage(NamedTuple):
    """A parsed ModelInferRequest: its bytes without the raw contents, the message in them, and the raw contents.

    Requests that differ only in their tensors share the message, so nothing may change it. contents has the typed contents
    of each input of a large request, whose message has none. nbytes is the size without the raw contents.
    """

    rest: bytes
    message: Any
    raw: list[memoryview]
    contents: list[list[memoryview]] | None
    nbytes: int


def cut_raw(data: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a ModelInferRequest without its raw contents, and these. Raises BadRequest if data is malformed."""
    return cut_views(data, _RAW_INPUTS)


def id_of(data: bytes) -> str:
    """Return the id of a ModelInferRequest, or an empty text if it cannot be read."""
    try:
        ids = [field for field in wire_fields(data) if (field.number, field.wire_type) == (_REQUEST_ID, BYTES)]
    except BadRequest:
        return ""
    return data[ids[-1].value_start : ids[-1].end].decode(errors="replace") if ids else ""


def parse_infer(rest: bytes, raw: list[memoryview]) -> InferMessage:
    """Return the message whose parts `cut_raw` returned. Raises BadRequest if rest is malformed."""
    nbytes, contents = len(rest), None
    if nbytes > UNCHECKED_BYTES:
        rest, contents = cut_contents(rest)
    message = (_parse if _is_cacheable(rest, raw) else _parse.__wrapped__)(rest)
    return InferMessage(rest, message, raw, contents, nbytes)


def _is_cacheable(rest: bytes, raw: list[memoryview]) -> bool:
    return bool(raw) and len(rest) <= _MAX_CACHED_BYTES


@lru_cache(maxsize=256)
def _parse(rest: bytes) -> Any:
    return parse(_REQUEST, rest)


class _Form(NamedTuple):
    """A request without its elements."""

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    typed: str | None
    """The name of the first input with typed contents, or None."""
    wanted: tuple[Wanted, ...]
    outputs: tuple[str, ...]
    priority: int
    timeout_us: int
    parameters: dict[str, Any]
    parts: tuple[RegionPart | None, ...]
    """The place of each input in a client's shared memory, if it is there."""


def decode_infer(parsed: InferMessage, model: str, rule: TensorRule, max_values: int) -> InferCall:
    """Return the request. model is the hosted id; max_values limits the typed elements. Raises BadRequest."""
    rest, message, raw, contents, _ = parsed
    form = _cached_form(rest) if _is_cacheable(rest, raw) else _form_of(message)
    inputs: list[Tensor] = []
    if raw:
        inputs = _raw_inputs(form, raw, rule.name)
    else:
        for index, (item, part) in enumerate(zip(message.inputs, form.parts, strict=True)):
            pieces = [item.contents] if contents is None else pieces_of(contents[index])
            data = read_typed(item, pieces, max_values) if part is None else memoryview(b"")
            inputs.append(Tensor(item.name, item.datatype, tuple(item.shape), data, part))
            max_values -= prod(item.shape) if part is None else 0
    request = TensorRequest(
        model=model, inputs=inputs, outputs=form.outputs, stores=stores_of(form.wanted), id=message.id,
        priority=checked_priority(form.priority, rule), timeout_us=form.timeout_us, parameters=form.parameters,
        num_classes=classes_of(form.wanted),
    )  # fmt: skip
    return InferCall(request=request, wanted=form.wanted, is_binary=True)


@lru_cache(maxsize=256)
def _cached_form(rest: bytes) -> _Form:
    return _form_of(_parse(rest))


def _form_of(message: Any) -> _Form:
    if len(message.inputs) > _MAX_TENSORS or len(message.outputs) > _MAX_TENSORS:
        raise BadRequest(f"a request may have at most {_MAX_TENSORS} inputs and {_MAX_TENSORS} outputs")
    parameters = _parameters(message.parameters)
    check_sequence(parameters, least_id=-_WRAPPED)
    flag(parameters, EMPTY_FINAL_RESPONSE)
    wanted = _wanted(message.outputs)
    parts = tuple([region_part(_parameters(item.parameters), item.name) for item in message.inputs])
    for item, part in zip(message.inputs, parts, strict=True):
        if part is not None and item.HasField("contents"):
            raise BadRequest(f"input '{item.name}' is in shared memory, and its contents must not be set")
    typed = next((item.name for item in message.inputs if item.HasField("contents")), None)
    return _Form(
        tuple([(item.name, item.datatype, tuple(item.shape)) for item in message.inputs]),
        typed, wanted, tuple([output.name for output in wanted]),
        unsigned(parameters, "priority"), unsigned(parameters, "timeout"), parameters, parts,
    )  # fmt: skip


def wants_final_response(message: Any) -> bool:
    """Tell whether the client wants a mark on the last reply of a stream."""
    return message.parameters[EMPTY_FINAL_RESPONSE].bool_param if EMPTY_FINAL_RESPONSE in message.parameters else False


def _raw_inputs(form: _Form, raw: Sequence[memoryview], model: str) -> list[Tensor]:
    if form.typed is not None:
        raise BadRequest(
            f"contents field must not be specified when using raw_input_contents for '{form.typed}' for model '{model}'"
        )
    sent = [item for item, part in zip(form.inputs, form.parts, strict=True) if part is None]
    if len(raw) < len(sent):
        raise BadRequest(f"unable to find data for input tensor '{sent[len(raw)][0]}' for model '{model}' in request.")
    if len(raw) > len(sent):
        raise BadRequest(f"Size of raw_input_contents: {len(raw)} is different than number of inputs: {len(sent)}")
    views = iter(raw)
    return [
        Tensor(*item, next(views) if part is None else memoryview(b""), part)
        for item, part in zip(form.inputs, form.parts, strict=True)
    ]


def _wanted(outputs: Sequence[Any]) -> tuple[Wanted, ...]:
    """Return the requested outputs, each once."""
    wanted: dict[str, Wanted] = {}
    for output in outputs:
        parameters = _parameters(output.parameters)
        part, num_classes = region_part(parameters, output.name), unsigned(parameters, "classification")
        wanted.setdefault(output.name, Wanted(output.name, is_binary=True, num_classes=num_classes, part=part))
    return tuple(wanted.values())


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON values. Raises BadRequest for one without a value, and for the parameters that are refused over HTTP."""
    if len(parameters) > _MAX_PARAMETERS:
        raise BadRequest(f"a request and each of its tensors may have at most {_MAX_PARAMETERS} parameters")
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise BadRequest(f"parameter '{name}' has no value")
        found[name] = getattr(parameter, choice)
    return checked_parameters(found, own=(EMPTY_FINAL_RESPONSE,))


def encode_infer(call: InferCall, reply: TensorReply, rule: TensorRule, *, is_final: bool = False) -> bytes:
    """Return a ModelInferResponse. is_final marks the last reply to a request on a stream. Raises the errors of `ranked`."""
    if any(one.num_classes for one in call.wanted):
        reply = ranked(call, reply, rule)
    forms = tuple([(output.name, output.datatype, output.shape, output.part) for output in reply.outputs])
    head = (_response_head if len(forms) <= _MAX_CACHED_OUTPUTS else _response_head.__wrapped__)(
        rule.name, rule.version, forms, is_final=is_final
    )
    if reply.cuts:
        parameters = _RESPONSE()
        parameters.parameters[TRUNCATED].string_param = cut_text(reply.cuts)
        head += parameters.SerializeToString()  # fields of a message may come in any order
    if call.request.id:
        head = append_bytes(head, _RESPONSE_ID, [call.request.id.encode()])
    return append_bytes(head, _RAW_OUTPUTS, [output.data for output in reply.outputs])


@lru_cache(maxsize=256)
def _response_head(
    name: str, version: str, forms: tuple[tuple[str, str, tuple[int, ...], RegionPart | None], ...], *, is_final: bool
) -> bytes:
    """Return the part that all replies of one form share: names, types and shapes."""
    response = _RESPONSE(model_name=name, model_version=version)
    if is_final:
        response.parameters[FINAL_RESPONSE].bool_param = True
    for output, datatype, shape, part in forms:
        described = response.outputs.add(name=output, datatype=datatype, shape=shape)
        if part is not None:  # its entry of raw_output_contents is empty, so that the others keep their places
            described.parameters["shared_memory_region"].string_param = part.name
            described.parameters["shared_memory_offset"].int64_param = part.offset
            described.parameters["shared_memory_byte_size"].int64_param = part.nbytes
    return response.SerializeToString()


def stream_reply(response: bytes) -> bytes:
    """Return a ModelStreamInferResponse with an encoded ModelInferResponse."""
    return append_bytes(b"", _INFER_RESPONSE, [response])


def stream_error(message: str, request_id: str) -> bytes:
    """Return a ModelStreamInferResponse with an error."""
    response = message_class("kserve", "inference.ModelStreamInferResponse")(error_message=message)
    response.infer_response.id = request_id
    return response.SerializeToString()
