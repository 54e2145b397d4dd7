"""Serves `grpc.health.v1.Health`: whether the server, or one of its services, takes requests.

Source: gRPC's health checking protocol. Only `Check`; who watches asks again.
"""

from __future__ import annotations

from typing import Any, Final

from sie.errors import NotFound, SieError
from sie.frontend.inference import Exchange
from sie.frontend.process import FrontendProcess
from sie.frontend.rpc.methods import HEALTH, KSERVE, TRTIS
from sie.proto import message_class

_SERVICES: Final = frozenset(("", KSERVE, TRTIS, HEALTH))


class Health:
    """The health service of the gRPC process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> None:
        """Leave every failure to the call's status."""
        del exchange, message, error, is_stream

    async def check(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `Check`."""
        if message.service not in _SERVICES:
            raise NotFound("unknown service")
        status = "SERVING" if self._process.is_ready else "NOT_SERVING"
        return message_class("health", "grpc.health.v1.HealthCheckResponse")(status=status).SerializeToString()
