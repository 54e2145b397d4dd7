"""Owns how the short way of an encode request begins and ends: as `Inference.encode`, for what waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from sie.frontend.dialects.native import encode, encode_reply, negotiate
from sie.frontend.engine.worker_link import Pending, Reply
from sie.frontend.fastpath.encode_cache import KnownText, KnownTexts, learn_row, read_row
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.models.adapters import requested_adapter
from sie.frontend.operations.reply_reader import timing_of
from sie.frontend.operations.resolve import resolve_encode
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.embed import Inference, read
from sie.ipc.messages import ModelEntry
from sie.values.encode import EncodeRequest
from sie.values.errors import Unavailable


class EncodeWork:
    """A request that a worker has; `sie.frontend.fastpath.dispatch.Work`."""

    __slots__ = ("_exchange", "_inference", "_request", "_took_ns", "entry", "pending")

    def __init__(  # noqa: PLR0917  # one for each request: keywords cost
        self, inference: Inference, exchange: Exchange, entry: ModelEntry, request: EncodeRequest, took_ns: int,
        pending: Pending,
    ) -> None:  # fmt: skip
        self._inference = inference
        self._exchange = exchange
        self.entry = entry
        self._request = request
        self._took_ns = took_ns
        self.pending = pending

    def answer(self, raw: Reply) -> Response | Awaitable[Response]:
        reply = read(self._exchange, self.entry, self._request, self._took_ns, raw)
        return self._inference.encoded(self._exchange, reply, raw)

    async def again(self, error: Unavailable) -> Response:
        exchange, inference = self._exchange, self._inference
        entry = inference.models.reloaded(self.entry, error)
        return Response(200, *await inference.encode_anew(exchange, entry, self._request))


class TextWork:
    """A request of one text, whose like is known; `sie.frontend.fastpath.dispatch.Work`."""

    __slots__ = ("_exchange", "_inference", "_known", "_text", "_took_ns", "pending")

    def __init__(  # noqa: PLR0917  # one for each request: keywords cost
        self, inference: Inference, exchange: Exchange, known: KnownText, text: str, took_ns: int, pending: Pending
    ) -> None:
        self._inference = inference
        self._exchange = exchange
        self._known = known
        self._text = text
        self._took_ns = took_ns
        self.pending = pending

    def answer(self, raw: Reply) -> Response | Awaitable[Response]:
        exchange = self._exchange
        wants_msgpack = negotiate.wants_msgpack(exchange.headers.get("accept"))
        found = read_row(self._known, raw) if wants_msgpack else None
        if found is None:
            return self._answer_anew(raw, wants_msgpack)
        timing = exchange.timing = timing_of(raw, found.times, exchange.began_ns, self._took_ns)
        exchange.num_items = 1
        body = encode_reply.with_row(found.before, found.row, timing, raw.num_tokens)
        raw.release()
        return Response(200, self._inference.encode_headers(timing, wants_msgpack=True), body)

    def _answer_anew(self, raw: Reply, wants_msgpack: bool) -> Response | Awaitable[Response]:
        """Return an answer that is not like one of before, and know it from now on if it is msgpack."""
        inference, known = self._inference, self._known
        reply = read(self._exchange, known.entry, known.request_of(self._text), self._took_ns, raw)
        if wants_msgpack:
            learn_row(known, raw, encode_reply.before_row(reply))
        return inference.encoded(self._exchange, reply, raw)

    async def again(self, error: Unavailable) -> Response:
        exchange, inference, known = self._exchange, self._inference, self._known
        entry = inference.models.reloaded(known.entry, error)
        return Response(200, *await inference.encode_anew(exchange, entry, known.request_of(self._text)))


class EncodeBegin:
    """Begins the encode requests of one process."""

    def __init__(self, process: FrontendProcess, inference: Inference) -> None:
        self._process = process
        self._inference = inference
        self._knowns = KnownTexts()

    def __call__(self, exchange: Exchange) -> EncodeWork | TextWork | None:
        """Submit a request that waits for nothing but its reply; None: `Inference.encode` has to serve it.

        That is one for a model that is loaded, without an adapter, whose texts are read here and now.
        """
        process, limits = self._process, self._process.settings.limits
        self._inference.check_headers(exchange)
        body = exchange.take_body(process.bodies)
        is_msgpack = negotiate.is_msgpack(exchange.headers.get("content-type"))
        call = encode.read_encode(body, is_msgpack, limits)
        text = encode.bare_text(call, len(body), limits)
        if text is None:
            return self._begin(exchange, encode.to_encode(call, is_msgpack, exchange.model, len(body), limits))
        known = self._knowns.find(exchange.model, process.models.entries, limits)
        if known is not None:
            return self._begin_text(exchange, known, text)
        request = EncodeRequest(model=exchange.model, texts=[text])
        work = self._begin(exchange, request)
        if work is not None:
            words = process.encoder.words_of(work.entry, request)  # which was resolved in place
            self._knowns.learn(process.models.entries, limits, work.entry, request, words)
        return work

    def _begin_text(self, exchange: Exchange, known: KnownText, text: str) -> TextWork | None:
        process, entry = self._process, known.entry
        began_ns = time.monotonic_ns()
        exchange.known_model = entry.card.id
        exchange.decoded_ns = began_ns
        process.models.check_serving(entry)
        started = process.encoder.try_start_text(entry, known.words, [text], exchange.deadline_ns, began_ns)
        if started is None:
            return None
        pending, took_ns = started
        process.watch_client(pending, exchange.protocol)
        return TextWork(self._inference, exchange, known, text, took_ns, pending)

    def _begin(self, exchange: Exchange, request: EncodeRequest) -> EncodeWork | None:
        process, inference = self._process, self._inference
        entry = inference.find(exchange, exchange.model)
        if not (entry.is_read and entry.workers and entry.state == "loaded"):
            return None
        request = resolve_encode(request, entry.card)
        if request.options and requested_adapter(request) is not None:
            return None
        process.models.check_serving(entry)
        started = process.encoder.try_start(entry, request, exchange.deadline_ns)
        if started is None:
            return None
        pending, took_ns = started
        process.watch_client(pending, exchange.protocol)
        return EncodeWork(inference, exchange, entry, request, took_ns, pending)
