"""Reads tensors from a request's extent, groups requests that can share a step, and keeps outputs until the reply.

Inputs alias the extent. Outputs are the runner's own memory, copied once, into the reply's extent. Layout:
`sie.values.work`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from sie.values.card import ModelCard
from sie.values.errors import BadRequest, ProtocolError
from sie.values.work import TensorForm, TensorReplyHeader, TensorTask, WorkHeader
from sie.values.work_bytes import ArrayPlan, array_view, plan_arrays
from sie.workers.model_api import OutputTensor, TensorInputs
from sie.workers.requests.ragged import KeptBytes

_task_decoder: Final = msgspec.msgpack.Decoder(TensorTask)
_encoder: Final = msgspec.msgpack.Encoder()


class BatchKey(NamedTuple):
    """The properties that requests must share to run as one: inputs without their batch dimension, and outputs."""

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[str, ...]


def read_tensors(header: WorkHeader, payload: memoryview) -> TensorInputs:
    """Return the inputs in a request's extent. Raises ProtocolError."""
    try:
        task = read_task(header.task)
    except msgspec.MsgspecError as error:
        raise ProtocolError("a tensor task that cannot be decoded") from error
    if len(task.inputs) != len(header.arrays) or any(ref.dtype != "|u1" for ref in header.arrays):
        raise ProtocolError(f"{len(task.inputs)} tensors in {len(header.arrays)} arrays")
    return TensorInputs(task, tuple([array_view(payload, ref) for ref in header.arrays]))


@lru_cache(maxsize=1024)
def read_task(task: bytes) -> TensorTask:
    """Return the decoded task of a header; equal headers share one cached object. Raises MsgspecError."""
    return _task_decoder.decode(task)


def grouping(card: ModelCard, inputs: TensorInputs) -> tuple[object, int, int]:
    """Return batch_key, num_rows and max_rows of a request for `WaitingItem`.

    A stub's requests all run together. A request for a model that does not join requests runs alone.
    """
    rule = card.tensor
    if rule is None or card.stub is not None:
        return None, 1, 1
    if not rule.max_batch_size:
        return object(), 1, 1
    batch_key, num_rows = _batch_key(inputs.task)
    return batch_key if rule.joins_requests else object(), num_rows, rule.max_batch_size


@lru_cache(maxsize=1024)
def _batch_key(task: TensorTask) -> tuple[BatchKey, int]:
    forms = sorted((form.name, form.datatype, form.shape[1:]) for form in task.inputs)
    return BatchKey(tuple(forms), task.outputs), task.inputs[0].shape[0]


class KeptTensors:
    """The outputs of one request until its reply has memory. It has the writer's interface of `RaggedReply`."""

    __slots__ = ("_kept", "_max_reply_bytes", "_nbytes", "_outputs")

    def __init__(self, kept: KeptBytes, max_reply_bytes: int) -> None:
        self._kept = kept
        self._max_reply_bytes = max_reply_bytes
        self._nbytes = 0
        self._outputs: tuple[OutputTensor, ...] = ()

    def put(self, outputs: tuple[OutputTensor, ...]) -> None:
        """Keep all outputs, without a copy. Raises BadRequest for a too large reply, Overloaded over the worker's
        limit.
        """
        nbytes = sum([output.data.nbytes for output in outputs])
        if nbytes > self._max_reply_bytes:
            raise BadRequest(
                f"The reply would hold {nbytes} bytes of tensors, over max_reply_bytes ({self._max_reply_bytes})"
            )
        self._kept.take(nbytes)
        self._nbytes, self._outputs = nbytes, outputs

    def plan(self) -> tuple[bytes, ArrayPlan]:
        """Return the header of the reply and the layout of its arrays; `times` comes first."""
        forms = tuple([output.form for output in self._outputs])
        return _plan(forms, tuple([output.data.nbytes for output in self._outputs]))

    def write(self, payload: memoryview, plan: ArrayPlan) -> None:
        """Write every array except `times` to its place."""
        for ref, output in zip(plan.refs[1:], self._outputs, strict=True):
            if output.data.nbytes:
                payload[ref.offset : ref.offset + output.data.nbytes] = output.data.data

    def close(self) -> None:
        """Drop all outputs. A second call does nothing."""
        self._kept.give_back(self._nbytes)
        self._nbytes, self._outputs = 0, ()


@lru_cache(maxsize=1024)
def _plan(forms: tuple[TensorForm, ...], sizes: tuple[int, ...]) -> tuple[bytes, ArrayPlan]:
    shapes: list[tuple[str, str, tuple[int, ...]]] = [("times", "<i8", (3,))]
    shapes += [(str(index), "|u1", (nbytes,)) for index, nbytes in enumerate(sizes)]
    plan = plan_arrays(shapes)
    return _encoder.encode(TensorReplyHeader(plan.refs, forms)), plan
