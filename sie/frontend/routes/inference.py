"""Runs encode, score and extract requests of every dialect. Must neither format errors nor count requests.

Handlers raise; `sie.frontend.app` turns the error into the dialect's response and counts the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

from sie.frontend.dialects.description import Codec, Sent
from sie.frontend.dialects.native import negotiate
from sie.frontend.engine.interface import Reply
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Headers, Response
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.models.adapter_lookup import requested_adapter
from sie.frontend.models.not_found import model_not_found
from sie.frontend.operations.extraction import glirel
from sie.frontend.operations.extraction.extract import read_extractions
from sie.frontend.operations.interface import Operation, Submission
from sie.frontend.operations.reply_reader import read_reply
from sie.frontend.operations.resolve import resolve_embeddings, resolve_encode, resolve_score
from sie.frontend.operations.resolve_extract import resolve_extract
from sie.frontend.operations.score import read_scores
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.decode_body import decode_body
from sie.frontend.telemetry.access_log import id_headers
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Unavailable
from sie.values.extract import Glirel
from sie.values.inference import (
    EncodeReply,
    EncodeRequest,
    ExtractReply,
    ExtractRequest,
    ScoreReply,
    ScoreRequest,
    Timing,
)

_NO_BYTES: Final = memoryview(b"")
_RESOLVE: Final[dict[str, Callable[[Any, ModelCard], Any]]] = {
    "encode": resolve_encode, "embed": resolve_embeddings, "score": resolve_score, "extract": resolve_extract,
}  # fmt: skip
"""Checks a decoded request against its model's card, by operation."""
RequestT = TypeVar("RequestT")
SubmissionT = TypeVar("SubmissionT", bound=Submission)
_LEAST_SHOWN_MS: Final = 0.005
"""A smaller value would be shown as 0.00 in a header."""


