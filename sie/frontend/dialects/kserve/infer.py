"""Decodes a KServe v2 REST inference body, with its binary tail, to a typed request, and encodes the reply.

Pure. The route finds the model before it reads the body, so a raw body is checked against the model's rule at once.
`sie.frontend.tensors.checks` compares names, types and shapes with the model.
Source: Open Inference Protocol v2 and its binary tensor data extension. docs/tensors.md describes the choice made
wherever OpenVINO Model Server and Triton differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.kserve.tensor_json import elements_from_json, elements_to_json, images_from_json
from sie.frontend.inputs.bounded_json import check_json, check_utf8, decode_typed
from sie.frontend.tensors.classification import as_class_tensor, spec_of
from sie.frontend.tensors.image_inputs import image_form
from sie.frontend.tensors.parameters import (
    check_sequence,
    checked_priority,
    decode_parameters,
    flag,
    region_part,
    unsigned,
)
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest
from sie.values.tensor import ITEM_BYTES, MAX_RANK, RegionPart, Tensor, TensorReply, TensorRequest, TensorRule

_MAX_TENSORS: Final = 1024
_ABSENT: Final = msgspec.Raw(b"")
_INTEGER: Final = re.compile(r"-?[0-9]+")
TRUNCATED: Final = "truncated"
"""The parameter of a reply that lists the truncated texts."""
_RAW_INPUT: Final = "raw_input"
_SIZE_LIMIT: Final = 1 << 63
_MAX_CACHED_HEAD_BYTES: Final = 2048
"""A longer JSON before binary data is not cached, because the cache holds hundreds of them."""
_MAX_CACHED_OUTPUTS: Final = 16
_IMAGE_STARTS: Final = (b"\xff\xd8\xff", b"\x89PNG")
"""The first bytes of a JPEG and a PNG."""
_MIXED: Final = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'."
)


class InferInput(msgspec.Struct):
    """One input in JSON."""

    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=_SIZE_LIMIT - 1)]], Meta(max_length=MAX_RANK)]
    datatype: str
    parameters: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT


class InferOutput(msgspec.Struct):
    """One requested output."""

    name: str
    parameters: msgspec.Raw = _ABSENT


class InferBody(msgspec.Struct):
    """The JSON of a request."""

    inputs: Annotated[list[InferInput], Meta(max_length=_MAX_TENSORS)]
    outputs: Annotated[list[InferOutput], Meta(max_length=_MAX_TENSORS)] | None = None
    id: str | None = None
    parameters: msgspec.Raw = _ABSENT


class Wanted(msgspec.Struct, frozen=True):
    """How to send one output. num_classes 0 means its elements themselves."""

    name: str
    is_binary: bool
    num_classes: int = 0
    part: RegionPart | None = None
    """Its place in a client's shared memory."""


