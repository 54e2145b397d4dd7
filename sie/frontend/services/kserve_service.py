"""Serves KServe v2 and its extensions as plain values: the dicts of the protocol's messages. Knows no transport.

A refusal is a `SieError` with the protocol's text. Source: KServe v2 sheet. docs/tensors.md lists the differences between
OpenVINO Model Server and Triton, and the choices made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from sie.frontend.dialects.kserve import models, trace_settings
from sie.frontend.http.exchange import Exchange
from sie.frontend.process import FrontendProcess
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.model_paths import check_version
from sie.frontend.tensors.model_statistics import read_statistics
from sie.frontend.tensors.states import rule_of
from sie.ipc.messages import ModelEntry
from sie.values.errors import BadRequest, NotFound, SieError
from sie.values.tensor import RegionPart


class KServeService:
    """KServe v2 in one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self.tensors = process.tensors
        self._table = process.tensors.table

    @property
    def is_ready(self) -> bool:
        """Whether `/readyz` is green."""
        return self._process.is_ready

    def server(self) -> dict[str, Any]:
        """Return the name, version and extensions of the server."""
        return models.server_metadata("sie")

    # --- a model --------------------------------------------------------------------------------------------------

    def find(self, exchange: Exchange, name: str, version: str = "") -> ModelEntry:
        """Return the entry of a version (empty: the newest), and record it. Raises BadRequest, NotFound."""
        if version:
            check_version(version)
        entry = self._table.resolve(name, version)
        exchange.known_model = entry.card.id
        return entry

    def _find_read(self, exchange: Exchange, name: str, version: str) -> ModelEntry:
        """Return the entry as `find` does. Raises NotFound, too, for an unloaded version or one with an unread file.

        The tensors of an unread file are unknown.
        """
        entry = self.find(exchange, name, version)
        is_unloaded = entry.dismissed and entry.card.kind == "tensor" and not is_servable(entry)
        if not entry.is_read or is_unloaded:
            rule = rule_of(entry)
            raise NotFound(f"Request for unknown model: '{rule.name}' version {rule.version} is not loaded")
        return entry

    def metadata(self, exchange: Exchange, name: str, version: str) -> dict[str, Any]:
        """Return a model's inputs and outputs. Raises the errors of `find`."""
        entry = self._find_read(exchange, name, version)
        rule = rule_of(entry)
        return models.model_metadata(rule, [rule.version] if version else self._table.shown_versions(entry))

    def config(self, exchange: Exchange, name: str, version: str) -> dict[str, Any]:
        """Return a model's configuration. Raises the errors of `find`."""
        return rule_of(self._find_read(exchange, name, version)).config

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Return the statistics of all models, of all versions of one, or of one version.

        Raises BadRequest for an unknown model, as Triton does.
        """
        check_version(version)
        table = self._table
        found = [entry for each in ([name] if name else table.names) for entry in table.versions(each).values()]
        if name and version:
            found = [entry for entry in found if rule_of(entry).version == version.lstrip("0")]
        if name and not found:
            where = f"'{name}' version {version}" if version else f"'{name}'"
            raise BadRequest(f"requested model {where} is not available")
        return models.statistics(read_statistics(self._process.pages, found))

    # --- repositories ---------------------------------------------------------------------------------------------

    def index(self, *, only_ready: bool) -> list[dict[str, str]]:
        """Return every version of every model."""
        return models.index_entries(self._table.states(), only_ready=only_ready)

    def config_statuses(self) -> dict[str, Any]:
        """Return the state of every version, as OpenVINO Model Server does."""
        return models.config_statuses(self._table.states())

    async def load(self, name: str, parameters: Mapping[str, Any], deadline_ns: int) -> None:
        """Load a model. The caller has checked the permission. Raises BadRequest, and the errors of `RepositoryAdmin.load`."""
        models.check_manage(parameters, "load")
        await self.tensors.repository.load(name, deadline_ns)

    async def unload(self, name: str, parameters: Mapping[str, Any], deadline_ns: int) -> None:
        """Unload a model. The caller has checked the permission. Raises BadRequest, and the errors of `RepositoryAdmin.unload`."""
        models.check_manage(parameters, "unload")
        await self.tensors.repository.unload(name, deadline_ns)

    # --- shared memory --------------------------------------------------------------------------------------------

    def regions(self, exchange: Exchange, name: str = "") -> list[dict[str, Any]]:
        """Return the regions of shared memory that this API key has registered, or one. Raises NotFound."""
        regions, owner = self.tensors.regions, exchange.owner
        return [region.shown() for region in ([regions.find(owner, name)] if name else regions.all_of(owner))]

    def register_region(self, exchange: Exchange, region: RegionPart, key: str) -> None:
        """Register a region of shared memory for this API key. Raises the errors of `Regions.register`."""
        self.tensors.regions.register(exchange.owner, region, key)

    def unregister_region(self, exchange: Exchange, name: str = "") -> None:
        """Forget a region of this API key, or all of them."""
        self.tensors.regions.unregister(exchange.owner, name)

    # --- settings -------------------------------------------------------------------------------------------------

    def trace_settings(self, exchange: Exchange, name: str) -> dict[str, Any]:
        """Return the trace settings of a model, or of the server if no model is named. Raises NotFound."""
        if name:
            self.find(exchange, name)
        return trace_settings.TRACE

    def log_settings(self) -> dict[str, Any]:
        """Return the log settings."""
        return trace_settings.log_settings(self._process.settings.server.log_level)


def unsupported(message: str) -> SieError:
    """Return the error for a part of an API that this server lacks: 400, or UNIMPLEMENTED over gRPC."""
    return SieError(message, code="UNSUPPORTED", http_status=400)


def refuse_device_region() -> NoReturn:
    """Refuse to register memory of a GPU. Raises SieError."""
    raise unsupported("CUDA shared memory is not supported by this server; use system shared memory, or send tensors")


def check_device_region(name: str) -> None:
    """Raise NotFound for a named region of a GPU's memory: this server registers none."""
    if name:
        raise NotFound(f"Unable to find cuda shared memory region: '{name}'")


def check_repository(name: str) -> None:
    """Refuse a request that names a repository, because clients see only one. Raises SieError."""
    if name:
        raise unsupported("'repository_name' specification is not supported")
