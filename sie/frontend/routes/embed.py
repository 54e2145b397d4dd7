"""Handles encode, score, extract, rerank and embeddings requests. Must neither format errors nor count requests.

Handlers raise; `sie.frontend.app` turns the error into the dialect's response and counts the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from sie.config.limits import Limits
from sie.frontend.dialects.cohere import rerank
from sie.frontend.dialects.native import encode as sie
from sie.frontend.dialects.native import encode_reply, extract, negotiate, score
from sie.frontend.dialects.openai import embeddings as openai
from sie.frontend.engine.worker_link import Reply
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Headers, Response
from sie.frontend.http.threads import LARGE_BYTES
from sie.frontend.models.adapters import requested_adapter
from sie.frontend.models.not_found import model_not_found
from sie.frontend.operations.extraction.extract import read_extractions
from sie.frontend.operations.operation import Operation, Submission
from sie.frontend.operations.reply_reader import read_reply
from sie.frontend.operations.resolve import resolve_embeddings, resolve_encode, resolve_rerank, resolve_score
from sie.frontend.operations.resolve_extract import resolve_extract
from sie.frontend.operations.score import read_scores
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.decode_body import decode_body
from sie.frontend.telemetry.access_log import id_headers
from sie.ipc.messages import ModelEntry
from sie.values.encode import EncodeReply, EncodeRequest, ExtractReply, ExtractRequest, ScoreReply, ScoreRequest, Timing
from sie.values.errors import BadRequest, Unavailable

_NO_BYTES: Final = memoryview(b"")
RequestT = TypeVar("RequestT")
SubmissionT = TypeVar("SubmissionT", bound=Submission)
_LEAST_SHOWN_MS: Final = 0.005
"""A smaller value would be shown as 0.00 in a header."""


class Inference:
    """The handlers of one process, one method for each route."""

    def __init__(self, process: FrontendProcess, identity: tuple[tuple[str, str], ...]) -> None:
        self._process = process
        self.models = process.models
        self._identity = identity
        # The reference sends its instance header on every answer of the extract route except a 200.
        self._extract_identity = [header for header in identity if header[0] != "x-sie-runtime-instance"]
        self.pool = ThreadPoolExecutor(2, "decode")
        """Threads for large bodies of all dialects."""

    async def encode(self, exchange: Exchange) -> Response:
        """Answer `/v1/encode/{model}`."""
        headers = exchange.headers
        self.check_headers(exchange)
        body = await exchange.read_body(self._process.bodies)
        is_msgpack = negotiate.is_msgpack(headers.get("content-type"))
        request = await decode_body(
            exchange, self.pool, self.models, sie.decode_encode, body, is_msgpack, exchange.model, self._limits
        )
        entry = self.find(exchange, exchange.model)
        if not entry.is_read:
            entry = await self.models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
        request = resolve_encode(request, entry.card)
        return await self.run_encode(exchange, entry, request)

    async def run_encode(self, exchange: Exchange, entry: ModelEntry, request: EncodeRequest) -> Response:
        """Run a decoded and resolved request, and return its answer. Raises the engine's errors."""
        reply, raw = await self._run(exchange, entry, request)
        response = self.encoded(exchange, reply, raw)
        return response if isinstance(response, Response) else await response

    def encoded(self, exchange: Exchange, reply: EncodeReply, raw: Reply) -> Response | Awaitable[Response]:
        """Encode the answer of an encode request, in a thread if it is large, and release the reply."""
        wants_msgpack = negotiate.wants_msgpack(exchange.headers.get("accept"))
        if not wants_msgpack and len(raw.view) >= LARGE_BYTES:
            return self._encoded_on_thread(reply, raw)
        try:
            answer = encode_reply.encode_reply(reply, wants_msgpack)
        finally:
            _release(reply, raw)
        return Response(200, self.encode_headers(reply.timing, wants_msgpack), answer)

    async def _encoded_on_thread(self, reply: EncodeReply, raw: Reply) -> Response:
        try:
            answer = await self._on_thread(encode_reply.encode_reply, reply, False)
        finally:
            _release(reply, raw)
        return Response(200, self.encode_headers(reply.timing, wants_msgpack=False), answer)

    def encode_headers(self, timing: Timing, wants_msgpack: bool) -> Headers:
        """Return the response headers of an encode request."""
        content_type = ("content-type", negotiate.content_type(wants_msgpack))
        return [content_type, *_timing_headers(timing), *self._identity]

    async def score(self, exchange: Exchange) -> Response:
        """Answer `/v1/score/{model}`."""
        self.check_headers(exchange)
        body = await exchange.read_body(self._process.bodies)
        is_msgpack = negotiate.is_msgpack(exchange.headers.get("content-type"))
        request = await decode_body(
            exchange, self.pool, self.models, score.decode_score, body, is_msgpack, exchange.model, self._limits
        )
        entry = self.find(exchange, exchange.model)
        if not entry.is_read:
            entry = await self.models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
        request = resolve_score(request, entry.card)
        reply = await self._run_score(exchange, entry, request)
        wants_msgpack = negotiate.wants_msgpack(exchange.headers.get("accept"))
        content_type = ("content-type", negotiate.content_type(wants_msgpack))
        answer = score.encode_scores(request, reply, wants_msgpack)
        return Response(200, [content_type, *_timing_headers(reply.timing), *self._identity], answer)

    async def extract(self, exchange: Exchange) -> Response:
        """Answer `/v1/extract/{model}`."""
        self.check_headers(exchange)
        body = await exchange.read_body(self._process.bodies)
        is_msgpack = negotiate.is_msgpack(exchange.headers.get("content-type"))
        request = await decode_body(
            exchange, self.pool, self.models, extract.decode_extract, body, is_msgpack, exchange.model, self._limits
        )
        entry = self.find(exchange, exchange.model)
        if not entry.is_read:
            entry = await self.models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
        request = resolve_extract(request, entry.card)
        reply, is_large = await self._run_extract(exchange, entry, request)
        wants_msgpack = negotiate.wants_msgpack(exchange.headers.get("accept"))
        content_type = ("content-type", negotiate.content_type(wants_msgpack))
        if is_large:
            answer = await self._on_thread(extract.encode_extractions, request, reply, wants_msgpack)
        else:
            answer = extract.encode_extractions(request, reply, wants_msgpack)
        return Response(200, [content_type, *_timing_headers(reply.timing), *self._extract_identity], answer)

    async def rerank(self, exchange: Exchange) -> Response:
        """Answer `/v1/rerank`."""
        self.check_headers(exchange)
        body = await exchange.read_body(self._process.bodies)
        call = await decode_body(exchange, self.pool, self.models, rerank.decode_rerank, body, self._limits)
        request = call.request
        request.model = self._process.models.resolve_default(request.model, "score")
        entry = self.find(exchange, request.model)
        if not entry.is_read:
            entry = await self.models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
        request = resolve_rerank(request, entry.card)
        reply = await self._run_score(exchange, entry, request)
        answer = rerank.encode_ranking(call, reply)
        return Response(200, [JSON, *_timing_headers(reply.timing), *self._identity], answer)

    async def embeddings(self, exchange: Exchange) -> Response:
        """Answer `/v1/embeddings`."""
        self.check_headers(exchange)
        body = await exchange.read_body(self._process.bodies)
        content_type = exchange.headers.get("content-type")
        call = await decode_body(
            exchange, self.pool, self.models, openai.decode_embeddings, body, content_type, self._limits
        )
        request = call.request
        request.model = self._process.models.resolve_default(request.model, "dense")
        entry = self.find(exchange, request.model)
        if not entry.is_read:
            entry = await self.models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
        request = resolve_embeddings(request, entry.card)
        reply, raw = await self._run(exchange, entry, request)
        try:
            if call.base64 or len(raw.view) < LARGE_BYTES:
                answer = openai.encode_embeddings(reply, call.base64)
            else:
                answer = await self._on_thread(openai.encode_embeddings, reply, call.base64)
        finally:
            _release(reply, raw)
        return Response(200, [JSON, *self._identity, *id_headers(exchange)], answer)

    def check_headers(self, exchange: Exchange) -> None:
        """Set the deadline, and check the headers before the body is read. Raises BadRequest and other SieErrors."""
        process, headers = self._process, exchange.headers
        is_shared = exchange.route is not None and exchange.route.envelope != "sie"
        exchange.waits = is_shared or process.settings.models.wait_for_load
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        profile = headers.get("x-sie-machine-profile")
        if profile:
            process.check_machine_profile(profile)
        remote = headers.get("x-sie-remote")
        if remote is not None and remote != "forbid":
            raise BadRequest("Header 'X-SIE-Remote' must be 'forbid'")
        process.check_accepting()

    def find(self, exchange: Exchange, model: str) -> ModelEntry:
        """Return the entry of the requested model, and record it. Raises NotFound."""
        models = self._process.models
        entry = models.find(model)
        if entry is None:
            raise model_not_found(model, models.entries)
        exchange.known_model = entry.card.id
        if self._process.tracing is not None:
            exchange.decoded_ns = time.monotonic_ns()
        return entry

    async def _run(self, exchange: Exchange, entry: ModelEntry, request: EncodeRequest) -> tuple[EncodeReply, Reply]:
        """Return the rows of a request and the reply that holds them. The caller must release the reply."""
        adapter = requested_adapter(request)
        if adapter is not None:
            self._process.adapters.check_declared(entry, adapter)
        entry, started, raw = await self._drive(self._process.encoder, exchange, entry, request, adapter)
        return read(exchange, entry, request, started.tokenization_ns, raw), raw

    async def _run_score(self, exchange: Exchange, entry: ModelEntry, request: ScoreRequest) -> ScoreReply:
        _, started, raw = await self._drive(self._process.scorer, exchange, entry, request)
        try:
            reply = read_scores(raw, request, exchange.began_ns, started.tokenization_ns)
        finally:
            raw.release()
        _record(exchange, reply.timing, len(request.documents), request.cuts)
        return reply

    async def _run_extract(
        self, exchange: Exchange, entry: ModelEntry, request: ExtractRequest
    ) -> tuple[ExtractReply, bool]:
        """Return the extractions, and whether they are large enough to be encoded in a thread."""
        _, submitted, raw = await self._drive(self._process.extractor, exchange, entry, request)
        arguments = (raw, submitted, request, exchange.began_ns)
        is_large = len(raw.view) >= LARGE_BYTES
        try:
            if is_large:
                reply = await self._on_thread(read_extractions, *arguments)
            else:
                reply = read_extractions(*arguments)
        finally:
            raw.release()
        _record(exchange, reply.timing, len(request.texts), request.cuts)
        return reply, is_large

    async def _drive(
        self, operation: Operation[RequestT, SubmissionT], exchange: Exchange, entry: ModelEntry, request: RequestT,
        adapter: str | None = None,
    ) -> tuple[ModelEntry, SubmissionT, Reply]:  # fmt: skip
        """Run an operation until its reply is there, and again if its model was unloaded meanwhile.

        Returns the entry that served, the submission, and the reply, which the caller must release.
        """
        process, models = self._process, self.models
        while True:
            if entry.state == "loaded" and entry.workers:  # as `serving`, but without the cost of its coroutine
                models.check_serving(entry)
            else:
                entry = await models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
            if adapter is not None:
                entry = await process.adapters.serving(entry, adapter, exchange.deadline_ns if exchange.waits else 0)
            try:
                submission = await operation.start(entry, request, exchange.deadline_ns)
                process.watch_client(submission.pending, exchange.protocol)
                return entry, submission, await submission.pending.reply()
            except Unavailable as error:
                entry = models.reloaded(entry, error)

    @property
    def _limits(self) -> Limits:
        return self._process.settings.limits

    async def _on_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)


