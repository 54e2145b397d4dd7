"""Lists the gRPC methods with their handlers and required scopes. Pure, and imports no handler."""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.frontend.http.routes import Route
from sie.values.api_key import Need

KSERVE: Final = "inference.GRPCInferenceService"
TRTIS: Final = "nvidia.inferenceserver.GRPCService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Method(NamedTuple):
    """One method. route.handler names a method of its dialect's class; request names a message type in `file`.

    If request is empty, the handler parses the bytes itself. is_stream: the client sends a stream and reads a stream.
    is_watch: one message is answered by a stream; the handler writes all its messages except the last.
    """

    service: str
    name: str
    route: Route
    file: str = ""
    request: str = ""
    is_stream: bool = False
    is_watch: bool = False


def _method(
    service: str, name: str, handler: str, file: str, request: str, *, need: Need = "infer", endpoint: str = ""
) -> Method:
    envelope = "trtis" if service == TRTIS else "kserve"
    route = Route(f"/{service}/{name}", "POST", handler, envelope, endpoint, need)
    is_stream, is_watch = handler.startswith("stream"), handler == "watch"
    return Method(service, name, route, file, request, is_stream=is_stream, is_watch=is_watch)


def _kserve(name: str, handler: str, *, request: str | None = None, need: Need = "infer") -> Method:
    wanted = f"inference.{name}Request" if request is None else request
    return _method(KSERVE, name, handler, "kserve", wanted, need=need, endpoint="" if wanted else "infer")


def _trtis(name: str, handler: str, *, request: str | None = None, need: Need = "infer") -> Method:
    wanted = f"nvidia.inferenceserver.{name}Request" if request is None else request
    return _method(TRTIS, name, handler, "trtis", wanted, need=need, endpoint="" if wanted else "infer")


_REGION: Final = "inference.SharedMemoryRequest"

METHODS: Final = (
    _kserve("ServerLive", "server_live", need="open"),
    _kserve("ServerReady", "server_ready", need="open"),
    _kserve("ModelReady", "model_ready"),
    _kserve("ServerMetadata", "server_metadata"),
    _kserve("ModelMetadata", "model_metadata"),
    _kserve("ModelInfer", "infer", request=""),
    _kserve("ModelStreamInfer", "stream_infer", request=""),
    _kserve("ModelConfig", "model_config"),
    _kserve("ModelStatistics", "model_statistics"),
    _kserve("RepositoryIndex", "repository_index"),
    _kserve("RepositoryModelLoad", "load", need="admin"),
    _kserve("RepositoryModelUnload", "unload", need="admin"),
    _kserve("SystemSharedMemoryStatus", "region_status", request=_REGION),
    _kserve("SystemSharedMemoryRegister", "refuse_region", request=_REGION),
    _kserve("SystemSharedMemoryUnregister", "unregister", request=_REGION),
    _kserve("CudaSharedMemoryStatus", "region_status", request=_REGION),
    _kserve("CudaSharedMemoryRegister", "refuse_region", request=_REGION),
    _kserve("CudaSharedMemoryUnregister", "unregister", request=_REGION),
    _kserve("TraceSetting", "trace_settings"),
    _kserve("LogSettings", "log_settings"),
    _trtis("Status", "status"),
    _trtis("Health", "health", need="open"),
    _trtis("Infer", "infer", request=""),
    _trtis("StreamInfer", "stream_infer", request=""),
    _trtis("ModelControl", "control", need="admin"),
    _trtis("SharedMemoryControl", "refuse_region"),
    _trtis("Repository", "repository"),
    _trtis("Profile", "refuse_profile"),
    _method(HEALTH, "Check", "check", "health", "grpc.health.v1.HealthCheckRequest", need="open"),
    _method(HEALTH, "List", "list_all", "health", "grpc.health.v1.HealthListRequest", need="open"),
    _method(HEALTH, "Watch", "watch", "health", "grpc.health.v1.HealthCheckRequest", need="open"),
    *(_method(service, "ServerReflectionInfo", "stream_reflect", "", "", need="any") for service in REFLECTION),
)
"""All other methods are UNIMPLEMENTED."""
BY_PATH: Final = {method.route.template: method for method in METHODS}
