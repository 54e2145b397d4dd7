"""Serves the routes of files, skills and sessions alike: uploads to disk, the dialect of a client, and request ids."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from sie.frontend.dialects.store.anthropic_files import is_anthropic
from sie.frontend.http.body import BodyReader
from sie.frontend.http.compression import refuse_coding
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.multipart import FormReader
from sie.frontend.http.response import JSON, FileResponse, Response
from sie.frontend.http.routing import Route
from sie.frontend.process import FrontendProcess
from sie.frontend.telemetry.access_log import id_headers
from sie.values.errors import NotFound, Overloaded, Unavailable

FORM_BYTES: Final = 1 << 20
"""Bytes of a form besides its files."""
Shown = bytes | FileResponse
"""A JSON body, or a file to send."""
StoredHandler = Callable[[Exchange], Awaitable[Shown]]


def served(handler: StoredHandler) -> Callable[[Exchange], Awaitable[Response | FileResponse]]:
    """Return a handler of the route table: it speaks the client's dialect and adds the headers of the request's id."""

    async def serve(exchange: Exchange) -> Response | FileResponse:
        if is_anthropic(exchange.headers) and exchange.route is not None:
            exchange.route = _in_anthropic(exchange.route)
        answer = await handler(exchange)
        headers = id_headers(exchange)
        if isinstance(answer, FileResponse):
            return answer._replace(headers=[*answer.headers, *headers])
        return Response(200, [JSON, *headers] if answer else headers, answer)

    return serve


@functools.cache
def _in_anthropic(route: Route) -> Route:
    """Return a route with errors in Anthropic's form."""
    return msgspec.structs.replace(route, envelope="anthropic")


def is_for_anthropic(exchange: Exchange) -> bool:
    """Tell whether the answer to a request has Anthropic's form."""
    return exchange.route is not None and exchange.route.envelope == "anthropic"


def not_found(kind: str, thing_id: str, code: str) -> NotFound:
    """Return the error for a thing that does not exist, or belongs to another API key: nobody can tell which."""
    return NotFound(f"{kind} '{thing_id[:80]}' not found", code=code, extras={"param": f"{kind.lower()}_id"})


class Uploads:
    """Receives the forms of one process, several at once."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._num = 0

    @asynccontextmanager
    async def receive(
        self, exchange: Exchange, bodies: BodyReader, setting: str, max_files: int = 1
    ) -> AsyncGenerator[FormReader]:
        """Read a form to disk and yield it; files that are not committed in the block are deleted at its end.

        setting names the limit on each file. Raises as `BodyReader.pass_on` and `FormReader.feed` do.
        """
        process = self._process
        if process.is_draining:
            raise Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1)
        limits = process.settings.store
        if self._num >= limits.max_uploads:
            raise Overloaded(
                f"The server takes no more uploads at a time than max_uploads ({limits.max_uploads})", retry_after_s=1
            )
        refuse_coding(exchange.headers)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        store = process.store
        form = FormReader(
            exchange.headers.get("content-type"), store.blobs.begin,
            max_files=max_files, max_file_bytes=getattr(limits, setting), setting=setting,
        )  # fmt: skip
        self._num += 1
        try:
            exchange.body_bytes = await bodies.pass_on(
                exchange.headers, exchange.protocol, exchange.deadline_ns,
                lambda piece: store.run(form.feed, piece), exchange.body,
            )  # fmt: skip
            form.finish()
            yield form
        finally:
            self._num -= 1
            await store.run(form.discard)
