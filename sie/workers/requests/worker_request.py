"""Follows a request in the worker: read from its extent, given a reply extent, filled row by row, answered.

A reply of fixed size is leased before the first step and filled in place. A reply of unknown size stays in
`sie.workers.requests.ragged` until it is complete, and may then wait for memory. A request gets exactly one terminal
descriptor: REPLY, or ERROR (with length 0 if its client cancelled it or its deadline passed).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.runtime import failpoints
from sie.shm.extent import begin_extent, is_cancelled, is_stopped
from sie.shm.layout import ERROR, FLAG_ALONE, REPLY, Descriptor, ProtocolError
from sie.shm.pool import Lease
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, ResourceExhausted, SieError, to_wire
from sie.values.work import ArrayRef, ReplyHeader, WorkHeader
from sie.values.work_bytes import (
    REPLY_TIMES,
    array_view,
    decode_header,
    extent_bytes,
    extent_head,
    plan_arrays,
    split_extent,
)
from sie.workers.model_api import Comparison, ImageItem, OutputTensor, Pair, SearchedImage
from sie.workers.packed.adjacent import AdjacentItems
from sie.workers.requests.ragged import RAGGED_OUTPUTS, KeptBytes, RaggedReply
from sie.workers.requests.readers import Reader, reader_of
from sie.workers.requests.tensors import KeptTensors, read_tensors

_decoder = msgspec.msgpack.Decoder(WorkHeader)
_encoder = msgspec.msgpack.Encoder()
_OUTPUTS: Final = frozenset(("dense", "logits", "tensors", "generate", *RAGGED_OUTPUTS))
ROWS: Final = {"encode": "dense", "score": "score", "extract": "logits", "infer": "tensors", "generate": ""}
"""The name of an operation's fixed-size rows in its reply; `infer` and `generate` have none."""
_MAX_KEPT_HEADER_BYTES: Final = 2048
"""A longer header (a long list of labels) is decoded each time, because thousands of headers are cached."""
_PAIR_OUTPUTS: Final = ("logits",)


class Link(Protocol):
    """The attachment of a request: the source of its extent and the destination of its reply."""

    slot: int

    def view(self, descriptor: Descriptor) -> memoryview:
        """Return the read-only extent that a descriptor names."""
        ...

    def lease(self, nbytes: int) -> Lease | None:
        """Return a lease for a reply; None while the memory for replies is full."""
        ...

    def can_hold(self, nbytes: int) -> bool:
        """Whether the memory for replies is large enough for one of nbytes."""
        ...

    def reply(self, kind: int, request_id: int, lease: Lease | None, length: int) -> None:
        """Queue a terminal descriptor; from here on the peer owns the lease."""
        ...

    def try_tokens(self, lease: Lease, length: int) -> bool:
        """Send tokens. Return False, with the lease ended, without credit; only then may they be sent again."""
        ...

    def retry_later(self, try_send: Callable[[], bool]) -> None:
        """Call try_send again whenever capacity may be free, until it returns True."""
        ...


class ReplyLayout(NamedTuple):
    """The bytes that all replies of one shape share, and the places of the others in the extent."""

    head: bytes
    times_at: int
    row_bytes: int
    rows_at: int
    nbytes: int


@lru_cache(maxsize=4096)
def reply_layout(num_items: int, code: str, width: int, name: str = "dense") -> ReplyLayout:
    """Return the layout of a reply with an array `name` of num_items rows of width elements of dtype `code`."""
    plan = plan_arrays([("times", "<i8", (3,)), (name, code, (num_items, width))])
    header = _encoder.encode(ReplyHeader(plan.refs))
    payload_at = extent_bytes(len(header), 0)
    times, rows = (payload_at + ref.offset for ref in plan.refs)
    return ReplyLayout(extent_head(header), times, np.dtype(code).itemsize * width, rows, payload_at + plan.nbytes)


class RequestForm(msgspec.Struct):
    """What all requests with the same header share."""

    header: WorkHeader
    is_ragged: bool
    num_outputs: int
    read: Reader
    """Reads the inputs."""
    card: ModelCard | None = None
    """The card that `reply` is for: that of the last such request."""
    reply: ReplyLayout | None = None
    """The layout of the replies, if their size is fixed."""


