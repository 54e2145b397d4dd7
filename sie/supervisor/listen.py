"""Prepares listening at the start: resolves the address, binds the Unix socket, checks TLS files and exposure.

Frontends open their own TCP listeners. A Unix socket is bound here once and passed to them, because a path has one
owner. Every fault is a StartError that names the setting.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sie.config.sections import Access, Server
from sie.supervisor.host_resources import StartError, reserve_port


def resolve_host(host: str, setting: str = "host") -> str:
    """Return the IP address of `host`, the first IPv4 one if it has several."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise StartError(f"{setting}: {host!r} is neither an address nor a name of this host: {reason}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def exposure_warnings(address: str, access: Access) -> list[str]:
    """Return the warnings about an address that other hosts can reach."""
    if access.uds or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return []
    warnings: list[str] = []
    if not access.api_keys and not access.tls_client_ca:
        warnings.append(
            f"host {address} is not loopback and there are no api_keys: anyone who can reach this port can use this server"
        )
    if not access.tls_cert:
        secrets = "API keys and " if access.api_keys else ""
        warnings.append(
            f"host {address} is not loopback and there is no tls_cert: {secrets}texts cross the network unencrypted"
        )
    return warnings


def check_tls(access: Access) -> None:
    """Raise StartError for certificate files that cannot be served with."""
    if not access.tls_cert:
        return
    names = [name for name in ("tls_cert", "tls_key", "tls_client_ca") if getattr(access, name)]
    for name in names:
        read_tls_file(name, getattr(access, name))
    check_certificates(access, {name: getattr(access, name) for name in names})


def check_certificates(access: Access, paths: dict[str, str]) -> None:
    """Raise StartError for certificates that cannot be served with.

    paths are the files to read, keyed by setting. They may be copies, so the error names the files of the settings.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(paths["tls_cert"], paths["tls_key"], password=_refuse_password)
    except (ssl.SSLError, ValueError) as error:
        raise StartError(
            f"tls_cert, tls_key: {access.tls_cert} and {access.tls_key} are not a certificate and its key in PEM: {error}"
        ) from error
    try:
        if access.tls_client_ca:
            context.load_verify_locations(paths["tls_client_ca"])
    except ssl.SSLError as error:
        raise StartError(f"tls_client_ca: {access.tls_client_ca} holds no certificate in PEM: {error}") from error


class Listener(NamedTuple):
    """The server's listening address: host and port, or a Unix socket. The socket `held` reserves it until `close`."""

    address: str
    port: int
    url: str
    held: socket.socket | UnixListener

    @property
    def fd(self) -> int:
        """The listening socket that frontends share, or -1 if each opens its own."""
        return self.held.fd if isinstance(self.held, UnixListener) else -1

    def stop_listening(self) -> None:
        """Close a Unix socket: new clients would wait in its queue for ever. Does nothing for TCP."""
        if isinstance(self.held, UnixListener):
            self.held.close()

    def close(self) -> None:
        """Release the address."""
        self.held.close()


def open_listener(server: Server, access: Access) -> Listener:
    """Reserve the listening address of these settings. Raises StartError if it is taken."""
    if access.uds:
        listener = UnixListener(access.uds, int(access.uds_mode, 8), server.backlog)
        return Listener("", 0, f"unix:{access.uds}", listener)
    address = resolve_host(server.host)
    held = reserve_port(address, server.port, Path(server.runtime_dir))
    port: int = held.getsockname()[1]
    scheme = "https" if access.tls_cert else "http"
    return Listener(address, port, f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}", held)


def open_grpc_listener(server: Server, access: Access) -> Listener | None:
    """Reserve the gRPC listening address, or return None without one. Raises StartError if it is taken."""
    if not server.grpc_port:
        return None
    address = resolve_host(server.grpc_host or server.host, "grpc_host")
    held = reserve_port(address, server.grpc_port, setting="grpc_host/grpc_port")
    scheme = "grpcs" if access.tls_cert else "grpc"
    shown = f"[{address}]" if ":" in address else address
    return Listener(address, server.grpc_port, f"{scheme}://{shown}:{server.grpc_port}", held)


class UnixListener:
    """A listening Unix socket, and the removal of its path."""

    def __init__(self, path: str, mode: int, backlog: int) -> None:
        """Bind and listen. Raises StartError if another server listens or another file is at the path."""
        self._path = Path(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _locked(self._path.parent):
                self._remove_stale()
                self._bind(mode, backlog)
        except OSError as error:
            self._sock.close()
            raise StartError(f"uds: cannot listen on {path}: {error.strerror or error}") from error
        except StartError:
            self._sock.close()
            raise

    @property
    def fd(self) -> int:
        """The listening socket, for children to inherit."""
        return self._sock.fileno()

    def close(self) -> None:
        """Stop listening, and remove the path if it is still ours."""
        if self._sock.fileno() < 0:
            return
        self._sock.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind(self, mode: int, backlog: int) -> None:
        umask = os.umask(0o777)  # no client connects before the mode is set
        try:
            self._sock.bind(str(self._path))
        finally:
            os.umask(umask)
        self._inode = self._path.stat().st_ino
        self._path.chmod(mode)
        self._sock.listen(backlog)

    def _remove_stale(self) -> None:
        """Remove the socket of a killed server; refuse to touch any other file."""
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise StartError(f"uds: {self._path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            result = probe.connect_ex(str(self._path))
        if result not in (errno.ECONNREFUSED, errno.ENOENT):
            raise StartError(f"uds: another server listens on {self._path}")
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock a directory so that other servers neither check nor create sockets in it meanwhile."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_tls_file(name: str, path: str) -> bytes:
    """Return the content of a file that a setting names. Raises StartError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"{name}: {path} cannot be read: {error.strerror}") from error


def _refuse_password() -> str:
    raise ValueError("the key is encrypted, and a server cannot ask for its password")
