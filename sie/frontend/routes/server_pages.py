"""Handles health checks, metrics, the documentation and the pages for browsers. Runs no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from sie.frontend import browser, openapi
from sie.frontend.dialects.native import negotiate
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.html import page_headers
from sie.frontend.http.response import JSON, Headers, Response
from sie.frontend.http.routing import RouteTable
from sie.frontend.openapi import docs_page
from sie.frontend.process import FrontendProcess
from sie.frontend.telemetry.access_log import id_headers
from sie.frontend.telemetry.exposition import CONTENT_TYPE, OPENMETRICS_TYPE, render_openmetrics, render_text
from sie.frontend.telemetry.metrics import merge

_to_json: Final = msgspec.json.Encoder().encode
_TEXT: Final = ("content-type", "text/plain; charset=utf-8")


class Pages:
    """The handlers of one process. table is the route table that the documentation describes."""

    def __init__(self, process: FrontendProcess, table: RouteTable) -> None:
        self._process = process
        self._table = table
        self._writing = asyncio.Semaphore(1)

    async def make_ticket(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/watch-ticket` with a token for the websocket, because a browser can set no header there."""
        access = self._process.access
        ticket = access.make_ticket(exchange.holder) if access is not None else ""
        headers = [JSON, ("cache-control", "no-store")]
        return _answer(exchange, headers, b'{"ticket":"%b"}' % ticket.encode())

    async def healthz(self, exchange: Exchange) -> Response:
        """Answer `GET /healthz`: the process is alive."""
        if self._process.remote is not None:
            return _answer(exchange, [JSON], b'{"status":"ok"}')
        return _answer(exchange, [_TEXT], b"ok")

    async def readyz(self, exchange: Exchange) -> Response:
        """Answer `GET /readyz`: the required models are loaded, or why not."""
        process = self._process
        if process.remote is not None:
            readiness = process.remote.readiness()
            return _answer(exchange, [JSON], _to_json(readiness), 200 if readiness["status"] == "ready" else 503)
        if process.is_ready:
            return _answer(exchange, [_TEXT], b"ok", 200)
        return _answer(exchange, [_TEXT], f"not ready: {process.not_ready_reason}".encode(), 503)

    async def health(self, exchange: Exchange) -> Response:
        """Answer `GET /health`. sie-sdk asks for JSON, to tell a cluster's gateway from a server."""
        if self._process.remote is not None:
            return _answer(exchange, [JSON], _to_json(self._process.remote.health()))
        if negotiate.JSON in (exchange.headers.get("accept") or ""):
            return _answer(exchange, [JSON], b'{"status":"ok","type":"worker"}')
        return _answer(exchange, [_TEXT], b"OK")

    async def metrics(self, exchange: Exchange) -> Response:
        """Answer `GET /metrics` with the metrics of all processes, and with exemplars if there are traces and the client can."""
        process, tracing = self._process, self._process.tracing
        content_type, write = CONTENT_TYPE, render_text
        if tracing is not None and "application/openmetrics-text" in (exchange.headers.get("accept") or ""):
            content_type, write = OPENMETRICS_TYPE, partial(render_openmetrics, exemplars=tracing.exemplars)
        async with self._writing:  # the text of hundreds of models takes long, even on a thread
            page = await self._on_thread(write, merge(process.pages))
        return _answer(exchange, [("content-type", content_type)], page)

    async def openapi(self, exchange: Exchange) -> Response:
        """Answer `GET /openapi.json`."""
        body = await self._on_thread(openapi.document_json, self._table, self._process.settings.limits)
        return _answer(exchange, [JSON], body)

    async def docs(self, exchange: Exchange) -> Response:
        """Answer `GET /docs`: the same as a page."""
        process = self._process
        write = partial(docs_page.page, is_gateway=process.remote is not None)
        page = await self._on_thread(write, self._table, process.settings.limits)
        return _answer(exchange, page_headers(page), page)

    async def _on_thread(self, write: Callable[..., bytes], *args: Any) -> bytes:
        """Write a page that takes long, the first time or each time."""
        return await asyncio.get_running_loop().run_in_executor(self._process.decode_pool, write, *args)

    async def chat(self, exchange: Exchange) -> Response:
        """Answer `GET /chat`: a page to talk to a model. It holds nothing, and its requests need a key like any others."""
        return _answer(exchange, browser.headers("chat"), browser.page("chat"))

    async def home(self, exchange: Exchange) -> Response:
        """Answer `GET /`: the dashboard for a browser, and `OK` for other clients."""
        if "text/html" in (exchange.headers.get("accept") or ""):
            return _answer(exchange, browser.headers("dashboard"), browser.page("dashboard"))
        return _answer(exchange, [_TEXT], b"OK")


def _answer(exchange: Exchange, headers: Headers, body: bytes, status: int = 200) -> Response:
    return Response(status, [*headers, *id_headers(exchange)], body)