@lru_cache(maxsize=4096)
def _form_of(encoded: bytes) -> RequestForm:
    """Decode and check a header, cached by its bytes. Raises ProtocolError."""
    header = decode_header(encoded, _decoder)
    outputs = header.output_types
    if header.operation not in ROWS or not outputs or not set(outputs) <= _OUTPUTS:
        raise ProtocolError(f"a request for outputs {outputs}")
    is_ragged = header.operation == "infer" or not RAGGED_OUTPUTS.isdisjoint(outputs)
    refs = {ref.name: ref for ref in header.arrays}
    read = reader_of(header, refs) or partial(_read_inputs, header, refs)
    return RequestForm(header, is_ragged, header.num_items * len(outputs), read)


class Request(msgspec.Struct, eq=False):
    """One submitted extent while this worker has it.

    inputs has one entry for each item, as the runner takes it: arrays (t_i,) int32, `Pair`s of such, UTF-8 text,
    `ImageItem`s, `SearchedImage`s or `TensorInputs`. They alias the extent. costs are their tokens. comparison is set
    if item 0 is compared with the others. A struct, because it takes half the time of a class to make.
    """

    link: Link
    request_id: int
    inflight_entry: tuple[int, int]
    deadline_ns: int
    is_alone: bool
    _extent: memoryview
    form: RequestForm
    header: WorkHeader
    num_left: int
    costs: list[int]
    inputs: Sequence[Any]
    comparison: Comparison | None
    ragged: RaggedReply | KeptTensors | None = None
    started_ns: int = 0
    inference_ns: int = 0
    postprocessing_ns: int = 0
    ended: bool = False
    has_failed: bool = False
    _lease: Lease | None = None
    _layout: ReplyLayout | None = None
    _lacking_bytes: int = 0
    """Size of the reply that found no memory."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the frontend has set the cancel byte."""
        return is_cancelled(self._extent)

    def is_stopped(self, choice: int) -> bool:
        """Whether the frontend has stopped this choice of a generation request."""
        return is_stopped(self._extent, choice)

    @property
    def may_run(self) -> bool:
        """Whether its items may run: its reply has memory, or will look for it when complete."""
        return self.started_ns != 0

    def try_reserve(self, layout: ReplyLayout, now_ns: int) -> bool:
        """Lease the reply extent. Return False without free memory."""
        lease = self._lease_reply(layout.nbytes)
        if lease is None:
            return False
        self._lease, self._layout = lease, layout
        lease.view[: len(layout.head)] = layout.head
        self.started_ns = now_ns
        return True

    def _lease_reply(self, nbytes: int) -> Lease | None:
        lease = self.link.lease(nbytes)
        if lease is None:
            self._lacking_bytes = nbytes
        return lease

    def lack_of_memory(self) -> SieError:
        """Return the error of a reply that finds no memory although no other reply holds any."""
        if self.link.can_hold(self._lacking_bytes):
            return ResourceExhausted("The host has no memory for this reply now")
        return BadRequest(
            f"The reply of {self._lacking_bytes} bytes would not fit into this worker's memory for replies "
            "(reply_segment_bytes, max_large_bytes); split the request"
        )

    def start_ragged(self, kept: KeptBytes, max_reply_bytes: int, now_ns: int) -> None:
        """Start to keep the outputs of a request whose reply size is unknown."""
        header = self.header
        if header.operation == "infer":
            self.ragged = KeptTensors(kept, max_reply_bytes)
        else:
            self.ragged = RaggedReply(header.num_items, header.output_types, kept, max_reply_bytes)
        self.started_ns = now_ns

    def keep(self, output: str, index: int, arrays: tuple[NDArray[Any], ...]) -> None:
        """Keep one item's arrays of one output. The request fails if they exceed a limit."""
        assert isinstance(self.ragged, RaggedReply)
        try:
            self.ragged.keep(output, index, arrays)
        except SieError as error:
            self.fail(error)
        self.num_left -= 1

    def keep_tensors(self, outputs: tuple[OutputTensor, ...]) -> None:
        """Keep the outputs of an infer request. The request fails if they exceed a limit."""
        assert isinstance(self.ragged, KeptTensors)
        try:
            self.ragged.put(outputs)
        except SieError as error:
            self.fail(error)
        self.num_left -= 1

    def put_rows(self, index: int, num_rows: int, rows: memoryview) -> None:
        """Copy the finished rows (bytes) of adjacent items, from item index on, to their place in the reply extent."""
        lease, layout = self._lease, self._layout
        assert lease is not None
        assert layout is not None
        start = layout.rows_at + index * layout.row_bytes
        lease.view[start : start + len(rows)] = rows
        failpoints.reach("worker.mid_write")
        self.num_left -= num_rows

    def try_reply(self) -> bool:
        """Send the complete reply. Return False if a ragged reply finds no memory now."""
        if self.ragged is not None:
            return self._try_reply_ragged(self.ragged)
        lease, layout = self._lease, self._layout
        assert lease is not None
        assert layout is not None
        REPLY_TIMES.pack_into(lease.view, layout.times_at, self.started_ns, self.inference_ns, self.postprocessing_ns)
        self._end(REPLY, lease, layout.nbytes)
        return True

    def _try_reply_ragged(self, ragged: RaggedReply | KeptTensors) -> bool:
        header, plan = ragged.plan()
        nbytes = extent_bytes(len(header), plan.nbytes)
        lease = self._lease_reply(nbytes)
        if lease is None:
            return False
        payload = begin_extent(lease.view, header)
        ragged.write(payload, plan)
        REPLY_TIMES.pack_into(payload, 0, self.started_ns, self.inference_ns, self.postprocessing_ns)
        self._end(REPLY, lease, nbytes)
        return True

    def try_end(self, header: bytes) -> bool:
        """Send a reply that consists of this header only. Return False without free memory."""
        nbytes = extent_bytes(len(header), 0)
        lease = self.link.lease(nbytes)
        if lease is None:
            return False
        begin_extent(lease.view, header)
        self._end(REPLY, lease, nbytes)
        return True

    def cancel(self) -> None:
        """Acknowledge a cancel or a passed deadline: no client waits for the rows."""
        self._give_back()
        self._end(ERROR, None, 0)

    def fail(self, error: SieError) -> None:
        """Send an error instead of rows."""
        self._give_back()
        send_error(self.link, self.request_id, error)
        self.ended = self.has_failed = True

    def drop(self) -> None:
        """Drop the request because its frontend is gone. The link frees its memory."""
        self.ended = True
        self._lease = None
        self._close_outputs()

    def _close_outputs(self) -> None:
        if self.ragged is not None:
            self.ragged.close()

    def _give_back(self) -> None:
        self._close_outputs()
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def _end(self, kind: int, lease: Lease | None, length: int) -> None:
        self.ended = True
        self._lease = None
        self._close_outputs()
        failpoints.reach("worker.before_reply")
        self.link.reply(kind, self.request_id, lease, length)


