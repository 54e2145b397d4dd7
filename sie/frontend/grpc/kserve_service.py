"""Serves `inference.GRPCInferenceService`. Must behave as `sie.frontend.routes.kserve` does over HTTP.

Source: KServe v2 sheet, section 13.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from google.protobuf import json_format

from sie import __version__
from sie.frontend.dialects.kserve import grpc
from sie.frontend.dialects.kserve import trace_settings as kserve_settings
from sie.frontend.dialects.kserve.grpc import InferMessage
from sie.frontend.dialects.kserve.infer import InferCall
from sie.frontend.dialects.kserve.models import (
    EXTENSIONS,
    check_manage_parameters,
    index_entries,
    model_metadata,
    statistics,
)
from sie.frontend.grpc.transport.status_codes import details
from sie.frontend.grpc.watched import Watched
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.kserve import KServe, check_known, ranked, unsupported
from sie.frontend.tensors.figures import read_figures
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.states import rule_of
from sie.ipc.messages import ModelEntry
from sie.proto import message_class
from sie.values.errors import BadRequest, NotFound, SieError
from sie.values.tensor import TensorReply, TensorRule


class KServeGrpc:
    """The KServe v2 dialect of the gRPC process. Handlers return encoded replies."""

    def __init__(self, process: FrontendProcess, kserve: KServe, pool: ThreadPoolExecutor) -> None:
        self._process = process
        self._tensors = process.tensors
        self._kserve = kserve
        self._pool = pool

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> bytes | None:
        """Return a stream's reply to a failed request, which does not end the stream; otherwise None."""
        if not is_stream or error.http_status in (401, 403, 429):
            return None
        try:
            request_id = grpc.parse_infer(message).message.id
        except BadRequest:
            request_id = ""
        return grpc.stream_error(details(error), request_id)

    # --- the server -----------------------------------------------------------------------------------------------

    async def server_live(self, _exchange: Exchange, _message: Any) -> bytes:
        """Answer `ServerLive`."""
        return _encoded("ServerLiveResponse", live=True)

    async def server_ready(self, _exchange: Exchange, _message: Any) -> bytes:
        """Answer `ServerReady` as `/readyz` does."""
        return _encoded("ServerReadyResponse", ready=self._process.is_ready)

    async def server_metadata(self, _exchange: Exchange, _message: Any) -> bytes:
        """Answer `ServerMetadata`."""
        return _encoded("ServerMetadataResponse", name="sie", version=__version__, extensions=EXTENSIONS)

    # --- a model --------------------------------------------------------------------------------------------------

    async def model_ready(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `ModelReady`. An unknown model is not ready, without an error."""
        try:
            ready = is_servable(self._find(message.name, message.version))
        except NotFound:
            ready = False
        return _encoded("ModelReadyResponse", ready=ready)

    async def model_metadata(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `ModelMetadata`."""
        entry = self._known(exchange, message)
        rule = rule_of(entry)
        versions = [rule.version] if message.version else self._tensors.table.shown_versions(entry)
        return _encoded("ModelMetadataResponse", **model_metadata(rule, versions))

    async def model_config(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `ModelConfig`."""
        rule = rule_of(self._known(exchange, message))
        reply = message_class("kserve", "inference.ModelConfigResponse")()
        json_format.ParseDict(rule.config, reply.config, ignore_unknown_fields=True)
        return reply.SerializeToString()

    async def model_statistics(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `ModelStatistics`: for all models without a name, for all versions without a version."""
        table = self._tensors.table
        _check_version(message.version)
        if message.name:
            entries = self._kserve.measured(message.name, message.version)
        else:
            entries = [entry for name in table.names for entry in table.versions(name).values()]
        figures = read_figures(self._process.pages, entries)
        return _encoded("ModelStatisticsResponse", model_stats=[statistics(*key, one) for key, one in figures.items()])

    def _known(self, exchange: Exchange, message: Any) -> ModelEntry:
        entry = self._find(message.name, message.version)
        exchange.known_model = entry.card.id
        check_known(entry)
        return entry

    def _find(self, name: str, version: str) -> ModelEntry:
        _check_version(version)
        return self._tensors.table.resolve(name, version)

    # --- inference ------------------------------------------------------------------------------------------------

    # These requests are very frequent, so this code avoids unnecessary coroutines and closures.

    def infer(self, exchange: Exchange, message: bytes) -> Awaitable[bytes]:
        """Answer `ModelInfer`."""
        return self._infer(exchange, grpc.parse_infer(message), is_final=False)

    async def stream_infer(self, exchange: Exchange, message: bytes) -> bytes:
        """Answer one request of `ModelStreamInfer`."""
        parsed = grpc.parse_infer(message)
        is_final = grpc.wants_final_response(parsed.message)
        reply = await self._infer(exchange, parsed, is_final=is_final)
        return grpc.stream_reply(reply)

    def _infer(self, exchange: Exchange, parsed: InferMessage, *, is_final: bool) -> Awaitable[bytes]:
        message = parsed.message
        name, version = message.model_name, message.model_version
        exchange.known_model = self._find(name, version).card.id
        self._process.check_accepting()
        run = partial(self._run, exchange, parsed, is_final)
        return self._tensors.serve(name, version, exchange.deadline_ns, run)

    async def _run(self, exchange: Exchange, parsed: InferMessage, is_final: bool, entry: ModelEntry) -> bytes:
        process, rule = self._process, rule_of(entry)
        exchange.known_model = entry.card.id
        arguments = (parsed, entry.card.id, rule, process.settings.limits.max_tensor_values)
        if len(parsed.rest) < LARGE_BYTES:
            call = grpc.decode_infer(*arguments)
        else:
            call = await offload(self._pool, len(parsed.rest), grpc.decode_infer, *arguments)
        exchange.decoded_ns = time.monotonic_ns()
        watched = Watched(process)
        try:
            with await self._tensors.infer(
                call.request,
                began_ns=exchange.began_ns,
                deadline_ns=exchange.deadline_ns,
                watch=watched.watch,
                owner=exchange.owner,
            ) as reply:
                exchange.timing, exchange.cuts = reply.timing, reply.cuts
                nbytes = sum([len(output.data) for output in reply.outputs])
                if nbytes < LARGE_BYTES:
                    answer = _encode(call, reply, rule, is_final=is_final)
                else:
                    answer = await offload(self._pool, nbytes, partial(_encode, call, reply, rule, is_final=is_final))
        except asyncio.CancelledError:
            watched.give_up()
            raise
        process.metrics.record_last_inference(entry.card.id)
        return answer

    # --- repositories ---------------------------------------------------------------------------------------------

    async def repository_index(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `RepositoryIndex`."""
        _check_repository(message)
        models = index_entries(self._kserve.states(), only_ready=message.ready)
        return _encoded("RepositoryIndexResponse", models=models)

    async def load(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `RepositoryModelLoad` after the model has loaded."""
        _check_repository(message)
        check_manage_parameters(_choices(message.parameters), "load")
        await self._tensors.repository.load(message.model_name, exchange.deadline_ns)
        return b""

    async def unload(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `RepositoryModelUnload`."""
        _check_repository(message)
        check_manage_parameters(_choices(message.parameters), "unload")
        await self._tensors.repository.unload(message.model_name, exchange.deadline_ns)
        return b""

    # --- shared memory --------------------------------------------------------------------------------------------

    async def region_status(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer that no region is registered. Raises NotFound for a named region."""
        if message.name:
            raise NotFound(f"Unable to find shared memory region: '{message.name[:256]}'")
        return b""

    async def unregister(self, _exchange: Exchange, _message: Any) -> bytes:
        """Answer as for an unregistered region: this server registers none."""
        return b""

    async def refuse_region(self, _exchange: Exchange, _message: Any) -> bytes:
        """Refuse to register shared memory."""
        raise unsupported("shared memory is not supported by this server; send tensors in raw_input_contents")

    # --- settings -------------------------------------------------------------------------------------------------

    async def trace_settings(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `TraceSetting`, for the server if no model is named. An empty value means the default."""
        if message.model_name:
            exchange.known_model = self._find(message.model_name, "").card.id
        given = {name: list(setting.value) or None for name, setting in message.settings.items()}
        kserve_settings.check_unchanged(given, kserve_settings.TRACE)
        reply = message_class("kserve", "inference.TraceSettingResponse")()
        for name, value in kserve_settings.TRACE.items():
            reply.settings[name].value.extend([value] if isinstance(value, str) else value)
        return _bytes_of(reply)

    async def log_settings(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `LogSettings`."""
        own = kserve_settings.log_settings(self._process.settings.server.log_level)
        kserve_settings.check_unchanged(_choices(message.settings), own)
        reply = message_class("kserve", "inference.LogSettingsResponse")()
        for name, value in own.items():
            field = (
                "bool_param"
                if isinstance(value, bool)
                else "uint32_param"
                if isinstance(value, int)
                else "string_param"
            )
            setattr(reply.settings[name], field, value)
        return _bytes_of(reply)


def _check_version(version: str) -> None:
    if version and not (version.isascii() and version.isdigit()):
        raise BadRequest(f"invalid model version '{version[:32]}': it must be a number")


def _choices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each `parameter_choice`, or None if it is not set."""
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in values.items()}
    return {name: choice and getattr(values[name], choice) for name, choice in chosen.items()}


def _check_repository(message: Any) -> None:
    if message.repository_name:
        raise unsupported("'repository_name' specification is not supported")


def _bytes_of(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _encode(call: InferCall, reply: TensorReply, rule: TensorRule, *, is_final: bool) -> bytes:
    return grpc.encode_infer(call, ranked(call, reply, rule), rule, is_final=is_final)


def _encoded(name: str, /, **fields: Any) -> bytes:
    encoded: bytes = message_class("kserve", f"inference.{name}")(**fields).SerializeToString()
    return encoded
