"""Handles the routes about a cluster itself, which a gateway serves and a server on its own does not have."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.process import FrontendProcess
from sie.frontend.remote import ClusterAnswer, ConfigApi, PoolApi, Remote
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

    async def list_configs(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/models`."""
        return _answer(exchange, self._configs.list())

    async def put_config(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/configs/models`: add a model, or profiles of one."""
        body, headers = await self._read(exchange), exchange.headers
        answer = await self._configs.put(body, headers.get("idempotency-key") or "", headers.get("if-match") or "")
        return _answer(exchange, answer)

    async def show_config(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/models/{model}`."""
        return _answer(exchange, self._configs.show(exchange.model))

    async def show_config_status(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/models/{model}/status`."""
        return _answer(exchange, self._configs.status(exchange.model))

    async def list_bundles(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/bundles`."""
        return _answer(exchange, self._configs.list_bundles())

    async def show_bundle(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/bundles/{name}`."""
        return _answer(exchange, self._configs.show_bundle(exchange.model))

    async def resolve_config(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/configs/resolve`."""
        return _answer(exchange, self._configs.resolve(await self._read(exchange)))

    async def export_configs(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/export`."""
        return _answer(exchange, self._configs.export())

    async def show_epoch(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/configs/epoch`."""
        return _answer(exchange, self._configs.show_epoch())

    @property
    def _pools(self) -> PoolApi:
        return self._remote.pools

    @property
    def _configs(self) -> ConfigApi:
        return self._remote.configs

    @property
    def _remote(self) -> Remote:
        """The cluster of this gateway. Raises NotFound on a server on its own."""
        remote = self._process.remote
        if remote is None:
            raise NotFound("This server is not a gateway; ask `sie gateway`", code="NOT_A_GATEWAY")
        return remote

    async def _read(self, exchange: Exchange) -> bytes:
        process = self._process
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        return await exchange.read_body(process.bodies)


def _answer(exchange: Exchange, answer: ClusterAnswer) -> Response:
    body = answer.body.encode() if isinstance(answer.body, str) else _to_json(answer.body)
    return Response(answer.status, [("content-type", answer.media), *id_headers(exchange)], body)
