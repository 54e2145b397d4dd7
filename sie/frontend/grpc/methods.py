"""Lists the gRPC services and methods with their handlers and required scopes. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from sie.frontend.grpc import kserve, trtis
from sie.frontend.grpc.health import Health
from sie.frontend.grpc.kserve import KServeGrpc
from sie.frontend.grpc.reflection import Reflection
from sie.frontend.grpc.trtis import TrtisGrpc
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.routing import Route
from sie.frontend.services.kserve_service import KServeService, check_device_region, refuse_device_region
from sie.frontend.services.trtis_service import TrtisService, refuse
from sie.proto import message_class
from sie.values.api_key import Need

KSERVE: Final = "inference.GRPCInferenceService"
TRTIS: Final = "nvidia.inferenceserver.GRPCService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

Handler = Callable[..., Awaitable[bytes]]
"""A method of a service's class: takes the service, the exchange and the message, and returns the encoded reply."""


class Method(NamedTuple):
    """One method. handler is a function of its dialect's class; request names a message type in `file`.

    If request is empty, the handler parses the bytes itself. is_stream: the client sends a stream and reads a stream.
    is_watch: one message is answered by a stream; the handler writes all its messages except the last.
    """

    service: str
    name: str
    route: Route
    handler: Handler
    file: str = ""
    request: str = ""
    is_stream: bool = False
    is_watch: bool = False


def _method(
    service: str, name: str, handler: Handler, file: str, request: str, *, need: Need = "infer", label: str = "",
    is_stream: bool = False, is_watch: bool = False,
) -> Method:  # fmt: skip
    envelope = "trtis" if service == TRTIS else "kserve"
    route = Route(f"/{service}/{name}", "POST", envelope, label, need)
    return Method(service, name, route, handler, file, request, is_stream=is_stream, is_watch=is_watch)


def _replying(file: str, reply: str, values: Callable[..., Any]) -> Handler:
    """Return a handler that encodes the fields of its reply; None means that all have their defaults."""

    async def handle(dialect: KServeGrpc | TrtisGrpc, exchange: Exchange, message: Any) -> bytes:
        found = values(dialect.service, exchange, message)
        if inspect.isawaitable(found):
            found = await found
        return message_class(file, reply)(**found).SerializeToString() if found is not None else b""

    return handle


def _kserve(
    name: str, values: Callable[[KServeService, Exchange, Any], Any], *, request: str = "", need: Need = "infer"
) -> Method:
    handler = _replying("kserve", f"inference.{name}Response", values)
    return _method(KSERVE, name, handler, "kserve", request or f"inference.{name}Request", need=need)


def _trtis(name: str, values: Callable[[TrtisService, Exchange, Any], Any], *, need: Need = "infer") -> Method:
    name_of = "nvidia.inferenceserver.{}".format
    handler = _replying("trtis", name_of(f"{name}Response"), values)
    return _method(TRTIS, name, handler, "trtis", name_of(f"{name}Request"), need=need)


def _infer(service: str, name: str, handler: Handler, *, is_stream: bool = False) -> Method:
    return _method(service, name, handler, "", "", label="infer", is_stream=is_stream)


_REGION: Final = "inference.SharedMemoryRequest"

METHODS: Final = (
    _kserve("ServerLive", lambda _s, _x, _m: {"live": True}, need="open"),
    _kserve("ServerReady", lambda s, _x, _m: {"ready": s.is_ready}, need="open"),
    _kserve("ModelReady", kserve.model_ready),
    _kserve("ServerMetadata", lambda s, _x, _m: s.server()),
    _kserve("ModelMetadata", lambda s, x, m: s.metadata(x, m.name, m.version)),
    _infer(KSERVE, "ModelInfer", KServeGrpc.infer),
    _infer(KSERVE, "ModelStreamInfer", KServeGrpc.stream_infer, is_stream=True),
    _kserve("ModelConfig", kserve.model_config),
    _kserve("ModelStatistics", lambda s, _x, m: s.statistics(m.name, m.version)),
    _kserve("RepositoryIndex", kserve.repository_index),
    _kserve("RepositoryModelLoad", kserve.load, need="admin"),
    _kserve("RepositoryModelUnload", kserve.unload, need="admin"),
    _kserve("SystemSharedMemoryStatus", kserve.region_status),
    _kserve("SystemSharedMemoryRegister", kserve.register_region),
    _kserve("SystemSharedMemoryUnregister", lambda s, x, m: s.unregister_region(x, m.name)),
    _kserve("CudaSharedMemoryStatus", lambda _s, _x, m: check_device_region(m.name[:256]), request=_REGION),
    _kserve("CudaSharedMemoryRegister", lambda _s, _x, _m: refuse_device_region(), request=_REGION),
    _kserve("CudaSharedMemoryUnregister", lambda _s, _x, _m: None, request=_REGION),
    _kserve("TraceSetting", kserve.trace_settings),
    _kserve("LogSettings", kserve.log_settings),
    _trtis("Status", trtis.status),
    _trtis("Health", trtis.health, need="open"),
    _infer(TRTIS, "Infer", TrtisGrpc.infer),
    _infer(TRTIS, "StreamInfer", TrtisGrpc.infer, is_stream=True),
    _trtis("ModelControl", trtis.control, need="admin"),
    _trtis("SharedMemoryControl", lambda _s, _x, _m: refuse("shared memory")),
    _trtis("Repository", trtis.repository),
    _trtis("Profile", lambda _s, _x, _m: refuse("profiling")),
    _method(HEALTH, "Check", Health.check, "health", "grpc.health.v1.HealthCheckRequest", need="open"),
    _method(HEALTH, "List", Health.list_all, "health", "grpc.health.v1.HealthListRequest", need="open"),
    _method(HEALTH, "Watch", Health.watch, "health", "grpc.health.v1.HealthCheckRequest", need="open", is_watch=True),
    *(
        _method(service, "ServerReflectionInfo", Reflection.stream_reflect, "", "", need="any", is_stream=True)
        for service in REFLECTION
    ),
)
"""All other methods are UNIMPLEMENTED."""
BY_PATH: Final = {method.route.template: method for method in METHODS}
