"""Submits and answers infer requests without a task. Must make the same checks as `KServe.infer`, cached or not."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from functools import partial

from sie.frontend.dialects.kserve import infer
from sie.frontend.engine.interface import Pending, Reply
from sie.frontend.fastpath.infer_cache import (
    Basis,
    CachedInfer,
    InferCache,
    cache_answer,
    header_of,
    places_in,
    read_answer,
)
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.http.threads import LARGE_BYTES
from sie.frontend.operations.reply_reader import timing_of
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.kserve import LENGTH_HEADER, KServe
from sie.frontend.routes.table import INFER, find_route
from sie.frontend.tensors.held_reply import hold
from sie.frontend.tensors.infer import deadline_of, encoding_cost
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.states import rule_of
from sie.frontend.tensors.text_models import TEXT_PLATFORMS
from sie.values.errors import Unavailable


class InferWork:
    """A submitted infer request; implements `sie.frontend.fastpath.dispatch.Work`."""

    __slots__ = ("_body", "_cached", "_exchange", "_kserve", "pending")

    def __init__(self, kserve: KServe, exchange: Exchange, cached: CachedInfer, body: bytes, pending: Pending) -> None:
        self._kserve = kserve
        self._exchange = exchange
        self._cached = cached
        self._body = body
        self.pending = pending

    def answer(self, raw: Reply) -> Response | Awaitable[Response]:
        exchange, cached = self._exchange, self._cached
        found = read_answer(cached.answers, raw) if cached.places else None
        if found is None:
            return self._answer_uncached(raw)
        exchange.timing = timing_of(raw, found.times, exchange.began_ns, 0)
        self._kserve.tensors.served(cached.call.request.model)
        return self._kserve.answered(exchange, found.body, found.json_bytes)

    def _answer_uncached(self, raw: Reply) -> Response | Awaitable[Response]:
        """Encode an answer whose layout is not in the cache, and cache the layout if the request is cacheable."""
        exchange, cached, call = self._exchange, self._cached, self._cached.call
        header = header_of(raw) if cached.places else b""
        held = hold(raw, call.request.model, exchange.began_ns, 0)
        tensors, encode, rule = self._kserve.tensors, partial(infer.encode_infer, call), rule_of(cached.entry)
        num_classes = call.request.num_classes
        if encoding_cost(held, rule, num_classes) >= LARGE_BYTES:
            return self._kserve.finished(exchange, tensors.encoded(exchange, held, rule, encode, num_classes))
        body, json_bytes = tensors.encoded_now(exchange, held, rule, encode)
        if header and json_bytes is not None:
            cache_answer(cached.answers, header, body, json_bytes)
        return self._kserve.answered(exchange, body, json_bytes)

    async def retry(self, error: Unavailable) -> Response:
        exchange, entry = self._exchange, self._cached.entry
        _, name, version = self._cached.found
        await self._kserve.tensors.entry_to_retry(entry, error, name, version, exchange.deadline_ns)
        return await self._kserve.serve(exchange, name, version, self._body)


class InferFastPath:
    """Submits the infer requests of one process."""

    def __init__(self, process: FrontendProcess, kserve: KServe) -> None:
        self._process = process
        self._tensors = process.tensors
        self._kserve = kserve
        self._cache = InferCache()

    def __call__(self, exchange: Exchange) -> InferWork | None:
        """Submit a request that waits only for its reply, or return None so that `KServe.infer` serves it.

        The model must take requests and tensors, and the body must be valid and not compressed.
        """
        process, headers = self._process, exchange.headers
        length = headers.get(LENGTH_HEADER)
        if "content-encoding" in headers or (length is None and LENGTH_HEADER in headers):
            return None
        cached = self._find_cached(exchange, length) if length is not None else None
        if cached is None:
            return self._submit_uncached(exchange, length)
        exchange.known_model = cached.entry.card.id
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        process.check_accepting()
        body = exchange.take_body(process.bodies)
        exchange.decoded_ns = time.monotonic_ns()
        return self._submit(exchange, cached, body)

    def _find_cached(self, exchange: Exchange, length: str) -> CachedInfer | None:
        assert exchange.body is not None
        try:
            body = exchange.body.result()
        except RuntimeError:
            return None  # the client left: `take_body` raises the error
        process = self._process
        return self._cache.find(exchange.model, length, body, process.models.entries, process.settings.limits)

    def _submit_uncached(self, exchange: Exchange, length: str | None) -> InferWork | None:
        """Check and submit a request whose layout is not in the cache, and cache the layout if possible."""
        process, tensors = self._process, self._tensors
        found = find_route(exchange.scope.path, tensors.table)
        if found is None or found.route is not INFER:
            return None
        entry = tensors.table.resolve(found.model, found.version)
        exchange.known_model = entry.card.id
        if not is_servable(entry) or rule_of(entry).platform in TEXT_PLATFORMS:
            return None
        wanted_ns = process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        exchange.deadline_ns = exchange.began_ns + wanted_ns
        process.check_accepting()
        body = exchange.take_body(process.bodies)
        basis = Basis(process.models.entries, process.settings.limits)
        call = infer.decode_infer(body, length, entry.card.id, rule_of(entry), process.settings.limits)
        exchange.decoded_ns = time.monotonic_ns()
        plan = tensors.plain_plan_of(entry, call.request)
        if plan is None:
            return None
        places = places_in(body, length, call) if length is not None else None
        if places is None or length is None:
            return self._submit(exchange, CachedInfer(found, entry, plan, call, (), {}), body)
        cached = CachedInfer(found, entry, plan, call.without_inputs(), places, {})
        self._cache.add(exchange.model, length, body, basis, cached)
        return self._submit(exchange, cached, body)

    def _submit(self, exchange: Exchange, cached: CachedInfer, body: bytes) -> InferWork:
        view, call = memoryview(body), cached.call
        parts = [view[place] for place in cached.places] or [tensor.data for tensor in call.request.inputs]
        deadline_ns = deadline_of(cached.plan.rule, call.request, exchange.began_ns, exchange.deadline_ns)
        pending = self._tensors.start(cached.entry, cached.plan, parts, deadline_ns)
        self._process.watch_client(pending, exchange.protocol)
        return InferWork(self._kserve, exchange, cached, body, pending)
