"""Checks, before anything starts, that settings do not contradict each other and that optional packages are installed."""

from __future__ import annotations

import errno
import importlib.util
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sie.config.agent_settings import Agents
from sie.config.mcp_config import read_mcp_config
from sie.config.settings import Loaded, Settings
from sie.runtime import failpoints
from sie.supervisor.host_resources import StartError

_NATS_KINDS: Final = {"nats": 0, "tls": 0, "ws": 1, "wss": 1}
"""The schemes of NATS's addresses. Those of one connection have one number."""
_CREDENTIALS: Final = (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")


def check_start(loaded: Loaded, *, is_gateway: bool) -> None:
    """Raise StartError for settings with which no start can succeed on this installation."""
    settings = loaded.settings
    _check_failpoints(loaded)
    _check_tracing(settings)
    _check_cluster(settings, is_gateway=is_gateway)
    _check_text("chat_template", settings.generation.chat_template)
    if not settings.agents.agent_socket:  # else another process uses the files, as another user
        check_agents(settings)


def check_agents(settings: Settings) -> None:
    """Raise StartError for files of the agent process that cannot be used, and for a search without its engine."""
    _check_mcp(settings.agents.mcp_config)
    _check_search(settings.agents)
    if settings.agents.is_on or settings.agents.agent_socket:
        _check_agent_dir(settings.agent_dir)


def _check_failpoints(loaded: Loaded) -> None:
    for text in loaded.settings.testing.failpoints:
        try:
            failpoints.parse(text)
        except ValueError as error:
            raise StartError(f"failpoints (from {loaded.sources['failpoints']}): {error}") from error


def _check_tracing(settings: Settings) -> None:
    """Raise StartError if tracing is enabled and its packages are missing, or its collector cannot be reached that way."""
    if not settings.tracing.enabled:
        return
    protocol = settings.tracing.protocol_in(os.environ)
    if protocol not in {"grpc", "http"}:
        raise StartError(
            f"otlp_protocol: OpenTelemetry's variables name {protocol!r}; served are grpc and http/protobuf"
        )
    if protocol == "grpc" and urlsplit(settings.tracing.endpoint).path.strip("/"):
        raise StartError("otlp_endpoint: gRPC has no path; leave it out, or set `--otlp-protocol http`")
    names = ("opentelemetry.sdk", f"opentelemetry.exporter.otlp.proto.{protocol}")
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
    if settings.cluster.nats:
        _check_addresses(settings.cluster.nats)
        _check_authority(settings.cluster.nats_tls_ca)
        _check_credentials(settings.cluster.nats_credentials)


def _check_addresses(nats: str) -> None:
    """Raise StartError for an address that the NATS client does not take, or for sockets and websockets together."""
    kinds: set[int] = set()
    for address in nats.split(","):
        try:
            parts = urlsplit(address.strip() if "://" in address else f"nats://{address.strip()}")
            is_address = parts.scheme in _NATS_KINDS and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            shown = address.rpartition("@")[2].strip()
            raise StartError(f"nats: {shown!r} is not an address of NATS, which is nats://HOST:PORT")
        kinds.add(_NATS_KINDS[parts.scheme])
    if len(kinds) > 1:
        raise StartError(
            "nats: addresses with ws:// or wss:// cannot stand beside those with nats://HOST:PORT or tls://"
        )


@contextmanager
def _reading(setting: str, path: str) -> Iterator[None]:
    """Turn an OSError into a StartError that names the setting of the file."""
    try:
        yield
    except OSError as error:
        raise StartError(f"{setting}: {path}: cannot be read: {error.strerror}") from None


def _check_authority(path: str) -> None:
    if not path:
        return
    with _reading("nats_tls_ca", path):
        try:
            ssl.create_default_context(cafile=path)
        except ssl.SSLError:
            raise StartError(f"nats_tls_ca: {path}: holds no certificate in PEM form") from None


def _check_credentials(path: str) -> None:
    if not path:
        return
    if importlib.util.find_spec("nkeys") is None:
        raise StartError("nats_credentials: nkeys is not installed; pip install nkeys")
    import nkeys  # needed with this setting alone

    with _reading("nats_credentials", path):
        data = Path(path).read_bytes()
    try:
        if data.startswith(b"SU"):
            nkeys.from_seed(bytearray(data.strip()))
            return
    except nkeys.NkeysError as error:
        raise StartError(f"nats_credentials: {path}: holds no seed of an nkey: {error}") from None
    if not all(part in data for part in _CREDENTIALS):
        raise StartError(f"nats_credentials: {path}: holds no JWT with its seed, and no seed alone")


def _check_mcp(path: str) -> None:
    """Raise StartError for a file of MCP servers that cannot be used."""
    if not path:
        return
    if importlib.util.find_spec("mcp") is None:
        raise StartError("mcp_config: the MCP client is not installed; pip install 'ringserve[mcp]'")
    with _reading("mcp_config", path):
        try:
            read_mcp_config(path)
        except ValueError as error:
            raise StartError(f"mcp_config: {path}: {error}") from None


def _check_search(agents: Agents) -> None:
    """Raise StartError for web search without the address of an engine, or with a key that cannot be read."""
    if agents.enable_search and not agents.search_url:
        raise StartError("search_url: enable_search needs the address of a search engine (--search-url URL)")
    if agents.has_search:
        _check_text("search_key_file", agents.search_key_file)


def _check_agent_dir(path: Path) -> None:
    """Make the directory of the sessions. Raise StartError if the agent process could not make directories in it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StartError(f"agent_dir: {path}: sessions cannot have directories in it: {error.strerror}") from None


def _check_text(setting: str, path: str) -> None:
    """Raise StartError if the setting names a file that is not a text."""
    if not path:
        return
    with _reading(setting, path):
        try:
            Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise StartError(f"{setting}: {path}: is not UTF-8 text") from None
