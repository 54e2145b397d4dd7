"""Decodes `NV-InferRequest` and a body of the TensorRT Inference Server v1 API to a typed request; encodes the reply.

Two generations of the API share a route. The first (releases 0.8 to 0.10) has `byte_size`: the bytes of one batch item.
The second has `batch_byte_size`, and `dims` unless the model's own are fixed. A request with a `byte_size` in an input
or output is of the first generation, and so is its answer.
Source: NVIDIA TensorRT Inference Server, api.proto and its HTTP API, releases 0.8 and 1.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf import text_format

from sie.frontend.dialects.trtis.message_text import in_lines, one_line
from sie.frontend.tensors.classification import RankedClass, rank_classes, spec_of
from sie.proto import message_class
from sie.values.errors import BadRequest
from sie.values.tensor import ITEM_BYTES, MAX_RANK, Tensor, TensorReply, TensorRequest, TensorRule, TensorSpec

MAX_HEADER_BYTES: Final = 64 * 1024
_MAX_CACHED_CHARS: Final = 2048
"""A longer `NV-InferRequest` is not cached, because the cache holds hundreds of them."""
_MAX_TENSORS: Final = 1024
_MAX_RESPONSE_CHARS: Final = 16 * 1024
"""Limit of `NV-InferResponse`. A longer one omits its classes, which the header after the body still has."""
_MIN_CLASS_CHARS: Final = len("cls { } ")
"""Characters of a class in a line, without its fields."""
_PACKAGE: Final = "nvidia.inferenceserver"


class InputHead(NamedTuple):
    """One input as the request announces it. Omitted sizes are 0, and omitted dims are empty."""

    name: str
    dims: tuple[int, ...]
    batch_bytes: int
    item_bytes: int


class OutputHead(NamedTuple):
    """One requested output. num_classes None means its elements themselves; item_bytes 0 means not given."""

    name: str
    num_classes: int | None
    item_bytes: int = 0


class InferHead(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed `NV-InferRequest`."""

    batch_size: int
    inputs: tuple[InputHead, ...]
    outputs: tuple[OutputHead, ...]
    id: int = 0
    priority: int = 0
    timeout_us: int = 0
    is_first_generation: bool = False


def parse_infer_head(text: str) -> InferHead:
    """Return the request that `NV-InferRequest` describes, in protobuf's text format.

    Raises BadRequest, with the request's id in its extras (`infer_id`) if the text could be read.
    """
    if len(text) > MAX_HEADER_BYTES:
        raise BadRequest(f"NV-InferRequest is over {MAX_HEADER_BYTES} characters")
    return (_parse if len(text) <= _MAX_CACHED_CHARS else _parse.__wrapped__)(text)


@lru_cache(maxsize=256)  # a client sends the same one with every request
def _parse(text: str) -> InferHead:
    message = message_class("trtis", f"{_PACKAGE}.InferRequestHeader")()
    try:
        text_format.Parse(text, message)
    except (text_format.ParseError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"unable to parse NV-InferRequest: {error}") from None
    try:
        return head_of(message)
    except BadRequest as error:
        error.extras["infer_id"] = message.id
        raise


def head_of(message: Any) -> InferHead:
    """Return the content of an InferRequestHeader. Raises BadRequest if it asks for unsupported features."""
    if len(message.input) > _MAX_TENSORS or len(message.output) > _MAX_TENSORS:
        raise BadRequest(f"NV-InferRequest has more than {_MAX_TENSORS} inputs or outputs")
    for part in (*message.input, *message.output):
        if part.HasField("shared_memory"):
            raise BadRequest(f"shared memory is not supported, but '{part.name}' asks for it")
    outputs: dict[str, OutputHead] = {}
    for output in message.output:
        if output.name in outputs:
            raise BadRequest(f"output '{output.name}' already requested")
        num_classes = output.cls.count if output.HasField("cls") else None
        if num_classes == 0:
            raise BadRequest(f"output '{output.name}' asks for 0 classes")
        outputs[output.name] = OutputHead(output.name, num_classes, output.byte_size)
    return InferHead(
        batch_size=message.batch_size,
        inputs=tuple(InputHead(i.name, _dims(i), i.batch_byte_size, i.byte_size) for i in message.input),
        outputs=tuple(outputs.values()),
        id=message.id, priority=message.priority, timeout_us=message.timeout_microseconds,
        is_first_generation=any(part.byte_size for part in (*message.input, *message.output)),
    )  # fmt: skip


def _dims(announced: Any) -> tuple[int, ...]:
    """Return the dims of an announced input. Of far too many, return one more than is allowed."""
    return tuple(announced.dims[: MAX_RANK + 1])


