"""Owns how the short way of a request to infer begins: what is judged of it before it is submitted, as `KServe.model` does."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from sie.frontend.dialects.kserve import infer
from sie.frontend.engine.worker_link import Pending, Reply
from sie.frontend.fastpath.infer_cache import (
    Basis,
    KnownInfer,
    KnownInfers,
    header_of,
    learn_answer,
    places_in,
    read_answer,
)
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.http.routes import COUNTED, INFER
from sie.frontend.operations.reply_reader import timing_of
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.kserve import LENGTH_HEADER, METHODS, KServe
from sie.frontend.tensors.infer import deadline_of, hold
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.paths import split_model_path
from sie.frontend.tensors.states import rule_of
from sie.values.errors import Unavailable


class InferWork:
    """A request that a worker has; `sie.frontend.fastpath.dispatch.Work`."""

    __slots__ = ("_body", "_exchange", "_known", "_kserve", "pending")

    def __init__(self, kserve: KServe, exchange: Exchange, known: KnownInfer, body: bytes, pending: Pending) -> None:
        self._kserve = kserve
        self._exchange = exchange
        self._known = known
        self._body = body
        self.pending = pending

    def answer(self, raw: Reply) -> Response | Awaitable[Response]:
        exchange, known = self._exchange, self._known
        found = read_answer(known.answers, raw) if known.places else None
        if found is None:
            return self._answer_anew(raw)
        exchange.timing = timing_of(raw, found.times, exchange.began_ns, 0)
        return self._kserve.answered(exchange, known.call.request.model, found.body, found.json_bytes)

    def _answer_anew(self, raw: Reply) -> Response | Awaitable[Response]:
        """Return an answer that is not like one of before, and know it from now on where its request is known."""
        exchange, known, call = self._exchange, self._known, self._known.call
        header = header_of(raw) if known.places else b""
        held = hold(raw, call.request.model, exchange.began_ns, 0)
        response = self._kserve.answer(exchange, call, rule_of(known.entry), held)
        if header and isinstance(response, Response):
            json_bytes = next((value for name, value in response.headers if name == LENGTH_HEADER), None)
            if json_bytes is not None:
                learn_answer(known.answers, header, response.body, int(json_bytes))
        return response

    async def again(self, error: Unavailable) -> Response:
        exchange, path, entry = self._exchange, self._known.path, self._known.entry
        await self._kserve.tensors.after(entry, error, path.name, path.version, exchange.deadline_ns)
        return await self._kserve.serve(exchange, path, self._body)


class InferBegin:
    """Begins the requests to infer of one process."""

    def __init__(self, process: FrontendProcess, kserve: KServe) -> None:
        self._process = process
        self._tensors = process.tensors
        self._kserve = kserve
        self._knowns = KnownInfers()

    def __call__(self, exchange: Exchange) -> InferWork | None:
        """Submit a request that waits for nothing but its reply; None: `KServe.model` has to serve it.

        That is one of a form that was checked, not compressed, for a model that takes requests.
        """
        process, headers = self._process, exchange.headers
        length = headers.get(LENGTH_HEADER)
        if "content-encoding" in headers or (length is None and LENGTH_HEADER in headers):
            return None
        known = self._recall(exchange, length) if length is not None else None
        if known is None:
            return self._judge(exchange, length)
        exchange.route, exchange.known_model = COUNTED[INFER], known.entry.card.id
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        process.check_accepting()
        body = exchange.take_body(process.bodies)
        exchange.decoded_ns = time.monotonic_ns()
        return self._submit(exchange, known, body)

    def _recall(self, exchange: Exchange, length: str) -> KnownInfer | None:
        assert exchange.body is not None
        try:
            body = exchange.body.result()
        except RuntimeError:
            return None  # its client left: `take_body` says so
        process = self._process
        return self._knowns.find(exchange.model, length, body, process.models.entries, process.settings.limits)

    def _judge(self, exchange: Exchange, length: str | None) -> InferWork | None:
        """Do as `__call__` for a request whose like was not seen lately, and know it from now on."""
        process, tensors = self._process, self._tensors
        path = split_model_path(f"{exchange.model}/infer", METHODS, tensors.table)
        if path is None or path.action != "infer":
            return None
        exchange.route = COUNTED[INFER]
        entry = tensors.table.resolve(path.name, path.version)
        exchange.known_model = entry.card.id
        if not is_servable(entry):
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
            return self._submit(exchange, KnownInfer(path, entry, plan, call, (), {}), body)
        known = KnownInfer(path, entry, plan, call.without_inputs(), places, {})
        self._knowns.learn(exchange.model, length, body, basis, known)
        return self._submit(exchange, known, body)

    def _submit(self, exchange: Exchange, known: KnownInfer, body: bytes) -> InferWork:
        view, call = memoryview(body), known.call
        parts = [view[place] for place in known.places] or [tensor.data for tensor in call.request.inputs]
        deadline_ns = deadline_of(known.plan.rule, call.request, exchange.began_ns, exchange.deadline_ns)
        pending = self._tensors.start(known.entry, known.plan, parts, deadline_ns)
        self._process.watch_client(pending, exchange.protocol)
        return InferWork(self._kserve, exchange, known, body, pending)
