"""Prepares and submits encode requests: turns a typed request of any dialect into its extent's arrays.

Order: `resolve` -> prompt -> tokenise, decode images -> engine, which admits and submits. `reply_reader` reads the reply.
The dialect decodes the request before, and encodes the reply after.
"""

from __future__ import annotations

import asyncio
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.engine.interface import Engine
from sie.frontend.engine.request_layout import TextEncodeKey, lay_out_text
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.inputs.mixed import mix_items
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.profile_options import check_cuts, shorter_expansion, token_limit
from sie.frontend.inputs.prompts import apply_prompt, check_prompted, count_prompted, prompt_of
from sie.frontend.inputs.stub_texts import encode_stub_text, encode_stub_texts
from sie.frontend.inputs.tokenize import LONG_TEXT_BYTES, Tokenizer
from sie.frontend.models.adapter_lookup import requested_adapter
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.interface import Submitted
from sie.frontend.operations.reply_reader import count_items, dense_dims
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.inference import EncodeRequest
from sie.values.work import WorkHeader

_DENSE_ONLY: Final = ("dense",)
_pack_bounds: Final = struct.Struct("<2i").pack
_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1, "binary": 0.125, "ubinary": 0.125}


class Encoder:
    """Run encode requests on the engine."""

    def __init__(
        self, engine: Engine, models: ModelTable, limits: Limits, pool: ThreadPoolExecutor, images: ImageReader
    ) -> None:
        self._engine = engine
        self._images = images
        self._models = models
        self._limits = limits
        self._pool = pool

    def reconfigure(self, limits: Limits) -> None:
        """Use reloaded limits for later requests."""
        self._limits = limits

    async def start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> Submitted:
        """Tokenise and submit a resolved request; return it with the nanoseconds that reading its items took.

        Raises the errors of admission, the tokenizer and `ImageReader.read`.
        """
        if (started := self.try_start(entry, request, deadline_ns)) is not None:
            return started
        began_ns = time.monotonic_ns()
        header = self._header(entry, request)
        if request.images is None:
            arrays = await self._prepare_later(entry, request)
        else:
            arrays = await self._prepare_mixed(entry, request, request.images, deadline_ns)
        check_cuts(entry.card, request.options.get("overflow_policy"), request.cuts)
        header = _with_prompt(header, request)
        num_tokens = int(arrays[0][1][-1])
        took_ns = time.monotonic_ns() - began_ns
        if request.images is None:
            return Submitted(self._engine.submit(header, arrays, num_tokens, deadline_ns), took_ns)
        return Submitted(await self._engine.submit_large(header, arrays, num_tokens, deadline_ns), took_ns)

    def try_start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> Submitted | None:
        """Do the work of `start` at once, or return None when that would block the event loop too long."""
        if request.images is not None:
            return None
        began_ns = time.monotonic_ns()
        texts = request.texts
        is_plain = not request.options and not request.instruction and not entry.card.skips_prompt
        if texts is not None and len(texts) == 1 and is_plain:
            return self._try_start_text(entry, request, texts, deadline_ns, began_ns)
        header = self._header(entry, request)
        arrays = self._try_prepare(entry, request)
        if arrays is None:
            return None
        check_cuts(entry.card, request.options.get("overflow_policy"), request.cuts)
        header = _with_prompt(header, request)
        num_tokens = int(arrays[0][1][-1])
        took_ns = time.monotonic_ns() - began_ns
        return Submitted(self._engine.submit(header, arrays, num_tokens, deadline_ns), took_ns)

    def _key_of(self, entry: ModelEntry, request: EncodeRequest) -> TextEncodeKey:
        """Return the layout key of one text without options. Raises BadRequest for a row that is too large."""
        card, output_types = entry.card, request.output_types or _DENSE_ONLY
        output_dtype, width = request.output_dtype or "float32", request.dimensions
        check_encode(card, request, self._limits)
        return card.id, output_dtype, _wants_normalize(request, entry), width, output_types

    def _try_start_text(
        self, entry: ModelEntry, request: EncodeRequest, texts: list[str], deadline_ns: int, began_ns: int
    ) -> Submitted | None:
        """Submit one text with its layout key, or return None as `try_start` does.

        The bytes equal those from NumPy arrays, but take less time.
        """
        card, key = entry.card, self._key_of(entry, request)
        cuts: Cuts = {}
        request.cuts = cuts
        if card.prompts or card.default_prompt:
            texts = apply_prompt(card, texts, {}, None, is_query=False)
        if card.tokenizer_file:
            tokenizer = self._models.ready_tokenizer(entry)
            if tokenizer is None or not tokenizer.may_read_now(texts):
                return None
            token_ids, _ = tokenizer.encode_texts(texts, cuts=cuts)
            cost = len(token_ids)
            layout, parts = lay_out_text(key, cost, None), [_pack_bounds(0, cost), token_ids.tobytes()]
        else:
            text, cost = encode_stub_text(card, texts, cuts)
            parts = [_pack_bounds(0, cost), text, _pack_bounds(0, len(text))]
            layout = lay_out_text(key, cost, len(text))
        took_ns = time.monotonic_ns() - began_ns
        return Submitted(self._engine.submit_parts(layout, parts, cost, deadline_ns), took_ns)

    def _header(self, entry: ModelEntry, request: EncodeRequest) -> WorkHeader:
        """Return the header for the worker. Raises BadRequest for a request or reply that would be too large."""
        check_encode(entry.card, request, self._limits)
        header = WorkHeader(
            entry.card.id, "encode", count_items(request), (), request.output_dtype or "float32",
            _wants_normalize(request, entry), request.dimensions, request.output_types or ("dense",),
            entry.card.tells_queries and bool(request.options.get("is_query")), lora=requested_adapter(request) or "",
        )  # fmt: skip
        if request.muvera is not None:
            is_query = bool(request.options.get("is_query"))
            header = msgspec.structs.replace(header, is_query=is_query, muvera=request.muvera)
        if request.options and entry.card.late is not None and header.is_query:
            header = msgspec.structs.replace(header, expand_to=shorter_expansion(entry.card, request.options))
        return header

    def _try_prepare(self, entry: ModelEntry, request: EncodeRequest) -> list[tuple[str, NDArray[Any]]] | None:
        """Tokenise at once; None when that would block the event loop too long or the tokenizer is not loaded."""
        tokenizer = None
        if entry.card.tokenizer_file:
            tokenizer = self._models.ready_tokenizer(entry)
            if tokenizer is None or not tokenizer.may_read_now(request.texts or ()):
                return None
            if (request.options or request.instruction) and _count_chars(request) > LONG_TEXT_BYTES:
                return None
        return _prepare(entry, request, tokenizer)

    async def _prepare_later(self, entry: ModelEntry, request: EncodeRequest) -> list[tuple[str, NDArray[Any]]]:
        tokenizer = await self._models.tokenizer(entry) if entry.card.tokenizer_file else None
        pool = (tokenizer.pool if tokenizer is not None else None) or self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, _prepare, entry, request, tokenizer)

    async def _prepare_mixed(
        self, entry: ModelEntry, request: EncodeRequest, images: dict[int, list[memoryview]], deadline_ns: int
    ) -> list[tuple[str, NDArray[Any]]]:
        """Tokenise the text items, read the images of the others, and join them."""
        rule = entry.card.image
        assert rule is not None  # `resolve_encode` rejects images for a model that does not take them
        texts = [text for item, text in enumerate(request.texts or ()) if item not in images]
        text_arrays: list[tuple[str, NDArray[Any]]] | None = None
        if texts:
            own = msgspec.structs.replace(request, texts=texts)
            text_arrays = self._try_prepare(entry, own) or await self._prepare_later(entry, own)
            places = [item for item in range(count_items(request)) if item not in images]
            request.cuts = {places[number]: limit for number, limit in own.cuts.items()}
        read = await self._images.read(images, rule, deadline_ns)
        arrays = mix_items(count_items(request), read, rule, text_arrays)
        request.image_tokens = read.count_tokens(rule)
        return arrays


