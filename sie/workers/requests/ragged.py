"""Builds replies of unknown size: sparse vectors, multivectors and extractions.

Each item's arrays stay in this process until the last one is done; then the reply's extent is leased and written. The
bytes of all of a worker's requests together are bounded. Layout: `sie.values.work.ReplyHeader`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.values.errors import BadRequest, Overloaded
from sie.values.output_kinds import KINDS, RAGGED, offsets_name
from sie.values.work import ReplyHeader
from sie.values.work_bytes import ArrayPlan, array_view, plan_arrays

_EXTRACTED = ("extract", "token_logits", "boxes", "generated")
"""The outputs of extractors, each with one array of its own name."""
RAGGED_OUTPUTS = frozenset((*RAGGED, *_EXTRACTED))
_RETRY_S = 5
_ARRAYS = {name: tuple(form.name for form in kind.arrays) for name, kind in KINDS.items()} | {
    name: (name,) for name in _EXTRACTED
}
"""The array names of each output, in the order in which `RaggedReply.keep` takes them."""
_encoder = msgspec.msgpack.Encoder()


class KeptBytes:
    """The bytes of outputs that this worker keeps, and their limit."""

    __slots__ = ("max_bytes", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, nbytes: int) -> None:
        """Add nbytes. Raises Overloaded RESOURCE_EXHAUSTED over the limit, and then adds nothing."""
        if self.used_bytes + nbytes > self.max_bytes:
            raise Overloaded(
                "unfinished replies hold max_pending_reply_bytes",
                code="RESOURCE_EXHAUSTED",
                retry_after_s=_RETRY_S,
            )
        self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Subtract nbytes."""
        self.used_bytes -= nbytes


class RaggedReply:
    """The outputs of one request so far."""

    __slots__ = ("_arrays", "_kept", "_max_reply_bytes", "_nbytes", "_offsets")

    def __init__(self, num_items: int, output_types: tuple[str, ...], kept: KeptBytes, max_reply_bytes: int) -> None:
        self._kept = kept
        self._max_reply_bytes = max_reply_bytes
        self._nbytes = 0
        self._arrays: dict[str, list[NDArray[Any]]] = {
            name: [_NOTHING] * num_items for output in output_types for name in _ARRAYS[output]
        }
        self._offsets = {_ARRAYS[output][0]: offsets_name(output) for output in output_types if output != "dense"}
        """The name of each output's offsets, which stand before its first array."""

    def keep(self, output: str, index: int, arrays: tuple[NDArray[Any], ...]) -> None:
        """Copy one item's arrays of one output: (row,), (indices, values) or (rows,).

        Raises BadRequest if the reply gets too large, and Overloaded if the worker already keeps too much.
        """
        nbytes = sum(array.nbytes for array in arrays)
        if self._nbytes + nbytes > self._max_reply_bytes:
            raise BadRequest(f"The reply would hold over max_reply_bytes ({self._max_reply_bytes}); split the request")
        self._kept.take(nbytes)
        self._nbytes += nbytes
        for name, array in zip(_ARRAYS[output], arrays, strict=True):
            self._arrays[name][index] = array.copy()  # a view would keep the whole step's memory

    def plan(self) -> tuple[bytes, ArrayPlan]:
        """Return the header of the complete reply and the layout of its arrays; `times` comes first."""
        shapes: list[tuple[str, str, tuple[int, ...]]] = [("times", "<i8", (3,))]
        for name, items in self._arrays.items():
            total = sum(map(len, items))
            if name == "dense":
                shapes.append((name, items[0].dtype.str, (len(items), len(items[0]))))
                continue
            if name in self._offsets:
                shapes.append((self._offsets[name], "<i4", (len(items) + 1,)))
            shapes.append((name, items[0].dtype.str, (total, *items[0].shape[1:])))
        plan = plan_arrays(shapes)
        return _encoder.encode(ReplyHeader(plan.refs)), plan

    def write(self, payload: memoryview, plan: ArrayPlan) -> None:
        """Write every array except `times` to its place."""
        targets = {ref.name: array_view(payload, ref) for ref in plan.refs}
        for name, items in self._arrays.items():
            if name == "dense":
                np.stack(items, out=targets[name])
                continue
            np.concatenate(items, out=targets[name])
            if name in self._offsets:
                offsets = targets[self._offsets[name]]
                offsets[0] = 0
                np.cumsum([len(item) for item in items], out=offsets[1:])

    def close(self) -> None:
        """Drop all arrays. A second call does nothing."""
        self._kept.give_back(self._nbytes)
        self._nbytes = 0
        self._arrays = {}


_NOTHING: NDArray[Any] = np.empty(0)
