"""Handles the text generation routes, with whole or streamed answers. Must be imported only by the first such request.

The import brings a template engine. Handlers raise; `sie.frontend.app` turns the error into the dialect's response and
counts the request.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sie.frontend.dialects.anthropic import reply as messages_reply
from sie.frontend.dialects.anthropic import request as messages
from sie.frontend.dialects.description import TextCodec
from sie.frontend.dialects.kserve import generate as kserve_generate
from sie.frontend.dialects.native import generate as native_generate
from sie.frontend.dialects.openai.text_fields import renamed
from sie.frontend.dialects.responses import request as responses
from sie.frontend.generation.reply_size import reply_bytes
from sie.frontend.generation.start import generate_rule
from sie.frontend.http.compression import refuse_coding
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Answer, Headers, Response
from sie.frontend.http.stream import EventWriter, Streamed
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.conversations import Conversations, StoredRun, Turn, said_by
from sie.frontend.routes.decode_body import decode_body
from sie.frontend.routes.kserve import KServe
from sie.frontend.routes.responses import Responses
from sie.frontend.routes.text_service import TextService
from sie.frontend.telemetry.access_log import id_headers, request_id_of
from sie.frontend.tensors.states import rule_of
from sie.ipc.messages import ModelEntry
from sie.values.errors import BadRequest, ClientGone
from sie.values.generate import GenerateReply, GenerateRequest

_T = TypeVar("_T")

Encode = Callable[[GenerateReply, Sequence[str]], bytes]
"""Encodes a whole reply and the prompts to echo into a body."""
TextHandler = Callable[[Exchange], Awaitable[Answer | Streamed]]
MakeWriter = Callable[[str, Sequence[str]], EventWriter]
"""Makes the stream writer, from the id of the answering model and the prompts to echo."""


class TextRoutes:
    """The handlers of one process, one method for each route. identity is sent on SIE's own route alone."""

    def __init__(
        self, process: FrontendProcess, kserve: KServe, pool: ThreadPoolExecutor, identity: tuple[tuple[str, str], ...]
    ) -> None:
        self._process = process
        self._kserve = kserve
        self._pool = pool
        self._identity = identity
        self.service = TextService(process)
        self._conversations = Conversations(process)
        self._responses = Responses(process, self.service, pool, self._conversations)

    def served(self, handler: TextHandler) -> Callable[[Exchange], Awaitable[Response | Streamed]]:
        """Return a handler of the route table: it adds the headers that every answer of these routes has."""

        async def serve(exchange: Exchange) -> Response | Streamed:
            exchange.request_id = request_id_of(exchange.headers)
            is_stream = False
            try:
                answer = await handler(exchange)
                is_stream = isinstance(answer, Streamed)
            finally:  # what was generated for a client that left, or too late, costs as much
                if exchange.run is not None and not is_stream:
                    exchange.record_run(exchange.run)
            headers = self._headers(exchange)
            if isinstance(answer, Streamed):
                return answer._replace(headers=headers)
            own, body = answer
            return Response(200, [*own, *headers], body)

        return serve

    def _headers(self, exchange: Exchange) -> Headers:
        is_native = exchange.route is not None and exchange.route.envelope == "sie"
        return [*id_headers(exchange), *(self._identity if is_native else ())]

    def handler_of(self, codec: TextCodec) -> Callable[[Exchange], Awaitable[Response | Streamed]]:
        """Return the handler of a route whose dialect has no more than a codec."""

        async def serve(exchange: Exchange) -> Answer | Streamed:
            request, shown = await self._read(exchange, codec.decode)
            with renamed(codec.names_of(shown)):
                entry = self.service.find(exchange, request)
                return await self._answer_from(
                    exchange,
                    entry,
                    request,
                    lambda reply, prompts: codec.encode(reply, shown, prompts),
                    lambda model, prompts: codec.make_writer(shown, model, prompts),
                    echoes=codec.echoes(shown),
                    turn=await self._conversations.begin(exchange.owner, request),
                )

        return self.served(serve)

    async def count_tokens(self, exchange: Exchange) -> Answer:
        """Answer `/v1/messages/count_tokens` with the `input_tokens` that `/v1/messages` would report."""
        request = await self._read(exchange, messages.decode_messages)
        process = self._process
        entry = await process.models.wait_serving(self.service.find(exchange, request), exchange.deadline_ns)
        with renamed(messages.NAMES):
            await self._conversations.begin(exchange.owner, request)
            (ids,) = await self.service.prompt_ids(entry, request)
        return [JSON], messages_reply.encode_count(len(ids))

    async def generate(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `/v1/generate/{model}`."""
        process = self._process
        model = exchange.model = native_generate.named_model(exchange.model, process.models)
        if exchange.headers.get("x-sie-remote") not in (None, "forbid"):
            raise BadRequest("Header 'X-SIE-Remote' must be 'forbid'")
        waits = process.settings.models.wait_for_load
        request = await self._read(exchange, native_generate.decode_generate, model, waits=waits)
        with renamed(native_generate.NAMES):
            return await self._answer_from(
                exchange,
                self.service.find_exactly(exchange, model),
                request,
                lambda reply, _prompts: native_generate.encode_generate(reply),
                lambda _model, _prompts: native_generate.GenerateWriter(exchange.request_id),
            )

    async def generate_tensor(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `/v2/models/{model}/generate`."""
        return await self._generate_tensor(exchange, is_stream=False)

    async def generate_tensor_stream(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `/v2/models/{model}/generate_stream`."""
        return await self._generate_tensor(exchange, is_stream=True)

    async def _generate_tensor(self, exchange: Exchange, *, is_stream: bool) -> Answer | Streamed:
        process = self._process
        entry = process.tensors.table.resolve(exchange.model, exchange.version)
        if entry.card.generate is None:
            return await self._kserve.members(exchange, is_stream=is_stream)
        self.service.begin(exchange, entry)
        refuse_coding(exchange.headers)
        decode = functools.partial(kserve_generate.decode_text_input, is_stream=is_stream)
        request, shown = await self._read(exchange, decode, rule_of(entry), waits=False)
        return await self._answer_from(
            exchange,
            entry,
            request,
            lambda reply, prompts: kserve_generate.encode_text_output(reply, shown, prompts),
            lambda _model, prompts: kserve_generate.TextOutputWriter(shown, prompts),
            echoes=shown.echo,
        )

    async def responses(self, exchange: Exchange) -> Answer | Streamed:
        """Answer `POST /v1/responses`."""
        return await self._responses.create(exchange, await self._read(exchange, responses.decode_responses))

    async def count_input(self, exchange: Exchange) -> Answer:
        """Answer `POST /v1/responses/input_tokens` with the `input_tokens` that `/v1/responses` would report."""
        return await self._responses.count(exchange, await self._read(exchange, responses.decode_responses))

    async def show_response(self, exchange: Exchange) -> Answer | Streamed:
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

    async def _answer_from(
        self, exchange: Exchange, entry: ModelEntry, request: GenerateRequest, encode: Encode, make_writer: MakeWriter,
        *, echoes: bool = False, turn: Turn | None = None,
    ) -> Answer | Streamed:  # fmt: skip
        """Return the whole answer of a model, or a stream if the request asks for one. turn, if given, stores
        the answer in the session of the request.
        """
        process = self._process
        if entry.is_read:
            generate_rule(entry.card)

        async def answer(entry: ModelEntry) -> Answer | Streamed:
            run = await self.service.start(exchange, entry, request, echoes=echoes)
            if request.stream:
                source = run if turn is None else StoredRun(run, turn)
                return Streamed(source, make_writer(run.model, run.prompts), pool=self._pool)
            try:
                reply = await run.whole()
                if turn is not None:
                    await turn.end(said_by(run, reply.choices[0]))
                return [JSON], await encoded(process.encoding, self._pool, encode, reply, run.prompts)
            finally:
                run.give_up(ClientGone("the client no longer waits for the answer"))

        return await process.models.serve(entry, exchange.deadline_ns, answer, waits=exchange.waits)

    async def _read(self, exchange: Exchange, decode: Callable[..., _T], *decode_args: Any, waits: bool = True) -> _T:
        """Read and decode the body, and release it. decode gets the body, then decode_args (without any: the
        content type), then the limits.
        """
        body = await self._read_body(exchange, waits=waits)
        args = (*(decode_args or (exchange.headers.get("content-type"),)), self._process.settings.limits)
        decoded = await decode_body(exchange, self._pool, self._process.models, decode, body, *args)
        exchange.release_body(self._process.bodies)  # generating may take long
        return decoded

    async def _read_body(self, exchange: Exchange, *, waits: bool = True) -> bytes:
        """Check the headers and return the body. Raises SieError if the request cannot be served now.

        waits: whether the route waits for a loading model.
        """
        process = self._process
        exchange.waits = waits
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        process.check_placement(exchange)
        process.check_accepting()
        return await exchange.read_body(process.text_bodies)


async def encoded(
    encoding: asyncio.Semaphore, pool: ThreadPoolExecutor, encode: Encode, reply: GenerateReply, prompts: Sequence[str]
) -> bytes:
    """Encode a whole answer: a large one in a thread, and holding `encoding` meanwhile."""
    size = reply_bytes(reply, prompts)
    if size < LARGE_BYTES:
        return encode(reply, prompts)
    async with encoding:
        return await offload(pool, size, encode, reply, prompts)