def decode_infer(head: InferHead, body: memoryview, model: str, rule: TensorRule) -> TensorRequest:
    """Return the request whose tensors are back to back in the body; model is the hosted id.

    The tensors are views of the body. Their shapes include the batch dimension. Raises BadRequest.
    """
    check_batch(head.batch_size, rule)
    inputs: list[Tensor] = []
    position = 0
    for announced in check_inputs(head, rule):
        shape, nbytes = _shape_and_size(announced, head, rule)
        missing = position + nbytes - len(body)
        if missing > 0:
            raise BadRequest(
                f"unexpected size for input '{announced.name}', expecting {missing} bytes for model '{rule.name}'"
            )
        spec = _spec(announced.name, rule)
        inputs.append(Tensor(spec.name, spec.datatype, shape, body[position : position + nbytes]))
        position += nbytes
    if position != len(body):
        raise BadRequest(f"unexpected additional input data for model '{rule.name}'")
    return _request(head, inputs, model)


def decode_raw_inputs(head: InferHead, raw: Sequence[memoryview], model: str, rule: TensorRule) -> TensorRequest:
    """Return the request whose tensors are separate, as over gRPC. Raises BadRequest."""
    check_batch(head.batch_size, rule)
    announced = check_inputs(head, rule)
    if len(raw) != len(announced):
        raise BadRequest(
            f"expected tensor data for {len(announced)} inputs but got {len(raw)} sets of data for model '{rule.name}'"
        )
    inputs: list[Tensor] = []
    for one, data in zip(announced, raw, strict=True):
        spec = _spec(one.name, rule)
        is_sized = bool(one.batch_bytes or one.item_bytes)
        sized = one if is_sized or spec.datatype != "BYTES" else one._replace(batch_bytes=len(data))
        shape, nbytes = _shape_and_size(sized, head, rule)
        if nbytes != len(data):
            raise BadRequest(
                f"unexpected size {len(data)} for input '{one.name}', expecting {nbytes} for model '{rule.name}'"
            )
        inputs.append(Tensor(spec.name, spec.datatype, shape, data))
    return _request(head, inputs, model)


def _request(head: InferHead, inputs: list[Tensor], model: str) -> TensorRequest:
    return TensorRequest(
        model=model, inputs=inputs, outputs=tuple(output.name for output in head.outputs), id=str(head.id or ""),
        priority=head.priority, timeout_us=head.timeout_us,
        num_classes=sum(output.num_classes or 0 for output in head.outputs),
    )  # fmt: skip


def check_batch(batch_size: int, rule: TensorRule) -> None:
    """Raise BadRequest for a batch size that the model does not accept; without a batch dimension, only 1."""
    if batch_size < 1:
        raise BadRequest(f"inference request batch-size must be >= 1 for '{rule.name}'")
    most = rule.max_batch_size or 1
    if batch_size > most:
        raise BadRequest(f"inference request batch-size must be <= {most} for '{rule.name}'")


def check_inputs(head: InferHead, rule: TensorRule) -> tuple[InputHead, ...]:
    """Return the inputs, after checking that each belongs to the model and appears once. Raises BadRequest."""
    seen: set[str] = set()
    for announced in head.inputs:
        if announced.name in seen:
            raise BadRequest(f"input '{announced.name}' already exists in request")
        seen.add(announced.name)
        _spec(announced.name, rule)
    required = [spec.name for spec in rule.inputs if not spec.optional]
    if not seen.issuperset(required):
        raise BadRequest(f"expected {len(required)} inputs but got {len(seen)} inputs for model '{rule.name}'")
    return head.inputs


def _spec(name: str, rule: TensorRule) -> TensorSpec:
    for spec in rule.inputs:
        if spec.name == name:
            return spec
    raise BadRequest(f"unexpected inference input '{name}' for model '{rule.name}'")


def _shape_and_size(announced: InputHead, head: InferHead, rule: TensorRule) -> tuple[tuple[int, ...], int]:
    """Return an input's full shape and its bytes for the whole batch. Raises BadRequest."""
    name, spec = announced.name, _spec(announced.name, rule)
    own = spec.shape[1:] if rule.max_batch_size else spec.shape
    dims = announced.dims or own
    if (
        len(dims) > MAX_RANK
        or any(size < 0 for size in announced.dims)
        or not (_fits(dims, own) or rule.platform == "stub")
    ):
        raise BadRequest(
            f"unexpected shape for input '{name}' for model '{rule.name}'. Expected {list(own)}, got {list(dims)[:MAX_RANK]}"
        )
    shape = (head.batch_size, *dims) if rule.max_batch_size else dims
    if any(size < 0 for size in dims):
        if not head.is_first_generation or sum(size < 0 for size in dims) > 1 or spec.datatype == "BYTES":
            raise BadRequest(
                f"model supports variable-size for input '{name}', request must specify input shape for model '{rule.name}'"
            )
        dims = _deduced(dims, announced.item_bytes, ITEM_BYTES[spec.datatype])
        shape = (head.batch_size, *dims) if rule.max_batch_size else dims
    if spec.datatype == "BYTES":
        return shape, announced.batch_bytes or announced.item_bytes * head.batch_size
    nbytes = prod(shape) * ITEM_BYTES[spec.datatype]
    said = announced.batch_bytes or announced.item_bytes * head.batch_size
    if said and said != nbytes:
        raise BadRequest(
            f"specific batch-byte-size for input '{name}' does not match expected byte-size calculated from shape and "
            f"datatype for model '{rule.name}'"
        )
    return shape, nbytes


