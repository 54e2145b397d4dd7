"""Runs one work item on this host's operations, and returns its answer as bytes. Knows no connection."""

from __future__ import annotations

from typing import Any, NamedTuple

from sie.cluster.reply_forms import pack_extractions, read_times
from sie.cluster.request_forms import Request
from sie.frontend.engine.interface import Reply
from sie.frontend.models.adapter_lookup import requested_adapter
from sie.frontend.operations.extraction.extract import read_extractions
from sie.frontend.operations.interface import TimedSubmission
from sie.frontend.process import FrontendProcess
from sie.ipc.messages import ModelEntry
from sie.values.errors import Internal, ProtocolError, Unavailable
from sie.values.inference import EncodeRequest, ExtractRequest, ScoreRequest


class Answer(NamedTuple):
    """An item's reply as bytes of its own, and what else its request's answer needs."""

    reply: memoryview
    num_tokens: int
    image_tokens: int
    tokenization_ns: int
    queue_ns: int
    cuts: dict[int, int]


def find_entry(process: FrontendProcess, model: str) -> ModelEntry:
    """Return a model that is served here now. Raises Unavailable MODEL_NOT_LOADED."""
    entry = process.models.find(model)
    if entry is None:
        raise Unavailable(f"Model '{model}' is not loaded", code="MODEL_NOT_LOADED")
    process.models.check_serving(entry)
    return entry


def try_start(process: FrontendProcess, model: str, request: Request, deadline_ns: int) -> TimedSubmission | None:
    """Submit a request at once if it waits for a worker alone. Return None for every other one: see `run_item`."""
    if not isinstance(request, EncodeRequest) or request.images is not None or requested_adapter(request) is not None:
        return None
    return process.encoder.try_start(find_entry(process, model), request, deadline_ns)


def read_answer(request: Request, started: TimedSubmission, reply: Reply) -> Answer:
    """Return the answer of a request that `try_start` submitted, and release the reply."""
    return _copied(reply, started.tokenization_ns, 0, request.cuts)


async def run_item(process: FrontendProcess, model: str, request: Request, deadline_ns: int) -> Answer:
    """Run a request of one item until its reply. deadline_ns is local. Raises the errors that a local client would get."""
    entry = find_entry(process, model)
    if isinstance(request, EncodeRequest):
        return await _encode(process, entry, request, deadline_ns)
    if isinstance(request, ScoreRequest):
        started = await process.scorer.start(entry, request, deadline_ns)
        reply = await started.pending.reply()
        return _copied(reply, started.tokenization_ns, 0, request.cuts)
    return await _extract(process, entry, request, deadline_ns)


async def _encode(process: FrontendProcess, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> Answer:
    _check_images(entry, request.images)
    adapter = requested_adapter(request)
    if adapter is not None:
        process.adapters.check_declared(entry, adapter)
        entry = await process.adapters.serving(entry, adapter, 0)
    started = await process.encoder.start(entry, request, deadline_ns)
    reply = await started.pending.reply()
    return _copied(reply, started.tokenization_ns, request.image_tokens, request.cuts)


async def _extract(process: FrontendProcess, entry: ModelEntry, request: ExtractRequest, deadline_ns: int) -> Answer:
    _check_images(entry, request.images)
    submitted = await process.extractor.start(entry, request, deadline_ns)
    reply = await submitted.pending.reply()
    try:
        times = _times_of(reply)
        max_chars = process.settings.limits.max_reply_bytes
        answer = read_extractions(reply, submitted, request, reply.submitted_ns, max_chars)
        queue_ns = max(0, times[0] - reply.submitted_ns)
    finally:
        reply.release()
    packed = pack_extractions(answer.extractions, times)
    return Answer(packed, answer.input_tokens, 0, submitted.tokenization_ns, queue_ns, dict(request.cuts))


def _check_images(entry: ModelEntry, images: Any) -> None:
    """Raise Unavailable if the model was replaced by one that takes no images, since its gateway looked."""
    if images is not None and entry.card.image is None:
        raise Unavailable(f"Model '{entry.card.id}' has changed", code="MODEL_NOT_LOADED")


def _copied(reply: Reply, tokenization_ns: int, image_tokens: int, cuts: dict[int, int]) -> Answer:
    """Return a reply's bytes as a copy, and release its memory."""
    try:
        times = _times_of(reply)
        queue_ns = max(0, times[0] - reply.submitted_ns)
        return Answer(
            memoryview(bytes(reply.view)), reply.num_tokens, image_tokens, tokenization_ns, queue_ns, dict(cuts)
        )
    finally:
        reply.release()


def _times_of(reply: Reply) -> tuple[int, int, int]:
    try:
        return read_times(reply.view)
    except ProtocolError as error:
        raise Internal("the worker's reply could not be read") from error
