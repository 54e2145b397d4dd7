"""Owns how the short way of a request to infer begins: what is judged of it before it is submitted, as `KServe.model` does."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from sie.control_messages import ModelEntry
from sie.errors import Unavailable
from sie.frontend.dialects import kserve
from sie.frontend.dialects.kserve import InferCall
from sie.frontend.http.envelopes import Response
from sie.frontend.http.routes import COUNTED, INFER
from sie.frontend.inference import Exchange
from sie.frontend.links import Pending, Reply
from sie.frontend.process import FrontendProcess
from sie.frontend.tensors.infer import hold
from sie.frontend.tensors.kserve import LENGTH_HEADER, METHODS, KServe
from sie.frontend.tensors.paths import ModelPath, split_model_path
from sie.frontend.tensors.states import rule_of
from sie.frontend.tensors.table import is_servable


class InferWork:
    """A request that a worker has; `sie.frontend.http.short_way.Work`."""

    __slots__ = ("_body", "_call", "_entry", "_exchange", "_kserve", "_path", "pending")

    def __init__(  # noqa: PLR0917  # one for each request: keywords cost
        self, kserve: KServe, exchange: Exchange, path: ModelPath, entry: ModelEntry, body: bytes, call: InferCall,
        pending: Pending,
    ) -> None:  # fmt: skip
        self._kserve = kserve
        self._exchange = exchange
        self._path = path
        self._entry = entry
        self._body = body
        self._call = call
        self.pending = pending

    def answer(self, raw: Reply) -> Response | Awaitable[Response]:
        exchange, call = self._exchange, self._call
        held = hold(raw, call.request.model, exchange.began_ns, 0)
        return self._kserve.answer(exchange, call, rule_of(self._entry), held)

    async def again(self, error: Unavailable) -> Response:
        exchange, path = self._exchange, self._path
        await self._kserve.tensors.after(self._entry, error, path.name, path.version, exchange.deadline_ns)
        return await self._kserve.serve(exchange, path, self._body)


class InferBegin:
    """Begins the requests to infer of one process."""

    def __init__(self, process: FrontendProcess, kserve: KServe) -> None:
        self._process = process
        self._tensors = process.tensors
        self._kserve = kserve

    def __call__(self, exchange: Exchange) -> InferWork | None:
        """Submit a request that waits for nothing but its reply; None: `KServe.model` has to serve it.

        That is one of a form that was checked, not compressed, for a model that takes requests.
        """
        process, headers, tensors = self._process, exchange.headers, self._tensors
        path = split_model_path(f"{exchange.model}/infer", METHODS, tensors.table)
        if path is None or path.action != "infer" or "content-encoding" in headers:
            return None
        exchange.route = COUNTED[INFER]
        entry = tensors.table.resolve(path.name, path.version)
        exchange.known_model = entry.card.id
        length = headers.get(LENGTH_HEADER)
        if not is_servable(entry) or (length is None and LENGTH_HEADER in headers):
            return None
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        process.check_accepting()
        body = exchange.take_body(process.bodies)
        call = kserve.decode_infer(body, length, entry.card.id, rule_of(entry), process.settings.limits)
        exchange.decoded_ns = time.monotonic_ns()
        pending = tensors.try_start(entry, call.request, exchange.began_ns, exchange.deadline_ns)
        if pending is None:
            return None
        process.watch_client(pending, exchange.protocol)
        return InferWork(self._kserve, exchange, path, entry, body, call, pending)
