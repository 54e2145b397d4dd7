"""Parses and connects to the target of a load: a server's address, its TLS settings, and the API key."""

from __future__ import annotations

import os
import socket
import ssl
from urllib.parse import urlsplit

import msgspec

_TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443, "grpc": 80, "grpcs": 443}


class TargetError(Exception):
    """The server cannot be reached, or its address is invalid."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One listener of a server."""

    url: str
    """The given address, for people."""
    host: str = ""
    port: int = 0
    path: str = ""
    """Prefix of every path, without a slash at its end."""
    uds: str = ""
    """A Unix socket instead of host and port."""
    key: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def authority(self) -> str:
        """The server's name in requests."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.host else "localhost"

    @property
    def _is_local(self) -> bool:
        return bool(self.uds) or self.host in {"localhost", "::1"} or self.host.startswith("127.")

    def connect(self) -> socket.socket:
        """Return a connected socket that does not block. Raises TargetError."""
        try:
            sock = _connect_unix(self.uds) if self.uds else socket.create_connection((self.host, self.port), _TIMEOUT_S)
            if not self.uds:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_hostname=self.host)  # closes it when the handshake fails
        except (OSError, ValueError) as error:
            is_absent = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
            hint = "; start a server with `sie serve`" if is_absent and self._is_local else ""
            raise TargetError(f"cannot connect to {self.url}: {error}{hint}") from error
        sock.setblocking(False)
        return sock


def _connect_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_TIMEOUT_S)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def parse_target(url: str, *, key: str = "", ca_file: str = "", cert_file: str = "", key_file: str = "") -> Target:
    """Parse `http[s]://HOST[:PORT][/PATH]`, `grpc[s]://HOST:PORT` or `unix:PATH`.

    ca_file: PEM file of the authorities to trust instead of the system's. cert_file, key_file: this client's
    certificate. Raises TargetError.
    """
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        return Target(url=url, uds=os.path.normpath(path), key=key)
    parts = urlsplit(url)
    try:
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise TargetError(f"{url!r}: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
        raise TargetError(f"{url!r} is not http://HOST:PORT, https://, grpc://, grpcs:// or unix:PATH")
    tls = _tls_context(parts.scheme, ca_file, cert_file, key_file) if parts.scheme in {"https", "grpcs"} else None
    return Target(url=url, host=parts.hostname, port=port, path=parts.path.rstrip("/"), key=key, tls=tls)


def _tls_context(scheme: str, ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert_file:
            context.load_cert_chain(cert_file, key_file or None)
    except OSError as error:
        raise TargetError(f"TLS files: {error}") from error
    if scheme == "grpcs":
        context.set_alpn_protocols(["h2"])
    return context
