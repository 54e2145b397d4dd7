"""Owns how the short way of an encode request begins and ends: as `Inference.encode`, for what waits for nothing."""

from __future__ import annotations

from collections.abc import Awaitable

from sie.frontend.dialects.native import encode, negotiate
from sie.frontend.engine.worker_link import Pending, Reply
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.models.adapters import requested_adapter
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


class EncodeBegin:
    """Begins the encode requests of one process."""

    def __init__(self, process: FrontendProcess, inference: Inference) -> None:
        self._process = process
        self._inference = inference

    def __call__(self, exchange: Exchange) -> EncodeWork | None:
        """Submit a request that waits for nothing but its reply, or return None: then `Inference.encode` serves it.

        The model is loaded, has no adapter asked of it, and its texts are short enough to tokenise here.
        """
        process, inference, limits = self._process, self._inference, self._process.settings.limits
        inference.check_headers(exchange)
        body = exchange.take_body(process.bodies)
        is_msgpack = negotiate.is_msgpack(exchange.headers.get("content-type"))
        request = encode.decode_encode(body, is_msgpack, exchange.model, limits)
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
