"""Submits and answers encode requests without a task. Must check and answer exactly as `Inference.encode` does."""

from __future__ import annotations

from collections.abc import Awaitable

from sie.frontend.dialects.native import encode, negotiate
from sie.frontend.engine.worker_link import Pending, Reply
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.models.adapters import requested_adapter
from sie.frontend.operations.resolve import resolve_encode
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.decode_body import add_hint
from sie.frontend.routes.embed import Inference, read
from sie.ipc.messages import ModelEntry
from sie.values.encode import EncodeRequest
from sie.values.errors import BadRequest, Unavailable


class EncodeWork:
    """A submitted encode request; implements `sie.frontend.fastpath.dispatch.Work`."""

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

    async def retry(self, error: Unavailable) -> Response:
        exchange, inference = self._exchange, self._inference
        entry = inference.models.reloaded(self.entry, error)
        return await inference.run_encode(exchange, entry, self._request)


class EncodeFastPath:
    """Submits the encode requests of one process."""

    def __init__(self, process: FrontendProcess, inference: Inference) -> None:
        self._process = process
        self._inference = inference

    def __call__(self, exchange: Exchange) -> EncodeWork | None:
        """Submit a request that waits only for its reply, or return None so that `Inference.encode` serves it.

        The model must be loaded, the request must name no adapter, and its texts must be short enough to tokenise here.
        """
        process, inference, limits = self._process, self._inference, self._process.settings.limits
        inference.check_headers(exchange)
        body = exchange.take_body(process.bodies)
        is_msgpack = negotiate.is_msgpack(exchange.headers.get("content-type"))
        try:
            request = encode.decode_encode(body, is_msgpack, exchange.model, limits)
        except BadRequest as error:
            add_hint(error, exchange, body)
            raise
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
