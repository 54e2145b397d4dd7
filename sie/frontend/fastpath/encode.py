"""Submits and answers encode requests without a task. Must check and answer exactly as `Inference.handler_of` does.

Both paths call the same functions: the codec, the checks, `Encoder.try_start`, `read_rows` and `Inference.answer`. The
order of the first half's calls is written twice, because `Inference.handler_of` may wait for the body, a thread, a model
or its tokenizer. Here, a request that would have to wait gets None instead. One coroutine for both paths would need the
eager tasks of Python 3.12.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from sie.frontend.dialects.description import Codec, Sent
from sie.frontend.dialects.native.dialect import ENCODE
from sie.frontend.engine.interface import Pending, Reply
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.http.threads import LARGE_BYTES
from sie.frontend.models.adapter_lookup import requested_adapter
from sie.frontend.operations.interface import TimedSubmission
from sie.frontend.operations.resolve import resolve_encode
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.decode_body import add_hint
from sie.frontend.routes.inference import Inference, read_rows
from sie.ipc.messages import ModelEntry
from sie.values.errors import BadRequest, Unavailable
from sie.values.inference import EncodeRequest

_CODEC: Final[Codec] = ENCODE.codec


class EncodeWork:
    """A submitted encode request; implements `sie.frontend.fastpath.dispatch.Work`."""

    __slots__ = ("_exchange", "_inference", "_request", "_started", "entry", "pending")

    def __init__(
        self, inference: Inference, exchange: Exchange, entry: ModelEntry, request: EncodeRequest, started: TimedSubmission
    ) -> None:  # fmt: skip
        self._inference = inference
        self._exchange = exchange
        self.entry = entry
        self._request = request
        self._started = started
        self.pending: Pending = started.pending

    def answer(self, raw: Reply) -> Response | Awaitable[Response]:
        exchange, request = self._exchange, self._request
        reply = read_rows(exchange, self.entry, request, self._started.tokenization_ns, raw)
        is_large = len(raw.view) >= LARGE_BYTES
        return self._inference.answer(_CODEC, exchange, (request, None, reply), raw, is_large=is_large)

    async def retry(self, error: Unavailable) -> Response:
        exchange, inference = self._exchange, self._inference
        entry = inference.models.reloaded(self.entry, error)
        return await inference.run(_CODEC, exchange, entry, self._request)


class EncodeFastPath:
    """Submits the encode requests of one process."""

    def __init__(self, process: FrontendProcess, inference: Inference) -> None:
        self._process = process
        self._inference = inference

    def __call__(self, exchange: Exchange) -> EncodeWork | None:
        """Submit a request that waits only for its reply, or return None so that `Inference.handler_of` serves it.

        The model must be loaded, the request must name no adapter, and its texts must be short enough to tokenise here.
        """
        process, inference, limits = self._process, self._inference, self._process.settings.limits
        inference.check_headers(exchange)
        body = exchange.take_body(process.bodies)
        sent = Sent(exchange.model, exchange.headers.get("content-type"))
        try:
            request, _ = _CODEC.decode(body, sent, limits)
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
        process.watch_client(started.pending, exchange.protocol)
        return EncodeWork(inference, exchange, entry, request, started)
