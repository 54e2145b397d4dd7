"""Owns the encode operation: a typed request to rows, whatever dialect it came in.

resolve -> prompt -> tokenise -> admission -> engine -> rows. Dialects decode before and encode after.
"""

from __future__ import annotations

import asyncio
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final

import msgspec
from numpy.typing import NDArray

from sie.control import ModelEntry
from sie.errors import BadRequest, Internal
from sie.frontend.engine import ShmEngine
from sie.frontend.links import Pending, Reply
from sie.frontend.models import ModelTable
from sie.frontend.prompts import apply_prompt
from sie.frontend.tokenize import Tokenizer, encode_stub_texts, is_long
from sie.settings import Limits
from sie.shm.extent import DTYPES
from sie.shm.layout import PROLOGUE, PROLOGUE_BYTES, ProtocolError, round_up
from sie.types import EncodeReply, EncodeRequest, ReplyHeader, Timing, WorkHeader

_LONG_TEXT_BYTES: Final = 8192
"""From here tokenising takes over about 2 ms, and moves to a thread."""
_TIMES: Final = struct.Struct("<3q")
_decoder: Final = msgspec.msgpack.Decoder(ReplyHeader)
_ITEM_BYTES: Final = {"float32": 4, "float16": 2}


class Encoder:
    """Run encode requests on the engine."""

    def __init__(self, engine: ShmEngine, models: ModelTable, limits: Limits, pool: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._models = models
        self._limits = limits
        self._pool = pool

    async def start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> tuple[Pending, int]:
        """Tokenise and submit a resolved request; return its record and the nanoseconds that tokenising took.

        Raises what admission and the tokenizer raise.
        """
        began_ns = time.monotonic_ns()
        header = WorkHeader(
            entry.card.id, "encode", _count(request), (), request.output_dtype or "float32",
            _wants_normalize(request, entry), request.dimensions,
        )  # fmt: skip
        self._check_reply_size(header, entry)
        arrays = self._try_prepare(entry, request)
        if arrays is None:
            tokenizer = await self._models.tokenizer(entry) if entry.card.tokenizer_file else None
            loop = asyncio.get_running_loop()
            arrays = await loop.run_in_executor(self._pool, _prepare, entry, request, tokenizer)
        num_tokens = int(arrays[0][1][-1])
        took_ns = time.monotonic_ns() - began_ns
        return self._engine.submit(header, arrays, num_tokens, deadline_ns), took_ns

    def _try_prepare(self, entry: ModelEntry, request: EncodeRequest) -> list[tuple[str, NDArray[Any]]] | None:
        """Tokenise here and now; None when that would keep the event loop too long or the tokenizer is not there."""
        tokenizer = None
        if entry.card.tokenizer_file:
            tokenizer = self._models.ready_tokenizer(entry)
            if tokenizer is None or (request.texts is not None and is_long(request.texts, _LONG_TEXT_BYTES)):
                return None
        return _prepare(entry, request, tokenizer)

    def _check_reply_size(self, header: WorkHeader, entry: ModelEntry) -> None:
        width = header.truncate_dim or entry.card.dims.get("dense", 0)
        nbytes = header.num_items * width * _ITEM_BYTES.get(header.output_dtype, 1)
        if nbytes > self._limits.max_reply_bytes:
            raise BadRequest(
                f"The reply would hold {nbytes} bytes of vectors, over max_reply_bytes ({self._limits.max_reply_bytes}); "
                "split the request"
            )


def _wants_normalize(request: EncodeRequest, entry: ModelEntry) -> bool | None:
    """Return what the request wants, None for the model's own way; a vector that is cut gets unit length again."""
    is_cut = request.dimensions is not None and request.dimensions < entry.card.dims["dense"]
    return True if is_cut else request.options.get("normalize")


def _count(request: EncodeRequest) -> int:
    return len(request.texts if request.texts is not None else request.token_lists or ())


def _prepare(entry: ModelEntry, request: EncodeRequest, tokenizer: Tokenizer | None) -> list[tuple[str, NDArray[Any]]]:
    """Return the arrays of a request's extent, the items' bounds first. Runs on the loop or on a thread."""
    if request.token_lists is not None:
        if tokenizer is None:
            raise BadRequest(f"Model '{entry.card.id}' requires text input, not token arrays")
        token_ids, cu_seqlens = tokenizer.check_token_ids(request.token_lists)
        return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]
    is_query = bool(request.options.get("is_query"))
    texts = apply_prompt(entry.card, request.texts or [], request.options, request.instruction, is_query)
    if tokenizer is None:
        text, text_offsets, cu_seqlens = encode_stub_texts(entry.card, texts)
        return [("cu_seqlens", cu_seqlens), ("text", text), ("text_offsets", text_offsets)]
    token_ids, cu_seqlens = tokenizer.encode_texts(texts)
    return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]


def read_reply(
    reply: Reply, entry: ModelEntry, request: EncodeRequest, began_ns: int, tokenization_ns: int
) -> EncodeReply:
    """Return a reply's rows and times; the rows are valid until `reply.release`.

    began_ns is when the request's headers were read. Raises Internal when the extent is not what the layout says.
    """
    view, pending = reply.view, reply.pending
    header_bytes: int = PROLOGUE.unpack_from(view)[1]
    payload = round_up(PROLOGUE_BYTES + header_bytes)
    try:
        code, num_items, width, offset, nbytes = _rows_of(bytes(view[PROLOGUE_BYTES : PROLOGUE_BYTES + header_bytes]))
        started_ns, inference_ns, postprocessing_ns = _TIMES.unpack_from(view, payload)
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, struct.error) as error:
        raise Internal("the worker's reply could not be read") from error
    rows = view[payload + offset : payload + offset + nbytes]
    if num_items != _count(request) or len(rows) != nbytes:
        raise Internal("the worker's reply has another shape than the request")
    timing = Timing(
        total_ms=(time.monotonic_ns() - began_ns) / 1e6,
        queue_ms=max(0, started_ns - pending.submitted_ns) / 1e6,
        tokenization_ms=tokenization_ns / 1e6,
        inference_ms=inference_ns / 1e6,
        postprocessing_ms=postprocessing_ns / 1e6,
    )
    return EncodeReply(
        model=request.model,
        ids=request.ids,
        num_items=num_items,
        values=rows,
        dtype=code,
        width=width,
        dims=request.dimensions or entry.card.dims["dense"],
        output_dtype=request.output_dtype or "float32",
        input_tokens=pending.num_tokens,
        timing=timing,
    )


@lru_cache(maxsize=4096)
def _rows_of(header: bytes) -> tuple[str, int, int, int, int]:
    """Return (dtype code, n, width, offset in the payload, bytes) of a reply header's rows.

    Every reply of one shape has the same header, so a busy server decodes none. Raises ProtocolError.
    """
    for ref in _decoder.decode(header).arrays:
        dtype = DTYPES.get(ref.dtype)
        if ref.name == "dense" and dtype is not None and len(ref.shape) == 2 and min(ref.shape) > 0 and ref.offset >= 0:
            num_items, width = ref.shape
            return ref.dtype, num_items, width, ref.offset, num_items * width * dtype.itemsize
    raise ProtocolError("a reply without rows")
