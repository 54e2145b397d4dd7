"""The typed values of tensor inference: a model's inputs and outputs, a request, its reply.

The contract between the tensor dialects and `sie.frontend.tensors.infer`: a dialect turns bytes into a `TensorRequest` and a
`TensorReply` into bytes. Imports nothing of ours but the times of a reply; holds no behaviour beyond construction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import msgspec

from sie.values.encode import Timing

DATATYPES: Final[dict[str, str]] = {
    "BOOL": "|b1",
    "UINT8": "|u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "|i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "BF16": "<u2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BYTES": "|u1",
}
"""The protocol's names of datatypes, and the NumPy code of what crosses: BF16 its bits, since NumPy has no such type;
BYTES elements of any length behind each other, each as its length (uint32, little-endian) and its bytes."""

ITEM_BYTES: Final[dict[str, int]] = {name: int(code[2:]) for name, code in DATATYPES.items()}
"""Bytes of one element; of BYTES those of a byte."""
MAX_RANK: Final = 32
"""Most dimensions of a tensor."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output of a model."""

    name: str
    datatype: str
    """A key of DATATYPES."""
    shape: tuple[int, ...]
    """The full shape, the batch dimension included; -1: any size."""
    labels: tuple[str, ...] = ()
    """Names of an output's classes, by index; empty when it has none."""
    optional: bool = False
    """Whether a request may leave this input out."""
    format: Literal["", "NHWC", "NCHW"] = ""
    """Layout of an input of images, where the model's configuration names one."""


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long requests of one priority may wait for their step, and how many may."""

    timeout_us: int = 0
    """0: until their deadline."""
    may_shorten: bool = False
    """Whether a request's own timeout, where it is shorter, takes the place of this one."""
    delays: bool = False
    """Whether a request that waited longer goes behind the others of its priority; else it is refused."""
    max_requests: int = 0
    """0: any number."""


class TensorRule(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of a model takes and gives: `sie.values.card.ModelCard.tensor`."""

    name: str
    """As clients say it; the hosted id is `NAME/versions/VERSION`."""
    version: str
    """A decimal number."""
    platform: str
    """`onnxruntime_onnx`, `pytorch_exported` or `stub`. A stub takes any `INPUTn` of any datatype and shape."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    """Most rows of a request, and of requests that run together; 0: the model has no batch dimension."""
    joins_requests: bool = False
    """Whether rows of different requests may run as one batch, since the configuration says that they do not meet."""
    probes_batching: bool = False
    """Whether its worker tries rows alone and together at load, and joins requests where they give the same."""
    image_colors: Literal["BGR", "RGB"] = "BGR"
    """The order of colours in which it sees encoded images."""
    num_priorities: int = 0
    """Requests have a priority from 1, which goes first, to this; 0: none has."""
    default_priority: int = 0
    queue_policies: dict[int, QueuePolicy] = {}
    """By priority; 0: of every priority that is not there. Empty: requests wait until their deadline."""
    config: dict[str, Any] = {}
    """The model's configuration as JSON: the protocol's ModelConfig with the proto's own names (snake_case), enums by
    name, numbers as numbers, what was left out completed."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a request or a reply.

    data is a view of unsigned bytes, C order, little-endian: for BYTES the framed elements, else
    prod(shape) x itemsize bytes. It need not be aligned.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


class TensorRequest(msgspec.Struct, kw_only=True):
    """What every tensor dialect's request decodes to."""

    model: str
    """The hosted id."""
    inputs: list[Tensor]
    outputs: tuple[str, ...] = ()
    """Names of the outputs that are wanted, in the order of the reply; empty: all, in the model's order."""
    id: str = ""
    """Echoed by the dialect; empty when there was none."""
    priority: int = 0
    """0: the model's own; else lower numbers go first. Over `TensorRule.num_priorities` is the dialect's to judge."""
    timeout_us: int = 0
    """How long the client waits, in microseconds; 0: as long as the server allows."""
    parameters: Mapping[str, Any] | None = None
    """What the request says beside its tensors; only models that generate look at it."""


class TensorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs that were wanted.

    Their data are views of the reply extent: only valid until the dialect's encoder returns.
    """

    model: str
    outputs: list[Tensor]
    timing: Timing
    cuts: Collection[int] = ()
    """The numbers of the texts that a model of texts has cut."""
