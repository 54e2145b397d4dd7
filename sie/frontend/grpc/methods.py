"""Lists the gRPC methods with their handlers and required scopes. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from sie.frontend.grpc.health import Health
from sie.frontend.grpc.kserve_service import KServeGrpc
from sie.frontend.grpc.reflection import Reflection
from sie.frontend.grpc.service_names import HEALTH, KSERVE, REFLECTION, TRTIS
from sie.frontend.grpc.trtis_service import TrtisGrpc
from sie.frontend.http.routes import Route
from sie.values.api_key import Need

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


def _kserve(name: str, handler: Handler, *, request: str = "", need: Need = "infer") -> Method:
    return _method(KSERVE, name, handler, "kserve", request or f"inference.{name}Request", need=need)


def _trtis(name: str, handler: Handler, *, need: Need = "infer") -> Method:
    return _method(TRTIS, name, handler, "trtis", f"nvidia.inferenceserver.{name}Request", need=need)


def _infer(service: str, name: str, handler: Handler, *, is_stream: bool = False) -> Method:
    return _method(service, name, handler, "", "", label="infer", is_stream=is_stream)


_REGION: Final = "inference.SharedMemoryRequest"

METHODS: Final = (
    _kserve("ServerLive", KServeGrpc.server_live, need="open"),
    _kserve("ServerReady", KServeGrpc.server_ready, need="open"),
    _kserve("ModelReady", KServeGrpc.model_ready),
    _kserve("ServerMetadata", KServeGrpc.server_metadata),
    _kserve("ModelMetadata", KServeGrpc.model_metadata),
    _infer(KSERVE, "ModelInfer", KServeGrpc.infer),
    _infer(KSERVE, "ModelStreamInfer", KServeGrpc.stream_infer, is_stream=True),
    _kserve("ModelConfig", KServeGrpc.model_config),
    _kserve("ModelStatistics", KServeGrpc.model_statistics),
    _kserve("RepositoryIndex", KServeGrpc.repository_index),
    _kserve("RepositoryModelLoad", KServeGrpc.load, need="admin"),
    _kserve("RepositoryModelUnload", KServeGrpc.unload, need="admin"),
    _kserve("SystemSharedMemoryStatus", KServeGrpc.region_status, request=_REGION),
    _kserve("SystemSharedMemoryRegister", KServeGrpc.refuse_region, request=_REGION),
    _kserve("SystemSharedMemoryUnregister", KServeGrpc.unregister, request=_REGION),
    _kserve("CudaSharedMemoryStatus", KServeGrpc.region_status, request=_REGION),
    _kserve("CudaSharedMemoryRegister", KServeGrpc.refuse_region, request=_REGION),
    _kserve("CudaSharedMemoryUnregister", KServeGrpc.unregister, request=_REGION),
    _kserve("TraceSetting", KServeGrpc.trace_settings),
    _kserve("LogSettings", KServeGrpc.log_settings),
    _trtis("Status", TrtisGrpc.status),
    _trtis("Health", TrtisGrpc.health, need="open"),
    _infer(TRTIS, "Infer", TrtisGrpc.infer),
    _infer(TRTIS, "StreamInfer", TrtisGrpc.stream_infer, is_stream=True),
    _trtis("ModelControl", TrtisGrpc.control, need="admin"),
    _trtis("SharedMemoryControl", TrtisGrpc.refuse_region),
    _trtis("Repository", TrtisGrpc.repository),
    _trtis("Profile", TrtisGrpc.refuse_profile),
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
