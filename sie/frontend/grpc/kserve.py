"""Serves `inference.GRPCInferenceService`: the values of `sie.frontend.services.kserve_service` as protobuf messages.

Source: KServe v2 sheet, section 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from google.protobuf import json_format

from sie.frontend.dialects.kserve import infer_protobuf
from sie.frontend.dialects.kserve.infer_protobuf import InferMessage
from sie.frontend.dialects.kserve.trace_settings import check_unchanged
from sie.frontend.grpc.transport.status_codes import details
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.process import FrontendProcess
from sie.frontend.services.kserve_service import KServeService, check_repository
from sie.frontend.tensors.infer import Encode
from sie.frontend.tensors.lookup import is_servable
from sie.proto import message_class
from sie.values.errors import NotFound, SieError
from sie.values.tensor import RegionPart, TensorRequest, TensorRule

Values = dict[str, Any]


class KServeGrpc:
    """The KServe v2 dialect of the gRPC process."""

    def __init__(self, process: FrontendProcess, service: KServeService) -> None:
        self._process = process
        self.service = service

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> bytes | None:
        """Return a stream's reply to a failed request, which does not end the stream; otherwise None."""
        if not is_stream or error.http_status in (401, 403, 429):
            return None
        return infer_protobuf.stream_error(details(error), infer_protobuf.id_of(message))

    # --- inference ------------------------------------------------------------------------------------------------

    # These requests are very frequent, so this code avoids unnecessary coroutines.

    def infer(self, exchange: Exchange, message: bytes) -> Awaitable[bytes]:
        """Answer `ModelInfer`."""
        rest, raw = infer_protobuf.cut_raw(message)
        if len(rest) >= LARGE_BYTES:
            return self._infer_large(exchange, rest, raw)
        return self._infer(exchange, infer_protobuf.parse_infer(rest, raw), is_final=False)

    async def _infer_large(self, exchange: Exchange, rest: bytes, raw: list[memoryview]) -> bytes:
        return await self._infer(exchange, await self._parsed(rest, raw), is_final=False)

    async def _parsed(self, rest: bytes, raw: list[memoryview]) -> InferMessage:
        """Parse a message, in a thread if it is large without its raw contents. Raises BadRequest."""
        return await offload(self._process.decode_pool, len(rest), infer_protobuf.parse_infer, rest, raw)

    async def stream_infer(self, exchange: Exchange, message: bytes) -> bytes:
        """Answer one request of `ModelStreamInfer`."""
        parsed = await self._parsed(*infer_protobuf.cut_raw(message))
        is_final = infer_protobuf.wants_final_response(parsed.message)
        return infer_protobuf.stream_reply(await self._infer(exchange, parsed, is_final=is_final))

    def _infer(self, exchange: Exchange, parsed: InferMessage, *, is_final: bool) -> Awaitable[bytes]:
        name, version = parsed.message.model_name, parsed.message.model_version
        self.service.find(exchange, name, version)
        self._process.check_accepting()
        max_values = self._process.settings.limits.max_tensor_values

        def decode(model: str, rule: TensorRule) -> tuple[TensorRequest, Encode[bytes]]:
            call = infer_protobuf.decode_infer(parsed, model, rule, max_values)
            return call.request, partial(infer_protobuf.encode_infer, call, is_final=is_final)

        return self.service.tensors.answer(exchange, name, version, decode, parsed.nbytes)


# --- other methods: from the service, the exchange and a message to the fields of the reply ------------------------------


def model_ready(service: KServeService, exchange: Exchange, message: Any) -> Values:
    """Answer `ModelReady`. An unknown model is not ready, without an error."""
    try:
        return {"ready": is_servable(service.find(exchange, message.name, message.version))}
    except NotFound:
        return {"ready": False}


def model_config(service: KServeService, exchange: Exchange, message: Any) -> Values:
    """Answer `ModelConfig`."""
    config = service.config(exchange, message.name, message.version)
    known = message_class("kserve", "inference.ModelConfig")()
    return {"config": json_format.ParseDict(config, known, ignore_unknown_fields=True)}


def repository_index(service: KServeService, _exchange: Exchange, message: Any) -> Values:
    """Answer `RepositoryIndex`."""
    check_repository(message.repository_name)
    return {"models": service.index(only_ready=message.ready)}


async def load(service: KServeService, exchange: Exchange, message: Any) -> None:
    """Answer `RepositoryModelLoad` after the model has loaded."""
    check_repository(message.repository_name)
    await service.load(message.model_name, _choices(message.parameters), exchange.deadline_ns)


async def unload(service: KServeService, exchange: Exchange, message: Any) -> None:
    """Answer `RepositoryModelUnload`."""
    check_repository(message.repository_name)
    await service.unload(message.model_name, _choices(message.parameters), exchange.deadline_ns)


def region_status(service: KServeService, exchange: Exchange, message: Any) -> Values:
    """Answer `SystemSharedMemoryStatus`."""
    return {"regions": {region["name"]: region for region in service.regions(exchange, message.name)}}


def register_region(service: KServeService, exchange: Exchange, message: Any) -> None:
    """Answer `SystemSharedMemoryRegister`."""
    service.register_region(exchange, RegionPart(message.name, message.offset, message.byte_size), message.key)


def trace_settings(service: KServeService, exchange: Exchange, message: Any) -> Values:
    """Answer `TraceSetting`. An empty value means the default."""
    own = service.trace_settings(exchange, message.model_name)
    check_unchanged({name: list(setting.value) or None for name, setting in message.settings.items()}, own)
    return {"settings": {name: {"value": [it] if isinstance(it, str) else it} for name, it in own.items()}}


def log_settings(service: KServeService, _exchange: Exchange, message: Any) -> Values:
    """Answer `LogSettings`."""
    own = service.log_settings()
    check_unchanged(_choices(message.settings), own)
    fields: dict[type, str] = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {name: {fields[type(it)]: it} for name, it in own.items()}}


def _choices(values: Mapping[str, Any]) -> Values:
    """Return the value of each `parameter_choice`, or None if it is not set."""
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in values.items()}
    return {name: choice and getattr(values[name], choice) for name, choice in chosen.items()}
