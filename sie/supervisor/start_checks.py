"""Checks, before anything starts, that settings do not contradict each other and that optional packages are installed."""

from __future__ import annotations

import importlib.util

from sie.config.mcp_config import read_mcp_config
from sie.config.settings import Loaded, Settings
from sie.runtime import failpoints
from sie.supervisor.host_resources import StartError


def check_start(loaded: Loaded, *, is_gateway: bool) -> None:
    """Raise StartError for settings with which no start can succeed on this installation."""
    settings = loaded.settings
    _check_failpoints(loaded)
    _check_tracing(settings)
    _check_cluster(settings, is_gateway=is_gateway)
    check_mcp("" if settings.agents.agent_socket else settings.agents.mcp_config)


def _check_failpoints(loaded: Loaded) -> None:
    for text in loaded.settings.testing.failpoints:
        try:
            failpoints.parse(text)
        except ValueError as error:
            raise StartError(f"failpoints (from {loaded.sources['failpoints']}): {error}") from error


def _check_tracing(settings: Settings) -> None:
    """Raise StartError if tracing is enabled and its packages are missing."""
    if not settings.tracing.enabled:
        return
    names = ("opentelemetry.sdk", f"opentelemetry.exporter.otlp.proto.{settings.tracing.protocol}")
    try:
        is_there = all(importlib.util.find_spec(name) for name in names)
    except ModuleNotFoundError:  # find_spec imports the parent packages
        is_there = False
    if not is_there:
        raise StartError("tracing: OpenTelemetry is not installed; pip install 'ringserve[otel]'")


def _check_cluster(settings: Settings, *, is_gateway: bool) -> None:
    """Raise StartError for a gateway without NATS or with a listener it does not have, and if the client is missing."""
    if is_gateway and not settings.cluster.nats:
        raise StartError("nats: a gateway needs the address of NATS (--nats nats://HOST:4222)")
    if is_gateway and settings.server.grpc_port:
        raise StartError("grpc_port: a gateway serves no gRPC")
    if settings.cluster.nats and importlib.util.find_spec("nats") is None:
        raise StartError("nats: the NATS client is not installed; pip install 'ringserve[cluster]'")


def check_mcp(path: str) -> None:
    """Raise StartError for a file of MCP servers that cannot be used."""
    if not path:
        return
    if importlib.util.find_spec("mcp") is None:
        raise StartError("mcp_config: the MCP client is not installed; pip install 'ringserve[mcp]'")
    try:
        read_mcp_config(path)
    except OSError as error:
        raise StartError(f"mcp_config: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StartError(f"mcp_config: {path}: {error}") from None