class InferCall(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded request, and how to write its answer. An empty wanted means all outputs, in the same form."""

    request: TensorRequest
    wanted: tuple[Wanted, ...] = ()
    is_binary: bool = False

    def without_inputs(self) -> InferCall:
        """Return the call without its inputs: requests that differ only in their elements share it."""
        request = msgspec.structs.replace(self.request, inputs=[])
        return InferCall(request=request, wanted=self.wanted, is_binary=self.is_binary)


_BODY: Final = msgspec.json.Decoder(InferBody)
_to_json: Final = msgspec.json.Encoder().encode


def decode_infer(body: bytes, header_length: str | None, model: str, rule: TensorRule, limits: Limits) -> InferCall:
    """Return the request in a body. header_length is the header `Inference-Header-Content-Length`, if it was sent.

    model is the hosted id. Tensors are views of the body, or bytes that were decoded from its JSON. Raises BadRequest
    naming the field.
    """
    split = len(body) if header_length is None else _json_bytes(header_length, len(body))
    if split == 0 and header_length is not None:
        return InferCall(
            request=TensorRequest(model=model, inputs=[_raw_input(memoryview(body), rule)]), is_binary=True
        )
    head = _read_head(body, split, limits)
    reader = _TensorReader(memoryview(body)[split:], rule, limits.max_tensor_values)
    inputs = [reader.read(item, is_only=len(head.inputs) == 1) for item in head.inputs]
    reader.check_end()
    request = TensorRequest(
        model=model, inputs=inputs, outputs=head.outputs, stores=stores_of(head.wanted), id=head.id, priority=checked_priority(head.priority, rule),
        timeout_us=head.timeout_us, parameters=head.parameters, num_classes=classes_of(head.wanted),
    )  # fmt: skip
    return InferCall(request=request, wanted=head.wanted, is_binary=head.is_binary)


class _InputHead(NamedTuple):
    """One input without its elements. Without data and binary_bytes, the binary tail has the elements, as many as the shape says."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    num_elements: int
    data: msgspec.Raw | None
    binary_bytes: int | None
    part: RegionPart | None = None


class _Head(NamedTuple):
    """The decoded JSON of a request."""

    inputs: tuple[_InputHead, ...]
    wanted: tuple[Wanted, ...]
    outputs: tuple[str, ...]
    is_binary: bool
    id: str
    priority: int
    timeout_us: int
    parameters: dict[str, Any]


def _read_head(body: bytes, split: int, limits: Limits) -> _Head:
    """Return the decoded JSON. It is cached if binary elements follow it, because clients then repeat the same JSON."""
    if split == len(body):
        return _parse_head.__wrapped__(body, limits.max_depth, limits.max_tensor_values)
    parse = _parse_head if split <= _MAX_CACHED_HEAD_BYTES else _parse_head.__wrapped__
    return parse(body[:split], limits.max_depth, limits.max_tensor_values)


@lru_cache(maxsize=256)
def _parse_head(text: bytes, max_depth: int, max_values: int) -> _Head:
    check_json(text, max_depth, max_values + _MAX_TENSORS, max_values + _MAX_TENSORS)
    check_utf8(text)
    parsed = decode_typed(_BODY, text)
    parameters = decode_parameters(parsed.parameters, "$.parameters", max_depth)
    check_sequence(parameters)
    is_binary = flag(parameters, "binary_data_output")
    wanted = _wanted(parsed.outputs or (), max_depth, is_binary=is_binary)
    return _Head(
        tuple([_input_head(item, max_depth) for item in parsed.inputs]), wanted, tuple([output.name for output in wanted]),
        is_binary, parsed.id or "", unsigned(parameters, "priority"), unsigned(parameters, "timeout"),
        parameters,
    )  # fmt: skip


def _input_head(item: InferInput, max_depth: int) -> _InputHead:
    if item.datatype not in ITEM_BYTES:
        raise BadRequest(f"invalid datatype '{item.datatype}' for input {item.name}")
    parameters = decode_parameters(item.parameters, f"$.inputs[name={item.name}].parameters", max_depth)
    part = region_part(parameters, item.name)
    data = item.data if memoryview(item.data).nbytes else None
    binary_bytes = unsigned(parameters, "binary_data_size") if "binary_data_size" in parameters else None
    if data is not None and binary_bytes is not None:
        raise BadRequest(f"{_MIXED} But set 'data' 'binary_data_size' for input '{item.name}'")
    if data is not None and part is not None:
        raise BadRequest(f"{_MIXED} But set 'data' 'shared_memory_region' for input '{item.name}'")
    return _InputHead(item.name, item.datatype, tuple(item.shape), prod(item.shape), data, binary_bytes, part)


class _TensorReader:
    """Reads each input's elements from the JSON, or from the binary tail in the order of the inputs."""

    def __init__(self, tail: memoryview, rule: TensorRule, max_values: int) -> None:
        self._tail = tail
        self._position = 0
        self._rule = rule
        self._model = rule.name
        self._max_values = max_values

    def read(self, item: _InputHead, *, is_only: bool) -> Tensor:
        if item.part is not None:
            return Tensor(item.name, item.datatype, item.shape, memoryview(b""), item.part)
        if item.data is not None:
            data = memoryview(self._from_json(item, item.data))
        elif item.binary_bytes is not None:
            data = self._take(item.name, item.binary_bytes)
        elif not len(self._tail):
            raise BadRequest(f"{_MIXED} But no field is set for input '{item.name}'")
        elif item.datatype != "BYTES":
            data = self._take(item.name, item.num_elements * ITEM_BYTES[item.datatype])
        elif is_only and item.num_elements == 1:
            data = _framed(self._take(item.name, len(self._tail) - self._position))
        else:
            raise BadRequest(f"input '{item.name}' of datatype BYTES needs the parameter 'binary_data_size'")
        return Tensor(item.name, item.datatype, item.shape, data)

    def _from_json(self, item: _InputHead, data: msgspec.Raw) -> bytes:
        if item.num_elements > self._max_values:
            raise BadRequest(
                f"input '{item.name}' has {item.num_elements} elements as JSON, over max_tensor_values "
                f"({self._max_values}); send it as binary data"
            )
        if item.datatype == "BYTES" and _takes_images(item.name, self._rule):
            return images_from_json(data, item.name, item.num_elements)
        return elements_from_json(data, item.name, item.datatype, item.num_elements)

    def _take(self, name: str, nbytes: int) -> memoryview:
        missing = self._position + nbytes - len(self._tail)
        if missing > 0:
            raise BadRequest(
                f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{self._model}'"
            )
        start, self._position = self._position, self._position + nbytes
        return self._tail[start : self._position]

    def check_end(self) -> None:
        if self._position != len(self._tail):
            raise BadRequest(f"unexpected additional input data for model '{self._model}'")


def _json_bytes(header_length: str, body_bytes: int) -> int:
    if not _INTEGER.fullmatch(header_length):
        raise BadRequest(f"Unable to parse Inference-Header-Content-Length, got: {header_length[:40]}")
    length = int(header_length) if len(header_length) < 20 else _SIZE_LIMIT
    if not 0 <= length <= body_bytes:
        raise BadRequest(f"inference header size should be in range (0, {body_bytes}), got: {header_length[:40]}")
    return length


def _framed(data: memoryview) -> memoryview:
    """Return the only element of a BYTES input with its length before it, which clients may leave out."""
    if len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4:
        return data
    return memoryview(frame_elements([bytes(data)]))


def _takes_images(name: str, rule: TensorRule) -> bool:
    return any(spec.name == name and image_form(spec) is not None for spec in rule.inputs)


def _raw_input(body: memoryview, rule: TensorRule) -> Tensor:
    """Return the whole body as the model's only input: the bytes of a tensor that fits it, or an encoded image."""
    try:
        return _raw_tensor(body, rule)
    except BadRequest:
        if len(rule.inputs) != 1 or not _takes_images(rule.inputs[0].name, rule):
            raise
        if not bytes(body[:4]).startswith(_IMAGE_STARTS):
            raise
    return Tensor(rule.inputs[0].name, "BYTES", (1,), memoryview(frame_elements([bytes(body)])))


def _raw_tensor(body: memoryview, rule: TensorRule) -> Tensor:
    """Return the whole body as the model's only input, with a deduced shape."""
    if len(rule.inputs) != 1:
        raise BadRequest(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(rule.inputs)} inputs in "
            f"'{rule.name}' model configuration"
        )
    (spec,) = rule.inputs
    shape = [1 if i == 0 and rule.max_batch_size else size for i, size in enumerate(spec.shape)]
    variable = [i for i, size in enumerate(shape) if size < 0]
    if len(variable) > 1:
        raise BadRequest(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one variable-sized "
            "dimension"
        )
    if spec.datatype == "BYTES":
        if any(size != 1 for size in shape):
            raise BadRequest(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        return Tensor(spec.name, "BYTES", (1,) * len(shape), memoryview(frame_elements([bytes(body)])))
    known = prod(size for size in shape if size >= 0) * ITEM_BYTES[spec.datatype]
    if variable:
        shape[variable[0]] = len(body) // known if known else 0
    expected = prod(shape) * ITEM_BYTES[spec.datatype]
    if expected != len(body):
        raise BadRequest(
            f"input byte size mismatch for input '{_RAW_INPUT}' for model '{rule.name}'. Expected {expected or known}, got "
            f"{len(body)}"
        )
    return Tensor(spec.name, spec.datatype, tuple(shape), body)


def _wanted(outputs: Sequence[InferOutput], max_depth: int, *, is_binary: bool) -> tuple[Wanted, ...]:
    """Return the requested outputs, each once."""
    wanted: dict[str, Wanted] = {}
    for output in outputs:
        parameters = decode_parameters(output.parameters, f"$.outputs[name={output.name}].parameters", max_depth)
        part = region_part(parameters, output.name)
        binary = flag(parameters, "binary_data", default=is_binary)
        num_classes = unsigned(parameters, "classification")
        wanted.setdefault(output.name, Wanted(output.name, binary, num_classes, part))
    return tuple(wanted.values())


def stores_of(wanted: Sequence[Wanted]) -> dict[str, RegionPart]:
    """Return the places of outputs in clients' shared memory, by name."""
    return {one.name: one.part for one in wanted if one.part is not None}


def classes_of(wanted: Sequence[Wanted]) -> int:
    """Return the number of classes that are wanted of each batch item, of all outputs together."""
    return sum([one.num_classes for one in wanted])


def encode_infer(call: InferCall, reply: TensorReply, rule: TensorRule) -> tuple[bytes, int | None]:
    """Return the body, and the length of its JSON in bytes if tensors follow it (`Inference-Header-Content-Length`).

    Raises BadRequest for an output that JSON cannot hold, and the errors of `ranked`.
    """
    if any(one.num_classes for one in call.wanted):
        reply = ranked(call, reply, rule)
    ways = {wanted.name: wanted.is_binary for wanted in call.wanted}
    are_binary = all(ways.get(output.name, call.is_binary) and output.part is None for output in reply.outputs)
    if are_binary and 0 < len(reply.outputs) <= _MAX_CACHED_OUTPUTS:
        forms = tuple([(output.name, output.datatype, output.shape, len(output.data)) for output in reply.outputs])
        text = _head_start(rule, call.request.id, reply.cuts) + _binary_outputs(forms)
        return b"".join([text, *[output.data for output in reply.outputs]]), len(text)
    entries: list[dict[str, Any]] = []
    tails: list[memoryview] = []
    for output in reply.outputs:
        if output.part is not None:
            entries.append(_stored_entry(output, output.part))
        elif ways.get(output.name, call.is_binary):
            entries.append(_binary_entry(output.name, output.datatype, output.shape, len(output.data)))
            tails.append(output.data)
        else:
            elements = msgspec.Raw(elements_to_json(output.data, output.name, output.datatype))
            entries.append({"name": output.name, "datatype": output.datatype, "shape": output.shape, "data": elements})
    text = _head_start(rule, call.request.id, reply.cuts) + _to_json(entries) + b"}"
    return (b"".join([text, *tails]), len(text)) if tails else (text, None)


def ranked(call: InferCall, reply: TensorReply, rule: TensorRule) -> TensorReply:
    """Return a reply whose outputs are BYTES of class labels where the client asked for classes.

    Raises BadRequest for a datatype that cannot be ordered.
    """
    wanted = {one.name: one.num_classes for one in call.wanted if one.num_classes}
    is_batched = bool(rule.max_batch_size)
    outputs = [
        as_class_tensor(output, spec_of(output, rule), wanted[output.name], is_batched=is_batched)
        if output.name in wanted
        else output
        for output in reply.outputs
    ]
    return msgspec.structs.replace(reply, outputs=outputs)


def _head_start(rule: TensorRule, request_id: str, cuts: Collection[int]) -> bytes:
    """Return the JSON of a reply up to the list of its outputs. A parameter lists the truncated texts."""
    head: dict[str, Any] = {"model_name": rule.name, "model_version": rule.version}
    if request_id:
        head["id"] = request_id
    if cuts:
        head["parameters"] = {TRUNCATED: cut_text(cuts)}
    return _to_json(head)[:-1] + b',"outputs":'


def cut_text(cuts: Collection[int]) -> str:
    """Return the value of the parameter TRUNCATED: the indices of the texts, as a text because parameters have no lists."""
    return ",".join(map(str, sorted(cuts)))


@lru_cache(maxsize=256)
def _binary_outputs(forms: tuple[tuple[str, str, tuple[int, ...], int], ...]) -> bytes:
    """Return the rest of a reply's JSON if all outputs, each (name, datatype, shape, bytes), follow it."""
    return _to_json([_binary_entry(*form) for form in forms]) + b"}"


def _binary_entry(name: str, datatype: str, shape: tuple[int, ...], nbytes: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": nbytes}}


def _stored_entry(output: Tensor, part: RegionPart) -> dict[str, Any]:
    """Return an output whose bytes are in a client's shared memory."""
    parameters = {
        "shared_memory_region": part.name,
        "shared_memory_offset": part.offset,
        "shared_memory_byte_size": part.nbytes,
    }
    return {"name": output.name, "datatype": output.datatype, "shape": output.shape, "parameters": parameters}


def error_body(message: str) -> bytes:
    """Return the body of an error."""
    return msgspec.json.encode({"error": message})
