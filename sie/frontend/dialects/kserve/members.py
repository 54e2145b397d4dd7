"""Decodes and encodes `/v2/models/{model}/generate` for tensor models: inputs and outputs are members of the body.

A member with the name of an input becomes that input. A scalar is a tensor of shape [1], and a list one of shape [n]. If
the model has batches, they are a batch of one. `parameters` are those of an infer request. Other members have no effect.
Pure. Source: Triton's generate extension and KServe v2 sheet, section 11.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, Final

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.kserve.tensor_json import elements_from_json, elements_to_json
from sie.frontend.inputs.bounded_json import check_json, check_utf8, decode_typed
from sie.frontend.tensors.parameters import check_sequence, checked_priority, decode_parameters, unsigned
from sie.values.errors import BadRequest
from sie.values.tensor import Tensor, TensorReply, TensorRequest, TensorRule, TensorSpec

_RESERVED: Final = ("id", "parameters")
_ROOM: Final = 1024
"""Commas and brackets of a body that do not belong to its elements."""
_ABSENT: Final = msgspec.Raw(b"")
_TEXTS: Final = msgspec.json.Decoder(list[str])
_to_json: Final = msgspec.json.Encoder().encode


def decode_members(body: bytes, model: str, rule: TensorRule, limits: Limits) -> TensorRequest:
    """Return the request in a body; model is the hosted id. Raises BadRequest naming the member."""
    check_json(body, limits.max_depth, limits.max_tensor_values + _ROOM, limits.max_tensor_values + _ROOM)
    check_utf8(body)
    members = decode_typed(_decoder(tuple(spec.name for spec in rule.inputs)), body)
    parameters = decode_parameters(members.parameters, "$.parameters", limits.max_depth)
    check_sequence(parameters)
    values = [getattr(members, _field(index)) for index in range(len(rule.inputs))]
    inputs = [_tensor(value, spec, rule) for value, spec in zip(values, rule.inputs, strict=True) if bytes(value)]
    return TensorRequest(
        model=model, inputs=inputs, id=members.id or "", parameters=parameters,
        priority=checked_priority(unsigned(parameters, "priority"), rule), timeout_us=unsigned(parameters, "timeout"),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of the members with these names. It skips other members without building them."""
    fields = {_field(index): name for index, name in enumerate(names) if name not in _RESERVED}
    members = msgspec.defstruct(
        "Members",
        [("id", str | None, None), ("parameters", msgspec.Raw, _ABSENT)]
        + [(_field(index), msgspec.Raw, _ABSENT) for index in range(len(names))],
        rename=fields,
    )
    return msgspec.json.Decoder(members)


def _field(index: int) -> str:
    return f"input_{index}"


def _tensor(value: msgspec.Raw, spec: TensorSpec, rule: TensorRule) -> Tensor:
    text = bytes(value)
    is_list = text.startswith(b"[")
    elements = msgspec.Raw(text if is_list else b"[%b]" % text)
    count = _count(elements, spec) if is_list else 1
    shape = (
        () if not (is_list or spec.shape) else (1, count) if rule.max_batch_size and len(spec.shape) == 2 else (count,)
    )
    data = elements_from_json(elements, spec.name, spec.datatype, count)
    return Tensor(spec.name, spec.datatype, shape, memoryview(data))


def _count(elements: msgspec.Raw, spec: TensorSpec) -> int:
    """Return the number of elements in a list. Raises BadRequest for an input of texts with other values."""
    text = bytes(elements)
    if spec.datatype == "BYTES":
        try:
            return len(_TEXTS.decode(text))
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadRequest(f"the data of input '{spec.name}' must be a list of texts: {error}") from None
    return text.count(b",") + 1 if text[1:-1].strip() else 0


def encode_members(request: TensorRequest, reply: TensorReply, rule: TensorRule) -> bytes:
    """Return the body of an answer: each output as a flat list, one element as a scalar.

    Raises BadRequest for an output that JSON cannot hold.
    """
    body: dict[str, Any] = {"id": request.id} if request.id else {}
    body |= {"model_name": rule.name, "model_version": rule.version}
    for output in reply.outputs:
        elements = elements_to_json(output.data, output.name, output.datatype)
        body[output.name] = msgspec.Raw(elements[1:-1] if prod(output.shape) == 1 else elements)
    return _to_json(body)
