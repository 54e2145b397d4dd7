"""Serves the TensorRT Inference Server v1 API as plain values. Knows no transport. Source: TRTIS v1 sheet."""

from __future__ import annotations

from typing import NoReturn

from sie.frontend.dialects.trtis.status import Described, ServerState
from sie.frontend.http.exchange import Exchange
from sie.frontend.process import FrontendProcess
from sie.frontend.services.kserve_service import unsupported
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.model_statistics import read_statistics
from sie.frontend.tensors.states import reason_of
from sie.values.errors import BadRequest, NotFound, SieError, Unavailable


class TrtisService:
    """The v1 API in one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self.tensors = process.tensors

    def is_well(self, mode: str) -> bool:
        """Tell whether the server is live or ready. Raises Unavailable while it stops, and SieError for another mode.

        With strict_readiness, it is ready when every requested version is loaded.
        """
        process = self._process
        if mode not in ("live", "ready"):
            raise SieError(f"unknown health mode '{mode[:64]}'", http_status=400)  # shown as the API's code UNKNOWN
        if process.is_draining:
            raise Unavailable("Server exiting")
        return mode == "live" or (
            process.is_ready and not (process.settings.models.strict_readiness and self._has_unready())
        )

    def _has_unready(self) -> bool:
        return any(state.state not in ("loaded", "available") for state in self.tensors.table.states())

    def status(self, model: str) -> ServerState:
        """Return the state of the server and of one model, or of all if model is empty. Raises BadRequest if unknown."""
        process, table = self._process, self.tensors.table
        if model and model not in table:
            raise BadRequest(f"no status available for unknown model '{model}'")
        newest = [
            entry for name in ([model] if model else table.names) for entry in [*table.versions(name).values()][::-1]
        ]
        entries = sorted(newest, key=is_servable, reverse=True)  # a model's configuration is its first entry's
        statistics = read_statistics(process.pages, entries)
        described = [
            Described(rule, entry.state, reason_of(entry), statistics[rule.name, rule.version])
            for entry in entries
            if (rule := entry.card.tensor) is not None
        ]
        state = (
            "SERVER_EXITING" if process.is_draining else "SERVER_READY" if process.is_ready else "SERVER_INITIALIZING"
        )
        return ServerState(state, int(process.uptime_s * 1e9), described)

    def index(self) -> list[str]:
        """Return the names of all models."""
        return self.tensors.table.names

    async def control(self, name: str, deadline_ns: int, *, is_load: bool) -> None:
        """Load or unload a model. The caller has checked the permission. Raises the errors of `RepositoryAdmin`."""
        repository = self.tensors.repository
        await (repository.load if is_load else repository.unload)(name, deadline_ns)

    async def admit(self, exchange: Exchange, name: str, version: str) -> None:
        """Wait until a version takes requests. Raises Unavailable, also for an unknown version, and the engine's errors."""
        process = self._process
        if process.is_draining:
            raise Unavailable("Server exiting")
        try:
            exchange.known_model = self.tensors.table.resolve(name, version).card.id
            process.engine.check_open()
            await self.tensors.wait_serving(name, version, exchange.deadline_ns)
        except NotFound as error:
            raise Unavailable(error.message) from None  # the API has no "not found" here


def refuse(what: str) -> NoReturn:
    """Refuse a part of the API that this server lacks. Raises SieError."""
    raise unsupported(f"{what} is not supported")
