"""Owns the handlers of the routes that generate text: decode with the dialect, start, and answer whole or as a stream.

They raise what is wrong; `sie.frontend.app` turns that into the dialect's error, and counts. It imports a template
engine, so it is imported by the first request that generates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from sie.control_messages import ModelEntry
from sie.errors import ClientGone, NotFound, Unavailable
from sie.frontend.dialects import chat, completions, messages, messages_reply, responses, sie
from sie.frontend.generation.run import Run
from sie.frontend.generation.start import Generator
from sie.frontend.inference import Answer, Exchange
from sie.frontend.offload import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.responses import Responses
from sie.frontend.routes import BY_TEMPLATE, COUNTED
from sie.frontend.stream import EventWriter, Streamed
from sie.generation import GenerateReply, GenerateRequest

_JSON: Final = ("content-type", "application/json")
_OUTPUT: Final = "generate"
_T = TypeVar("_T")

Encode = Callable[[GenerateReply, Sequence[str]], bytes]
"""A whole reply and the prompts to echo, to a body."""
MakeWriter = Callable[[str, Sequence[str]], EventWriter]
"""The id of the model that answers and the prompts to echo, to what writes the stream."""


class TextRoutes:
    """One method a route, named as its handler. One instance per process."""

    def __init__(self, process: FrontendProcess, pool: ThreadPoolExecutor) -> None:
        self._process = process
        self._pool = pool
        self.generator = Generator(
            process.engine, process.models, process.settings.generation, process.generation_metrics
        )
        self._responses = Responses(process, self, pool)

    async def chat(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `/v1/chat/completions`."""
        request, shown = await self._read(exchange, chat.decode_chat)
        return await self.answer(
            exchange,
            request,
            lambda reply, _prompts: chat.encode_chat(reply, shown),
            lambda model, _prompts: chat.ChatWriter(shown, model),
        )

    async def completions(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `/v1/completions`."""
        request, shown = await self._read(exchange, completions.decode_completions)
        return await self.answer(
            exchange,
            request,
            lambda reply, prompts: completions.encode_completions(reply, shown, prompts),
            lambda model, prompts: completions.CompletionsWriter(shown, model, prompts),
            echoes=shown.echo,
        )

    async def messages(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `/v1/messages`."""
        request = await self._read(exchange, messages.decode_messages)
        message_id = messages_reply.new_message_id()
        return await self.answer(
            exchange,
            request,
            lambda reply, _prompts: messages_reply.encode_message(reply, message_id),
            lambda model, _prompts: messages_reply.MessageWriter(message_id, model),
        )

    async def count_tokens(self, exchange: Exchange) -> Answer:
        """Answer `/v1/messages/count_tokens`: what the same body would have as its `input_tokens`."""
        request = await self._read(exchange, messages.decode_messages)
        process = self._process
        entry = await process.models.wait_serving(self.find(exchange, request), exchange.deadline_ns)
        (ids,) = await self.generator.prompt_ids(entry, request)
        return [_JSON], messages_reply.encode_count(len(ids))

    async def responses(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `POST /v1/responses`."""
        return await self._responses.create(exchange, await self._read(exchange, responses.decode_responses))

    async def show_response(self, exchange: Exchange) -> Answer:
        """Answer `GET /v1/responses/{response_id}`."""
        return await self._responses.show(exchange)

    async def delete_response(self, exchange: Exchange) -> Answer:
        """Answer `DELETE /v1/responses/{response_id}`."""
        return await self._responses.delete(exchange)

    async def cancel_response(self, exchange: Exchange) -> Answer:
        """Answer `POST /v1/responses/{response_id}/cancel`."""
        return await self._responses.cancel(exchange)

    async def list_input_items(self, exchange: Exchange) -> Answer:
        """Answer `GET /v1/responses/{response_id}/input_items`."""
        return await self._responses.list_items(exchange)

    async def answer(
        self, exchange: Exchange, request: GenerateRequest, encode: Encode, make_writer: MakeWriter,
        *, echoes: bool = False,
    ) -> Answer | Streamed:  # fmt: skip
        """Return the whole answer to a decoded request of any dialect, or the stream of it, as the request says."""
        process = self._process
        entry = self.find(exchange, request)
        while True:
            entry = await process.models.wait_serving(entry, exchange.deadline_ns)
            run = await self.start(exchange, entry, request, echoes=echoes)
            if request.stream:
                return Streamed(run, make_writer(run.model, run.prompts))
            try:
                reply = await run.whole()
                exchange.timing = run.timing(exchange.began_ns)
                return [_JSON], encode(reply, run.prompts)
            except Unavailable as error:
                entry = process.models.reloaded(entry, error)
            finally:
                run.give_up(ClientGone("nobody waits for the answer any more"))

    async def _read(self, exchange: Exchange, decode: Callable[..., _T]) -> _T:
        body = await self.read_body(exchange)
        content_type = exchange.headers.get("content-type")
        return await offload(self._pool, len(body), decode, body, content_type, self._process.settings.limits)

    async def read_body(self, exchange: Exchange) -> bytes:
        """Return the body of a request that may be served now. Raises SieError for one that may not."""
        process = self._process
        if exchange.route is not None:
            exchange.route = COUNTED.get(exchange.route.template, BY_TEMPLATE[exchange.route.template])
        exchange.waits = True
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        process.check_machine_profile(exchange.headers.get("x-sie-machine-profile"))
        if process.is_draining:
            raise Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1)
        process.engine.check_open()
        return await exchange.read_body(process.text_bodies)

    def find(self, exchange: Exchange, request: GenerateRequest) -> ModelEntry:
        """Return the model of a request, whose default is settled from now on. Raises NotFound naming those that generate."""
        models = self._process.models
        model = request.model = self._process.models.resolve_default(request.model, _OUTPUT)
        entry = models.find(model)
        if entry is None:
            able = ", ".join(models.able(_OUTPUT)) or "none"
            hint = sie.model_not_found(model, models.entries).message.rstrip(".")
            raise NotFound(f"{hint}. Models that generate: {able}", extras={"param": "model"})
        exchange.known_model = entry.card.id
        exchange.decoded_ns = time.monotonic_ns()
        self._process.generation_metrics.begin(*_labels(exchange))
        return entry

    def leave(self, exchange: Exchange) -> None:
        """Note that a request is over, whatever became of it."""
        if exchange.known_model:
            self._process.generation_metrics.end(*_labels(exchange))

    async def start(
        self, exchange: Exchange, entry: ModelEntry, request: GenerateRequest, *, echoes: bool = False
    ) -> Run:
        """Submit a request to a model that is served; it ends when its client leaves. Raises as `Generator.start` does."""
        process = self._process
        run = await self.generator.start(
            entry, request, exchange.deadline_ns, salt=exchange.owner.encode(), echoes=echoes
        )
        exchange.num_items = len(run.parts)
        for pending in run.pendings:
            process.watch_client(pending, exchange.protocol)
        return run


def _labels(exchange: Exchange) -> tuple[str, str, str]:
    route = exchange.route
    return exchange.scope.method, route.template if route is not None else "", exchange.known_model
