"""The typed values of tensor inference: a model's inputs and outputs, a request, its reply.

The contract between the tensor dialects and `sie.frontend.tensors.infer`: a dialect turns bytes into a `TensorRequest`
and a `TensorReply` into bytes. Imports only the times of a reply from our modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import msgspec

from sie.values.inference import Timing

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
"""The protocol's datatype names, and the NumPy code of the transferred values. BF16 is its bits, because NumPy lacks
this type. BYTES is elements of any length one after another, each as length (uint32, little-endian) and bytes."""

ITEM_BYTES: Final[dict[str, int]] = {name: int(code[2:]) for name, code in DATATYPES.items()}
"""Bytes of one element; 1 for BYTES."""
MAX_RANK: Final = 32
"""Most dimensions of a tensor."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output of a model."""

    name: str
    datatype: str
    """A key of DATATYPES."""
    shape: tuple[int, ...]
    """The full shape with the batch dimension; -1 means any size."""
    labels: tuple[str, ...] = ()
    """Names of an output's classes, by index; may be empty."""
    optional: bool = False
    """Whether a request may leave this input out."""
    format: Literal["", "NHWC", "NCHW"] = ""
    """Layout of an image input, if the model's configuration names it."""


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the waiting time and the number of waiting requests of one priority."""

    timeout_us: int = 0
    """0 means until their deadline."""
    may_shorten: bool = False
    """Whether a request's own shorter timeout replaces this one."""
    delays: bool = False
    """Whether a request that waited longer moves behind the others of its priority; otherwise it is refused."""
    max_requests: int = 0
    """0 means no limit."""


class WarmUpInput(msgspec.Struct, frozen=True):
    """One input of a warm-up request: zeros (empty strings for BYTES), random values, or the bytes of a file."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    source: Literal["zero", "random", "file"]
    file: str = ""
    """An absolute path."""


class WarmUp(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs when the model is loaded, count times, before any other."""

    name: str
    inputs: tuple[WarmUpInput, ...]
    count: int = 1


class TensorRule(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs, outputs and queue rules of one version of a model: `sie.values.card.ModelCard.tensor`."""

    name: str
    """The name that clients use; the hosted id is `NAME/versions/VERSION`."""
    version: str
    """A decimal number."""
    platform: str
    """`onnxruntime_onnx`, `pytorch_exported` or `stub`. A stub accepts any `INPUTn` of any datatype and shape."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    """Most rows of a request, and of requests that run together; 0 means no batch dimension."""
    joins_requests: bool = False
    """Whether rows of different requests may run as one batch, as the configuration allows for independent rows."""
    probes_batching: bool = False
    """Whether its worker tests rows alone and together at load, and joins requests if the results are equal."""
    image_colors: Literal["BGR", "RGB"] = "BGR"
    """The colour order of its decoded images."""
    num_priorities: int = 0
    """Requests have a priority from 1, which runs first, to this number; 0 means no priorities."""
    default_priority: int = 0
    queue_policies: dict[int, QueuePolicy] = {}
    """Policies by priority; key 0 is for every other priority. Empty: requests wait until their deadline."""
    warm_ups: tuple[WarmUp, ...] = ()
    config: dict[str, Any] = {}
    """The model's configuration as JSON: the protocol's ModelConfig with the proto's own names (snake_case), enums by
    name, numbers as numbers, and missing fields filled in."""


class RegionPart(msgspec.Struct, frozen=True):
    """A range of a region of a client's shared memory; offset is that in the region."""

    name: str
    offset: int
    nbytes: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a request or a reply.

    data is a view of unsigned bytes, C order, little-endian: the framed elements for BYTES, otherwise
    prod(shape) x itemsize bytes. It may be unaligned.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview
    part: RegionPart | None = None
    """Where the bytes are, if they are in a client's shared memory; data is then empty."""


class TensorRequest(msgspec.Struct, kw_only=True):
    """The request of every tensor dialect."""

    model: str
    """The hosted id."""
    inputs: list[Tensor]
    outputs: tuple[str, ...] = ()
    """Names of the requested outputs, in the order of the reply; empty means all, in the model's order."""
    id: str = ""
    """Echoed by the dialect; empty if not given."""
    priority: int = 0
    """0 means the model's default; lower numbers run first. Dialects reject one over `TensorRule.num_priorities`."""
    stores: Mapping[str, RegionPart] = {}
    """The places in clients' shared memory for outputs, by name."""
    timeout_us: int = 0
    """How long the client waits, in microseconds; 0 means the server's limit."""
    parameters: Mapping[str, Any] | None = None
    """The request's parameters besides its tensors; only generating models read them."""
    num_classes: int = 0
    """Most classes that the client wants of each batch item, of all outputs together, instead of their elements."""

    @property
    def uses_regions(self) -> bool:
        """Whether an input or an output is in a client's shared memory."""
        return bool(self.stores) or any(tensor.part is not None for tensor in self.inputs)

    @property
    def region_bytes(self) -> int:
        """The bytes of its inputs in shared memory."""
        return sum(tensor.part.nbytes for tensor in self.inputs if tensor.part is not None)


class TensorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The requested outputs.

    Their data are views of the reply extent, valid only until the dialect's encoder returns.
    """

    model: str
    outputs: list[Tensor]
    timing: Timing
    cuts: Collection[int] = ()
    """The numbers of the texts that a text model cut."""
