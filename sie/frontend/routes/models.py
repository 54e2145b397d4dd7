"""Handles `/v1/models` and the management of models. Reads the model table; the supervisor changes it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sie.frontend.dialects.openai import models as dialect
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Response
from sie.frontend.models.model_table import ModelTable
from sie.frontend.models.not_found import model_not_found
from sie.frontend.process import FrontendProcess
from sie.frontend.telemetry.access_log import id_headers
from sie.frontend.telemetry.metrics import UNKNOWN_MODEL
from sie.ipc.messages import ModelEntry
from sie.values.errors import NotFound, SieError
from sie.values.inference import DEFAULT_MODEL

_MCP_TIMEOUT_S: Final = 1.0
ERROR_CODE: Final = "x-sie-error-code"
"""The header with SIE's own code of an error, on routes whose errors have another API's form."""


class Cards:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process

    async def list_models(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/models` with all models, including the default."""
        models = self._process.models
        mcp = await self._mcp_facts()
        infos = [_with_mcp(model_info(entry, models), mcp) for entry in models.entries.values()]
        return Response(200, [JSON, *id_headers(exchange)], dialect.models_body(infos, models.default_of()))

    async def show_model(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/models/{model}`. The list's `default` also counts as a model."""
        models, model = self._process.models, exchange.model
        entry = models.find(model)
        if entry is not None:
            info = model_info(entry, models)
        else:
            entry = models.find(models.default_of() or "") if model == DEFAULT_MODEL else None
            if entry is None:
                body = dialect.model_not_found_body(model_not_found(model, models.entries))
                return Response(404, [JSON, (ERROR_CODE, NotFound.code), *id_headers(exchange)], body)
            info = {**model_info(entry, models), "id": DEFAULT_MODEL}
        info = _with_mcp(info, await self._mcp_facts())
        return Response(200, [JSON, *id_headers(exchange)], dialect.model_body(info))

    async def _mcp_facts(self) -> dict[str, int]:
        """Return how many MCP servers are connected, and their tools; nothing on a server without any."""
        process = self._process
        if not process.settings.agents.has_mcp or process.remote is not None:
            return {}
        from sie.agents.messages import ListMcp, McpTools  # imported with the first such request

        try:
            async with asyncio.timeout(_MCP_TIMEOUT_S):
                servers = (await process.agents.ask(ListMcp(), McpTools)).servers
        except (SieError, TimeoutError):  # the agent process is being started anew
            servers = ()
        return {
            "mcp_tools_count": sum(len(server.tools) for server in servers),
            "mcp_servers_connected": sum(server.is_connected for server in servers),
        }

    async def manage_model(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/models/load`, `unload`, `reload` and `status`. The app has checked the permission."""
        process = self._process
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        body = await exchange.read_body(process.bodies)
        verb = exchange.scope.path.rpartition("/")[2]
        exchange.known_model = UNKNOWN_MODEL
        answer = await process.admin.serve(verb, body, exchange.deadline_ns)
        exchange.known_model = answer.model or UNKNOWN_MODEL
        return Response(answer.http_status, [JSON, *id_headers(exchange)], answer.body)

    async def show_admin(self, exchange: Exchange) -> Response:
        """Answer `GET /v1/admin`: whether a page's buttons would work. The app has checked the permission."""
        return Response(200, [JSON, *id_headers(exchange)], b'{"allowed":true}')


def _with_mcp(info: dict[str, Any], mcp: dict[str, int]) -> dict[str, Any]:
    """Return a model's description with the facts about MCP, if it can call tools."""
    return {**info, **mcp} if info.get("tools_available") else info


def model_info(entry: ModelEntry, models: ModelTable) -> dict[str, Any]:
    """Return the description of a model for clients."""
    error, progress = entry.error, models.progress_of(entry)
    last_error = None
    if error is not None:
        extras = error.extras
        last_error = {
            "code": error.code,
            "message": error.message,
            "attempts": extras.get("attempts", 1),
            "permanent": extras.get("permanent", False),
        }
    loras = {name: adapter.state for name, adapter in entry.adapters.items()}
    return dialect.model_info(
        entry.card, entry.state, last_error, models.created_s, loras,
        is_reloading=entry.reloading, fallbacks=entry.fallbacks,
        progress=None if progress is None else (progress.stage, progress.fraction, progress.worker),
    )  # fmt: skip