def _deduced(dims: tuple[int, ...], item_bytes: int, itemsize: int) -> tuple[int, ...]:
    """Return dims with the one variable size deduced from the bytes of an item."""
    known = itemsize * prod(size for size in dims if size >= 0)
    return tuple(item_bytes // known if size < 0 and known else max(size, 0) for size in dims)


def _fits(dims: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return len(dims) == len(own) and all(mine in (-1, size) for size, mine in zip(dims, own, strict=True))


# --- replies ----------------------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """One output of a reply: its tensor, and the best classes of each batch item to send instead of its elements."""

    tensor: Tensor
    classes: list[list[RankedClass]] | None = None


def answered(head: InferHead, reply: TensorReply, rule: TensorRule) -> list[Answered]:
    """Return the requested outputs in the requested order; an empty list if none were requested. Raises BadRequest."""
    tensors = {output.name: output for output in reply.outputs}
    found: list[Answered] = []
    for output in head.outputs:
        tensor, classes = tensors[output.name], None
        if output.num_classes is None:
            _check_size(output, tensor, head, rule)
        else:
            classes = rank_classes(
                tensor, spec_of(tensor, rule), output.num_classes, is_batched=bool(rule.max_batch_size)
            )
        found.append(Answered(tensor, classes))
    return found


def _check_size(output: OutputHead, tensor: Tensor, head: InferHead, rule: TensorRule) -> None:
    """Raise BadRequest if the size of an output is not the size that the request announced.

    A request of the first generation must announce it, because its client finds the outputs in the answer by the sizes
    that it sent. Classes need no size, because they are in the header. Strings need none: that generation had no strings.
    """
    is_required = head.is_first_generation and output.num_classes is None and tensor.datatype != "BYTES"
    if not output.item_bytes and not is_required:
        return
    item_bytes = len(tensor.data) // head.batch_size
    if output.item_bytes != item_bytes:
        raise BadRequest(
            f"unexpected size {output.item_bytes} for output '{output.name}', expecting {item_bytes} for model '{rule.name}'"
        )


def response_header(head: InferHead, rule: TensorRule, outputs: Sequence[Answered]) -> Any:
    """Return the InferResponseHeader message, in the form of the request's generation."""
    first = head.is_first_generation
    name = "InferResponseHeaderOfFirstGeneration" if first else "InferResponseHeader"
    message = message_class("trtis", f"{_PACKAGE}.{name}")(
        model_name=rule.name, model_version=int(rule.version), batch_size=head.batch_size
    )
    for tensor, classes in outputs:
        output = message.output.add(name=tensor.name)
        if classes is not None:
            for row in classes:
                found = output.batch_classes.add()
                for best in row:
                    found.cls.add(idx=best.position, value=float(best.value), label=best.label)
        elif first:
            output.raw.byte_size = len(tensor.data) // head.batch_size
        else:
            output.raw.batch_byte_size = len(tensor.data)
            output.raw.dims.extend(tensor.shape[1:] if rule.max_batch_size else tensor.shape)
    if not first:
        message.id = head.id
    return message


def encode_infer(head: InferHead, reply: TensorReply, rule: TensorRule, *, as_binary: bool) -> tuple[bytes, str]:
    """Return the body (the raw outputs, then the header) and the value of `NV-InferResponse`. Raises the errors of `answered`."""
    outputs = answered(head, reply, rule)
    message = response_header(head, rule, outputs)
    trailer = message.SerializeToString() if as_binary else in_lines(message).encode()
    body = b"".join([*(tensor.data for tensor, classes in outputs if classes is None), trailer])
    return body, _response_line(message, outputs)


def _response_line(message: Any, outputs: Sequence[Answered]) -> str:
    """Return the value of `NV-InferResponse`. Classes that cannot fit are not written at all."""
    num_classes = sum(len(row) for _, classes in outputs for row in classes or ())
    line = one_line(message) if num_classes <= _MAX_RESPONSE_CHARS // _MIN_CLASS_CHARS else None
    if line is not None and len(line) <= _MAX_RESPONSE_CHARS:
        return line
    short = type(message)()
    short.CopyFrom(message)
    for output in short.output:
        del output.batch_classes[:]
    return one_line(short)