def read(
    exchange: Exchange, entry: ModelEntry, request: EncodeRequest, tokenization_ns: int, raw: Reply
) -> EncodeReply:
    """Return the rows of a reply, and record its timing. Releases the reply if it raises, as `read_reply` does."""
    try:
        reply = read_reply(raw, entry, request, exchange.began_ns, tokenization_ns)
    except BaseException:
        raw.release()
        raise
    _record(exchange, reply.timing, reply.num_items, reply.cuts)
    return reply


def _record(exchange: Exchange, timing: Timing, num_items: int, cuts: Collection[int]) -> None:
    """Record the facts of an answer that headers, metrics and traces show."""
    exchange.timing, exchange.num_items, exchange.cuts = timing, num_items, cuts


def _release(reply: EncodeReply, raw: Reply) -> None:
    """Release the extent of a reply, after dropping every view of it."""
    reply.values, reply.sparse, reply.multivector = _NO_BYTES, None, None
    raw.release()


def _timing_headers(timing: Timing) -> list[tuple[str, str]]:
    """Return the timing headers. Source: SIE API reference, section 13."""
    headers = [
        ("x-queue-time", f"{timing.queue_ms:.2f}"),
        ("x-tokenization-time", f"{timing.tokenization_ms:.2f}"),
        ("x-inference-time", f"{timing.inference_ms:.2f}"),
        ("x-total-time", f"{timing.total_ms:.2f}"),
    ]
    if timing.postprocessing_ms >= _LEAST_SHOWN_MS:
        headers.append(("x-postprocessing-time", f"{timing.postprocessing_ms:.2f}"))
    return headers