class Inference:
    """The handlers of one process: one for each codec of a dialect."""

    def __init__(self, process: FrontendProcess, identity: tuple[tuple[str, str], ...]) -> None:
        self._process = process
        self.models = process.models
        self._identity = identity
        # The reference sends its instance header on every answer of the extract route except a 200.
        self._extract_identity = [header for header in identity if header[0] != "x-sie-runtime-instance"]
        self.pool = process.decode_pool

    def handler_of(self, codec: Codec) -> Callable[[Exchange], Awaitable[Response]]:
        """Return the handler of a route: it decodes with the codec, runs its operation and encodes the reply."""
        resolve = _RESOLVE[codec.operation]

        async def serve(exchange: Exchange) -> Response:
            self.check_headers(exchange)
            body = await exchange.read_body(self._process.bodies)
            sent = Sent(exchange.model, exchange.headers.get("content-type"))
            request, shown = await decode_body(
                exchange, self.pool, self.models, codec.decode, body, sent, self._process.settings.limits
            )
            if codec.default_output:
                request.model = self.models.resolve_default(request.model, codec.default_output)
            entry = self.find(exchange, request.model)
            if not entry.is_read:
                entry = await self.models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
            return await self.run(codec, exchange, entry, resolve(request, entry.card), shown)

        return serve

    async def run(
        self, codec: Codec, exchange: Exchange, entry: ModelEntry, request: Any, shown: Any = None
    ) -> Response:
        """Run a decoded and resolved request, and return its answer. Raises the engine's errors."""
        reply: Any
        raw = None
        if codec.operation == "score":
            reply = await self._run_score(exchange, entry, request)
            is_large = exchange.body_bytes >= LARGE_BYTES  # the answer may repeat documents and ids
        elif codec.operation == "extract":
            reply, is_large = await self._run_extract(exchange, entry, request)
        else:
            reply, raw = await self._run_encode(exchange, entry, request)
            is_large = len(raw.view) >= LARGE_BYTES
        answer = self.answer(codec, exchange, (request, shown, reply), raw, is_large=is_large)
        return answer if isinstance(answer, Response) else await answer

    def answer(
        self, codec: Codec, exchange: Exchange, codec_args: tuple[Any, Any, Any], raw: Reply | None, *, is_large: bool
    ) -> Response | Awaitable[Response]:
        """Encode an answer, in a thread if that takes long, and release the extent that holds its rows.

        codec_args are (request, shown, reply), the first arguments of `Codec.encode`; raw is None for a reply without rows.
        """
        wants_msgpack = codec.has_msgpack and negotiate.wants_msgpack(exchange.headers.get("accept"))
        if is_large and not codec.is_quick(codec_args[1], wants_msgpack):
            return self._answer_on_thread(codec, exchange, codec_args, raw, wants_msgpack=wants_msgpack)
        try:
            answer = codec.encode(*codec_args, wants_msgpack)
        finally:
            if raw is not None:
                _release(codec_args[2], raw)
        return Response(200, self._headers(codec, exchange, codec_args[2].timing, wants_msgpack), answer)

    async def _answer_on_thread(
        self,
        codec: Codec,
        exchange: Exchange,
        codec_args: tuple[Any, Any, Any],
        raw: Reply | None,
        *,
        wants_msgpack: bool,
    ) -> Response:
        try:
            async with self._process.encoding:
                answer = await self._on_thread(codec.encode, *codec_args, wants_msgpack)
        finally:
            if raw is not None:
                _release(codec_args[2], raw)
        return Response(200, self._headers(codec, exchange, codec_args[2].timing, wants_msgpack), answer)

    def _headers(self, codec: Codec, exchange: Exchange, timing: Timing, wants_msgpack: bool) -> Headers:
        headers = [("content-type", negotiate.content_type(wants_msgpack))]
        if codec.has_timing:
            headers += _timing_headers(timing)
        headers += self._identity if codec.operation != "extract" else self._extract_identity
        if codec.has_ids:
            headers += id_headers(exchange)
        return headers

    def check_headers(self, exchange: Exchange) -> None:
        """Set the deadline, and check the headers before the body is read. Raises BadRequest and other SieErrors."""
        process, headers = self._process, exchange.headers
        is_shared = exchange.route is not None and exchange.route.envelope != "sie"
        exchange.waits = is_shared or process.settings.models.wait_for_load
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        process.check_placement(exchange)
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

    async def _run_encode(
        self, exchange: Exchange, entry: ModelEntry, request: EncodeRequest
    ) -> tuple[EncodeReply, Reply]:
        """Return the rows of a request and the reply that holds them. The caller must release the reply."""
        adapter = requested_adapter(request)
        if adapter is not None:
            self._process.adapters.check_declared(entry, adapter)
        entry, started, raw = await self._drive(self._process.encoder, exchange, entry, request, adapter)
        return read_rows(exchange, entry, request, started.tokenization_ns, raw), raw

    async def _run_score(self, exchange: Exchange, entry: ModelEntry, request: ScoreRequest) -> ScoreReply:
        _, started, raw = await self._drive(self._process.scorer, exchange, entry, request)
        try:
            reply = read_scores(raw, request, exchange.began_ns, started.tokenization_ns)
        finally:
            raw.release()
        _record(exchange, reply, len(request.documents), request.cuts)
        return reply

    async def _run_extract(
        self, exchange: Exchange, entry: ModelEntry, request: ExtractRequest
    ) -> tuple[ExtractReply, bool]:
        """Return the extractions, and whether they are large enough to be encoded in a thread."""
        if request.metadata and isinstance(entry.card.extract, Glirel):
            limits, num_bytes = self._process.settings.limits, glirel.num_bytes(request.metadata)
            request.given = await offload(self.pool, num_bytes, glirel.read_given, request, limits)
        _, submitted, raw = await self._drive(self._process.extractor, exchange, entry, request)
        arguments = (raw, submitted, request, exchange.began_ns, self._process.settings.limits.max_reply_bytes)
        is_large = len(raw.view) >= LARGE_BYTES
        try:
            if is_large:
                reply = await self._on_thread(read_extractions, *arguments)
            else:
                reply = read_extractions(*arguments)
        finally:
            raw.release()
        _record(exchange, reply, len(request.texts), request.cuts)
        # The answer may repeat texts, as often as its entities overlap, and ids.
        return reply, is_large or max(reply.num_chars, exchange.body_bytes) >= LARGE_BYTES

    async def _drive(
        self, operation: Operation[RequestT, SubmissionT], exchange: Exchange, entry: ModelEntry, request: RequestT,
        adapter: str | None = None,
    ) -> tuple[ModelEntry, SubmissionT, Reply]:  # fmt: skip
        """Run an operation until its reply is there, and again if its model was unloaded meanwhile.

        Returns the entry that served, the submission, and the reply, which the caller must release.
        """
        process, models = self._process, self.models
        while True:
            # The first way is what `serving` does, without the cost of its coroutine.
            if entry.state == "loaded" and entry.workers and process.remote is None:
                models.check_serving(entry)
            else:
                entry = await models.serving(entry, exchange.deadline_ns, waits=exchange.waits)
            if adapter is not None and process.remote is None:  # a remote host looks for it itself
                entry = await process.adapters.serving(entry, adapter, exchange.deadline_ns if exchange.waits else 0)
            try:
                submission = await operation.start(entry, request, exchange.deadline_ns)
                process.watch_client(submission.pending, exchange.protocol)
                return entry, submission, await submission.pending.reply()
            except Unavailable as error:
                entry = models.reloaded(entry, error)

    async def _on_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)


def read_rows(
    exchange: Exchange, entry: ModelEntry, request: EncodeRequest, tokenization_ns: int, raw: Reply
) -> EncodeReply:
    """Return the rows of a reply, and record its timing. Raises the errors of `read_reply`, after releasing the reply."""
    try:
        reply = read_reply(raw, entry, request, exchange.began_ns, tokenization_ns)
    except BaseException:
        raw.release()
        raise
    _record(exchange, reply, reply.num_items, reply.cuts)
    return reply


def _record(
    exchange: Exchange, reply: EncodeReply | ScoreReply | ExtractReply, num_items: int, cuts: Collection[int]
) -> None:
    """Record the facts of an answer that headers, limits, metrics and traces need."""
    exchange.timing, exchange.num_items, exchange.cuts = reply.timing, num_items, cuts
    exchange.input_tokens = reply.input_tokens


def _release(reply: EncodeReply, raw: Reply) -> None:
    """Release the extent of a reply, after dropping every view of it."""
    reply.values, reply.ragged = _NO_BYTES, {}
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
