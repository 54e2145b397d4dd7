"""Handles the routes about a cluster itself, which a gateway serves and a server on its own does not have."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Response
from sie.frontend.process import FrontendProcess
from sie.frontend.remote import ClusterAnswer, PoolApi
from sie.frontend.telemetry.access_log import id_headers
from sie.values.errors import NotFound

_to_json: Final = msgspec.json.Encoder().encode


class ClusterRoutes:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process

    async def list_pools(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/pools`."""
        return _answer(exchange, self._pools.list())

    async def put_pool(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/pools`: create a pool, or update one and renew its lease."""
        return _answer(exchange, await self._pools.put(await self._read(exchange)))

    async def show_pool(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/pools/{name}`."""
        return _answer(exchange, self._pools.show(exchange.model))

    async def delete_pool(self, exchange: Exchange) -> Response:
        """Answer `DELETE /v1/pools/{name}`."""
        return _answer(exchange, await self._pools.delete(exchange.model))

    async def renew_pool(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/pools/{name}/renew`, whose body is not looked at."""
        return _answer(exchange, await self._pools.renew(exchange.model))

    @property
    def _pools(self) -> PoolApi:
        """The pools of this gateway. Raises NotFound on a server on its own."""
        remote = self._process.remote
        if remote is None:
            raise NotFound("This server is no gateway: pools are served by `sie gateway`", code="NOT_A_GATEWAY")
        return remote.pools

    async def _read(self, exchange: Exchange) -> bytes:
        process = self._process
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        return await exchange.read_body(process.bodies)


def _answer(exchange: Exchange, answer: ClusterAnswer) -> Response:
    return Response(answer.status, [JSON, *id_headers(exchange)], _to_json(answer.body))
