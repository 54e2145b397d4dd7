"""Serves `grpc.health.v1.Health`, the readiness of the server and its services. Must agree with `/readyz`.

All services become ready together. Source: gRPC's health checking protocol.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sie.frontend.http.exchange import Exchange
from sie.frontend.process import FrontendProcess
from sie.proto import message_class
from sie.values.errors import NotFound, SieError


class Health:
    """The health service of the gRPC process. The empty name among the services is the server."""

    def __init__(self, process: FrontendProcess, services: Collection[str]) -> None:
        self._process = process
        self._services = services

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> None:
        """Return None: the call's status reports every failure."""
        del exchange, message, error, is_stream

    async def check(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `Check`."""
        if message.service not in self._services:
            raise NotFound("unknown service")
        return self._encoded(message.service)

    async def list_all(self, _exchange: Exchange, _message: Any) -> bytes:
        """Answer `List`."""
        reply = message_class("health", "grpc.health.v1.HealthListResponse")()
        for service in self._services:
            reply.statuses[service].status = self._status(service)
        encoded: bytes = reply.SerializeToString()
        return encoded

    async def watch(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `Watch` with the status now and after each change, until the client leaves or the server drains.

        An unknown service may be watched, too; its status is SERVICE_UNKNOWN.
        """
        service, told = message.service, b""
        while not self._process.is_draining:
            # ORDER: before the status, or a change during the write would be missed.
            changed = self._process.models.changed
            status = self._encoded(service)
            if status != told:
                await exchange.protocol.write(status)
                told = status
            await changed.wait()
        return self._encoded(service)

    def _encoded(self, service: str) -> bytes:
        status = self._status(service)
        return message_class("health", "grpc.health.v1.HealthCheckResponse")(status=status).SerializeToString()

    def _status(self, service: str) -> str:
        if service not in self._services:
            return "SERVICE_UNKNOWN"
        return "SERVING" if self._process.is_ready else "NOT_SERVING"
