"""Runs the score operation: from a typed request of any dialect to one score for each document.

One request is one submit. Each pair is an item, so the worker spreads pairs over steps and joins them as it does texts.
For a model that compares vectors, each text is an item, and the query is the first. For a model that reads lists, the
first item is the lists, and each other one is a document's number.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np

from sie.config.limits import Limits
from sie.frontend.engine.interface import Engine, Reply
from sie.frontend.inputs.document_list import list_arrays
from sie.frontend.inputs.pairs import Arrays, cut_documents, matched_pair_arrays, pair_arrays
from sie.frontend.inputs.profile_options import check_cuts, shorter_expansion
from sie.frontend.inputs.prompts import check_prompted, count_prompted
from sie.frontend.inputs.tokenize import LONG_TEXT_BYTES, Tokenizer
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.comparisons import comparison_arrays
from sie.frontend.operations.interface import Submitted
from sie.frontend.operations.reply_reader import timing_of
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import Internal, ProtocolError
from sie.values.inference import ScoreReply, ScoreRequest
from sie.values.work import ReplyHeader, WorkHeader
from sie.values.work_bytes import array_view, read_extent

_decoder: Final = msgspec.msgpack.Decoder(ReplyHeader)


class Scorer:
    """Run score requests on the engine."""

    def __init__(self, engine: Engine, models: ModelTable, limits: Limits, pool: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._models = models
        self._limits = limits
        self._pool = pool

    def reconfigure(self, limits: Limits) -> None:
        """Use reloaded limits for later requests."""
        self._limits = limits

    async def start(self, entry: ModelEntry, request: ScoreRequest, deadline_ns: int) -> Submitted:
        """Tokenise and submit a resolved request; return its record and the tokenising time in nanoseconds.

        Raises the errors of admission and the tokenizer, and InputTooLong with overflow_policy `error`.
        """
        began_ns = time.monotonic_ns()
        arrays = await self._prepare(entry, request)
        check_cuts(entry.card, request.options.get("overflow_policy"), request.cuts)
        took_ns = time.monotonic_ns() - began_ns
        if request.compared:
            header = WorkHeader(entry.card.id, "score", len(request.documents) + 1, (),
                                normalize=request.options.get("normalize"), compared=request.compared,
                                expand_to=shorter_expansion(entry.card, request.options))  # fmt: skip
        else:
            header = WorkHeader(entry.card.id, "score", len(request.documents), (), is_raw=request.is_raw)
        num_tokens = int(arrays[0][1][-1])
        if entry.card.listwise is not None:
            num_tokens -= len(request.documents)  # the numbers of documents do not count as tokens
        return Submitted(self._engine.submit(header, arrays, num_tokens, deadline_ns), took_ns)

    async def _prepare(self, entry: ModelEntry, request: ScoreRequest) -> Arrays:
        """Tokenise at once, or on a thread when that would block the event loop too long."""
        num_chars = check_score(entry.card, request, self._limits)
        tokenizer = await self._models.tokenizer(entry) if entry.card.tokenizer_file else None
        # In pairs the query is tokenised with every document.
        queries = request.queries or [request.query] * (1 if request.compared else len(request.documents))
        texts = [*request.documents, *queries]
        if tokenizer is None or (num_chars <= LONG_TEXT_BYTES and tokenizer.may_read_now(texts)):
            return _arrays(entry.card, tokenizer, request)
        pool = tokenizer.pool or self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, _arrays, entry.card, tokenizer, request)


def check_score(card: ModelCard, request: ScoreRequest, limits: Limits) -> int:
    """Return the number of characters to read. Raises BadRequest if they are too many with their prompts."""
    num_chars = _count_chars(card, request)
    check_prompted(num_chars, limits.max_body_bytes)
    return num_chars


def _count_chars(card: ModelCard, request: ScoreRequest) -> int:
    """Return the number of characters to read, prompts included; in pairs the query counts for every document."""
    options, instruction = request.options, request.instruction
    query = count_prompted(request.queries or [request.query], options, instruction, is_query=True)
    is_read_once = request.compared or request.queries or (card.score is not None and card.score.template is not None)
    num_queries = 1 if is_read_once else len(request.documents)
    return query * num_queries + count_prompted(request.documents, options, None, is_query=False)


def _arrays(card: ModelCard, tokenizer: Tokenizer | None, request: ScoreRequest) -> Arrays:
    request.cuts = {}
    documents = request.documents
    if request.max_document_tokens is not None:
        documents = cut_documents(tokenizer, documents, request.max_document_tokens)
    if card.listwise is not None and tokenizer is not None:
        return list_arrays(
            card, tokenizer, request.query, documents, request.instruction, options=request.options, cuts=request.cuts
        )
    if request.compared and tokenizer is not None:
        return comparison_arrays(card, tokenizer, msgspec.structs.replace(request, documents=documents), request.cuts)
    if request.queries:
        return matched_pair_arrays(
            card, tokenizer, request.queries, documents, request.instruction,
            options=request.options, cuts=request.cuts,
        )  # fmt: skip
    return pair_arrays(
        card, tokenizer, request.query, documents, request.instruction,
        options=request.options, cuts=request.cuts,
    )  # fmt: skip


def read_scores(reply: Reply, request: ScoreRequest, began_ns: int, tokenization_ns: int) -> ScoreReply:
    """Return a reply's scores and times, copied out of its extent.

    began_ns is when the request's headers were read. Raises Internal when the extent does not match the layout.
    """
    try:
        header, payload = read_extent(reply.view, _decoder)
        arrays = {ref.name: array_view(payload, ref) for ref in header.arrays}
        times, rows = arrays["times"], arrays["score"]
    except (ProtocolError, KeyError) as error:
        raise Internal("the worker's reply could not be read") from error
    num_queries = 1 if request.compared else 0
    if rows.shape != (num_queries + len(request.documents), 1) or rows.dtype != np.float32 or times.shape != (3,):
        raise Internal("the worker's reply has another shape than the request")
    return ScoreReply(
        model=request.model,
        scores=rows[num_queries:, 0].tolist(),
        input_tokens=reply.num_tokens,
        timing=timing_of(reply, times.tolist(), began_ns, tokenization_ns),
    )