def read_request(link: Link, descriptor: Descriptor) -> Request:
    """Read the extent that a descriptor names. Raises ProtocolError if it violates the layout."""
    extent = link.view(descriptor)
    encoded, payload = split_extent(extent)
    form = (_form_of if len(encoded) <= _MAX_KEPT_HEADER_BYTES else _form_of.__wrapped__)(encoded)
    costs, inputs = form.read(payload)
    header, request_id = form.header, descriptor.request_id
    return Request(
        link, request_id, (link.slot, request_id), descriptor.deadline_ns, descriptor.flags & FLAG_ALONE != 0,
        extent, form, header, form.num_outputs, costs, inputs, Comparison(header) if header.compared else None,
    )  # fmt: skip


def send_error(link: Link, request_id: int, error: SieError) -> None:
    """Send an error for a request, now or as soon as memory is free: the client must get this error and no other."""
    header = _encoder.encode(to_wire(error))
    if not _try_send_error(link, request_id, header):
        link.retry_later(partial(_try_send_error, link, request_id, header))


def _try_send_error(link: Link, request_id: int, header: bytes) -> bool:
    lease = link.lease(extent_bytes(len(header), 0))
    if lease is None:
        return False
    begin_extent(lease.view, header)
    link.reply(ERROR, request_id, lease, extent_bytes(len(header), 0))
    return True


def _read_inputs(header: WorkHeader, refs: dict[str, ArrayRef], payload: memoryview) -> tuple[list[int], Sequence[Any]]:
    if header.operation == "infer":
        if header.num_items != 1 or header.output_types != ("tensors",):
            raise ProtocolError("a request to infer that is not one item")
        inputs = read_tensors(header, payload)
        return [inputs.task.cost], [inputs]
    costs = _lengths(payload, refs.get("cu_seqlens"), header.num_items)
    if "pixels" in refs:
        mixed = _mixed(payload, refs, header.num_items)
        return costs, _searched(payload, refs, mixed) if "query_ids" in refs else mixed
    tokens, text = refs.get("token_ids"), refs.get("text")
    if tokens is not None and tokens.dtype == "<i4":
        token_ids = _split(array_view(payload, tokens), costs)
        is_paired = header.output_types == _PAIR_OUTPUTS or (header.operation == "score" and not header.compared)
        return costs, _pairs(payload, refs, costs, token_ids) if is_paired else token_ids
    if text is None or text.dtype != "|u1":
        raise ProtocolError("a request with neither token_ids nor text")
    return costs, _split(array_view(payload, text), _lengths(payload, refs.get("text_offsets"), header.num_items))


