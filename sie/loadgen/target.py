"""Parses and connects to the target of a load: a server's address, its TLS settings, and the API key."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

_TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443, "grpc": 80, "grpcs": 443}
_JARGON: Final = re.compile(r"^\[SSL[^]]*\] | \(_ssl\.c:\d+\)$")
"""The parts around the text of OpenSSL's errors that mean nothing to users."""
_GRAPHIC: Final = re.compile(r"[!-~]*")
_MEANINGS: Final = {
    "WRONG_VERSION_NUMBER": "it answers without TLS; such an address begins with http:// or grpc://",
    "CERTIFICATE_REQUIRED": "the server asks for a client's certificate; give it with --cert and --cert-key",
    "ALERT_HANDSHAKE_FAILURE": "the server refuses the handshake; it may ask for a client's certificate (--cert, --cert-key)",
    "ALERT_UNKNOWN_CA": "the server does not trust the certificate of --cert",
}
_WRONG_NAMES: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH. Source: OpenSSL, x509_vfy.h."""
_EXPIRED: Final = 10


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
    find_server: Callable[[int], int | None] = lambda _port: None
    """Returns the pid of this host's server that has a port, even if it takes no connections."""

    @property
    def authority(self) -> str:
        """The server's name in requests."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.host else "localhost"

    @property
    def hint_of_tls(self) -> str:
        """The hint for a server that does not answer in our protocol: it may have TLS, and this address has none."""
        if self.tls is not None or self.uds:
            return ""
        return (
            f"; the address of a server with TLS begins with {'grpcs' if self.url.startswith('grpc') else 'https'}://"
        )

    @property
    def _is_local(self) -> bool:
        return bool(self.uds) or self.host in {"localhost", "::1"} or self.host.startswith("127.")

    def _hint(self, error: Exception) -> str:
        if not self._is_local or not isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
            return ""
        pid = self.find_server(self.port)
        if pid is None:
            return "; start a server with `sie serve`"
        return f"; its server (pid {pid}) is stopping, and finishes the requests that it accepted, or is starting"

    def connect(self) -> socket.socket:
        """Return a connected socket that does not block. Raises TargetError."""
        try:
            sock = _connect_unix(self.uds) if self.uds else socket.create_connection((self.host, self.port), _TIMEOUT_S)
            if not self.uds:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_hostname=self.host)  # closes it when the handshake fails
        except (OSError, ValueError) as error:
            raise TargetError(f"cannot connect to {self.url}: {reason_of(error)}{self._hint(error)}") from error
        sock.setblocking(False)
        return sock


def reason_of(error: Exception) -> str:
    """Return the reason of a connection's error, for people. For OpenSSL's errors it names the address or flag to change."""
    text = "not a host name" if isinstance(error, UnicodeError) else str(error) or type(error).__name__
    if not isinstance(error, ssl.SSLError):
        return text
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{_JARGON.sub('', text)}{_certificate_hint(error)}"
    return next((meaning for name, meaning in _MEANINGS.items() if name in text), _JARGON.sub("", text))


def _certificate_hint(error: ssl.SSLCertVerificationError) -> str:
    code = getattr(error, "verify_code", 0)
    if code in _WRONG_NAMES:
        return "; use one of the names in the server's certificate"
    return "" if code == _EXPIRED else "; --ca names the file of the authority that signed the server's certificate"


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
    if not _GRAPHIC.fullmatch(key):
        raise TargetError(
            "the API key has a character that no header can carry; look at --key, SIE_API_KEY and the like"
        )
    files = {"--ca": ca_file, "--cert": cert_file, "--cert-key": key_file}
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        return Target(url=url, uds=os.path.normpath(path), key=key, tls=_tls_context("unix", files))
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise TargetError(f"{url!r}: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
        raise TargetError(f"{url!r} is not http://HOST:PORT, https://, grpc://, grpcs:// or unix:PATH")
    if not _GRAPHIC.fullmatch(parts.path):
        raise TargetError(f"{url!r}: write spaces and letters beyond ASCII in the path as percent codes, such as %20")
    tls = _tls_context(parts.scheme, files)
    return Target(url=url, host=parts.hostname, port=port, path=parts.path.rstrip("/"), key=key, tls=tls)


def _tls_context(scheme: str, files: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS settings of an address, or None for one without TLS, which has no files either.

    files: by flag, empty if not given. Raises TargetError.
    """
    if scheme not in {"https", "grpcs"}:
        for flag in filter(files.get, files):
            raise TargetError(
                f"{flag} is for addresses with TLS (https:// or grpcs://), and this one begins with {scheme}:"
            )
        return None
    for flag, file in files.items():
        _check_readable(flag, file)
    ca_file, cert_file, key_file = files.values()
    if key_file and not cert_file:
        raise TargetError(f"--cert-key {key_file}: --cert names the file of its certificate, and is missing")
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except ssl.SSLError as error:
        raise TargetError(f"--ca {ca_file}: the file holds no certificate in PEM form") from error
    try:
        if cert_file:
            context.load_cert_chain(cert_file, key_file or None)
    except ssl.SSLError as error:
        raise TargetError(_pair_error(error, cert_file, key_file)) from error
    if scheme == "grpcs":
        context.set_alpn_protocols(["h2"])
    return context


def _check_readable(flag: str, file: str) -> None:
    try:
        if file:
            with Path(file).open("rb"):
                pass
    except OSError as error:
        raise TargetError(f"{flag} {file}: {error.strerror}") from error


def _pair_error(error: ssl.SSLError, cert_file: str, key_file: str) -> str:
    """Return why a certificate and its key cannot be used."""
    if "KEY_VALUES_MISMATCH" in str(error):
        return f"--cert-key {key_file or cert_file}: the key is not that of the certificate in {cert_file}"
    if not key_file:
        return f"--cert {cert_file}: the file does not hold a certificate and its key; --cert-key names the file of the key"
    return f"--cert {cert_file} with --cert-key {key_file}: they do not hold a certificate and its key in PEM form"
