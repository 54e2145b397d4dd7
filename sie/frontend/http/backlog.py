"""Measures the unacknowledged bytes of a response, and cuts slow connections. Must never copy a socket's descriptor.

Granian buffers everything it is given, so its return value says nothing. Only the kernel knows the acknowledged bytes.
The socket is one of this process's own descriptors, found by the client's address. That works in every sandbox, even
where netlink is forbidden. Connections over a Unix socket have no distinct addresses, so they are not measured.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import stat
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

_TCP_INFO_BYTES: Final = 128
_BYTES_ACKED: Final = struct.Struct("=120xQ")
"""`tcpi_bytes_acked`. Source: Linux, include/uapi/linux/tcp.h, struct tcp_info."""
_Address = tuple[str, int]
_T = TypeVar("_T")


class Backlog:
    """The bytes that were sent to one client and that it has not acknowledged.

    The kernel is first queried when half of the limit may be unacknowledged; a smaller backlog needs no query. That first
    query does not tell how many bytes were acknowledged before it. So a client that never caught up until then is cut
    somewhere between half of the limit and the whole limit.
    """

    def __init__(self, client: str, limit_bytes: int) -> None:
        """Measure the connection of a client. client is Granian's form of its address, `host:port`."""
        self._client = _parse(client)
        self._limit_bytes = limit_bytes
        self._query_at = limit_bytes // 2
        self._unacked = 0
        self._acked_before: int | None = None
        self._fd = -1

    def add(self, nbytes: int) -> bool:
        """Record that nbytes more were handed to Granian. Return whether the backlog is over the limit now."""
        self._unacked += nbytes
        if self._unacked < self._query_at or self._client is None:
            return False
        taken = self._query()
        if taken is None:
            self._client = None
            return False
        if not taken.queued:
            self._unacked = 0
        elif self._acked_before is not None:
            self._unacked -= min(self._unacked, taken.acked - self._acked_before)
        self._acked_before = taken.acked
        self._query_at = max(self._limit_bytes // 2, (self._unacked + self._limit_bytes) // 2)
        return self._unacked > self._limit_bytes

    def cut(self) -> None:
        """Shut the connection down at once, and drop the bytes that are still queued."""
        if self._client is not None:
            _use(self._fd, self._client, lambda sock: sock.shutdown(socket.SHUT_RDWR))

    def _query(self) -> _TcpState | None:
        assert self._client is not None
        if self._fd < 0:
            self._fd = _find(self._client)
        return _use(self._fd, self._client, _measure)


class _TcpState(NamedTuple):
    acked: int
    """Bytes acknowledged since the connection was opened."""
    queued: int
    """Unacknowledged bytes that the kernel holds."""


def _measure(sock: socket.socket) -> _TcpState:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    queued: int = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]
    return _TcpState(_BYTES_ACKED.unpack(info)[0], queued)


def _parse(client: str) -> _Address | None:
    """Return the address, or None if the text is not one, as for a Unix socket."""
    host, _, port = client.rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """Return an IP address in its shortest form. An IPv4-mapped IPv6 address becomes IPv4."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _find(client: _Address) -> int:
    """Return this process's descriptor of the connection to a client, or -1."""
    fds = (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    return next((fd for fd in fds if _use(fd, client, lambda _sock: True)), -1)


def _use(fd: int, client: _Address, work: Callable[[socket.socket], _T]) -> _T | None:
    """Run work on the socket behind fd, or return None if fd is not, or is no longer, the client's connection.

    The descriptor stays with its owner. It is never copied: a copy would keep a connection open after its owner closes it.
    """
    try:
        if fd < 0 or not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
    except OSError:
        return None
    try:
        peer = cast("tuple[str, int] | str | bytes", sock.getpeername())
        is_clients = isinstance(peer, tuple) and peer[1] == client[1] and _plain(peer[0]) == client[0]
        return work(sock) if is_clients else None
    except (OSError, ValueError, struct.error):
        return None
    finally:
        sock.detach()