def _with_prompt(header: WorkHeader, request: EncodeRequest) -> WorkHeader:
    tokens = request.prompt_tokens
    return msgspec.structs.replace(header, skipped_tokens=tokens) if tokens else header


def check_encode(card: ModelCard, request: EncodeRequest, limits: Limits) -> None:
    """Raise BadRequest for a resolved request that is too large with its prompts, or whose reply would be."""
    output_types, output_dtype = request.output_types or _DENSE_ONLY, request.output_dtype or "float32"
    width = request.dimensions or (dense_dims(card, request) if "dense" in output_types else 0)
    nbytes = int(count_items(request) * width * _ITEM_BYTES[output_dtype])
    if nbytes > limits.max_reply_bytes:
        raise BadRequest(
            f"The reply would hold {nbytes} bytes of vectors, over max_reply_bytes ({limits.max_reply_bytes}); "
            "split the request"
        )
    if request.options or request.instruction:
        check_prompted(_count_chars(request), limits.max_body_bytes)


def _count_chars(request: EncodeRequest) -> int:
    """Return the number of characters to read, prompts included."""
    is_query = bool(request.options.get("is_query"))
    return count_prompted(request.texts or (), request.options, request.instruction, is_query)


def _wants_normalize(request: EncodeRequest, entry: ModelEntry) -> bool | None:
    """Return whether to normalise, None for the model's default; a shortened vector is always normalised."""
    is_cut = request.dimensions is not None and request.dimensions < dense_dims(entry.card, request)
    return True if is_cut else request.options.get("normalize")


def _prepare(entry: ModelEntry, request: EncodeRequest, tokenizer: Tokenizer | None) -> list[tuple[str, NDArray[Any]]]:
    """Return the arrays of a request's extent, the items' bounds first, and set its cuts.

    Runs on the event loop or on a thread.
    """
    cuts: Cuts = {}
    request.cuts = cuts
    is_query = bool(request.options.get("is_query"))
    max_tokens = token_limit(request.options, is_query) if request.options else None
    if request.token_lists is not None:
        if tokenizer is None:
            raise BadRequest(f"Model '{entry.card.id}' requires text input, not token arrays")
        token_ids, cu_seqlens = tokenizer.check_token_ids(request.token_lists, max_tokens, cuts)
        return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]
    texts = apply_prompt(entry.card, request.texts or [], request.options, request.instruction, is_query)
    if tokenizer is None:
        text, text_offsets, cu_seqlens = encode_stub_texts(entry.card, texts, max_tokens, cuts)
        return [("cu_seqlens", cu_seqlens), ("text", text), ("text_offsets", text_offsets)]
    token_ids, cu_seqlens = tokenizer.encode_texts(texts, is_query, max_tokens, cuts)
    if entry.card.skips_prompt:
        prompt = prompt_of(entry.card, request.options, request.instruction, is_query)
        request.prompt_tokens = tokenizer.count_prompt(prompt, is_query)
    return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]