def _mixed(payload: memoryview, refs: dict[str, ArrayRef], num_items: int) -> list[ImageItem | NDArray[Any]]:
    """Return each item's images, or its tokens or text if it has no image."""
    counts = _lengths(payload, refs.get("image_offsets"), num_items)
    images = iter(_images(payload, refs, sum(counts)))
    items = [ImageItem(tuple(itertools.islice(images, count))) for count in counts]
    if all(counts):
        return list(items)
    tokens = refs.get("token_ids", refs.get("text"))
    if tokens is None or tokens.dtype not in ("<i4", "|u1"):
        raise ProtocolError("a request with neither images nor a text for an item")
    bounds = _lengths(payload, refs.get("token_offsets", refs.get("text_offsets")), num_items)
    texts = _split(array_view(payload, tokens), bounds)
    return [item if item.images else text for item, text in zip(items, texts, strict=True)]


def _searched(
    payload: memoryview, refs: dict[str, ArrayRef], items: list[ImageItem | NDArray[Any]]
) -> list[SearchedImage]:
    """Return each item's image with the request's queries."""
    bounds = refs.get("query_offsets")
    num_queries = bounds.shape[0] - 1 if bounds is not None and len(bounds.shape) == 1 else 0
    lengths = _lengths(payload, bounds, num_queries)
    ids = array_view(payload, refs["query_ids"])
    if refs["query_ids"].dtype != "<i4" or not all(lengths):
        raise ProtocolError("queries that are not int32, or empty")
    queries, key = tuple(_split(ids, lengths)), ids.tobytes() + struct.pack(f"<{num_queries}i", *lengths)
    if not all(isinstance(item, ImageItem) and len(item.images) == 1 for item in items):
        raise ProtocolError("a request that looks for something in an item that is not one image")
    return [SearchedImage(item.images[0], queries, key) for item in items if isinstance(item, ImageItem)]


def _images(payload: memoryview, refs: dict[str, ArrayRef], count: int) -> list[NDArray[np.uint8]]:
    """Return the (h, w, 3) views of all images."""
    sizes = refs.get("image_sizes")
    if sizes is None or sizes.dtype != "<i4" or sizes.shape != (count, 2) or refs["pixels"].dtype != "|u1":
        raise ProtocolError("images that are not uint8, or without (m, 2) int32 sizes")
    shapes: list[list[int]] = array_view(payload, sizes).tolist()
    if min(map(min, shapes), default=0) < 1:
        raise ProtocolError("an image without pixels")
    flat = _split(array_view(payload, refs["pixels"]), [3 * height * width for height, width in shapes])
    return [pixels.reshape(*shape, 3) for pixels, shape in zip(flat, shapes, strict=True)]


def _pairs(
    payload: memoryview, refs: dict[str, ArrayRef], costs: list[int], token_ids: Sequence[NDArray[Any]]
) -> list[Pair]:
    types = refs.get("token_types")
    if types is None:
        return list(map(Pair, token_ids))
    if types.dtype != "|u1":
        raise ProtocolError("a request whose token_types are not uint8")
    return list(map(Pair, token_ids, _split(array_view(payload, types), costs)))


def _lengths(payload: memoryview, ref: ArrayRef | None, num_items: int) -> list[int]:
    """Return the differences of an (n + 1,) int32 array that starts at 0 and never decreases.

    Read as a memoryview: NumPy would cost several times as much for the few numbers of a small request.
    """
    if ref is None or ref.dtype != "<i4" or ref.shape != (num_items + 1,) or num_items < 1 or ref.offset & 63:
        raise ProtocolError("a request whose item bounds are not (n + 1,) int32")
    end = ref.offset + 4 * (num_items + 1)
    if ref.offset < 0 or end > len(payload):
        raise ProtocolError("a request whose item bounds lie outside its extent")
    values: list[int] = payload[ref.offset : end].cast("i").tolist()
    lengths = [end - start for start, end in itertools.pairwise(values)]
    if values[0] != 0 or min(lengths) < 0:
        raise ProtocolError("a request whose item bounds do not rise from 0")
    return lengths


def _split(data: NDArray[Any], lengths: list[int]) -> Sequence[NDArray[Any]]:
    if data.ndim != 1 or sum(lengths) != len(data):
        raise ProtocolError(f"items of {sum(lengths)} elements in an array of shape {data.shape}")
    return [data] if len(lengths) == 1 else AdjacentItems([data], lengths)
