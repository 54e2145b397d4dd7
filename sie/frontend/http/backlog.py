"""Owns how much of a response its client has not taken yet, and the end of a connection whose client takes nothing.

Granian takes whatever it is given and keeps it, so its answer says nothing; the kernel knows what was acknowledged.
The connection's socket is one of this process's own descriptors, found by the client's address: that works in every
sandbox, where netlink may be forbidden. Over a Unix socket no address tells connections apart, and nothing is measured.
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
    """What one client was sent and has not acknowledged.

    The kernel is asked only once half of the limit may be on its way, as less can never be too much. What was acknowledged
    before is not known then, so a client that never caught up until there is cut between half of the limit and all of it.
    """

    def __init__(self, client: str, limit_bytes: int) -> None:
        """Client is the address as Granian tells it, `host:port`."""
        self._client = _parse(client)
        self._limit_bytes = limit_bytes
        self._ask_at = limit_bytes // 2
        self._unacked = 0
        self._acked_before: int | None = None
        self._fd = -1

    def add(self, nbytes: int) -> bool:
        """Note that so much was handed over; return whether the backlog is over the limit now."""
        self._unacked += nbytes
        if self._unacked < self._ask_at or self._client is None:
            return False
        taken = self._ask()
        if taken is None:
            self._client = None
            return False
        if not taken.queued:
            self._unacked = 0
        elif self._acked_before is not None:
            self._unacked -= min(self._unacked, taken.acked - self._acked_before)
        self._acked_before = taken.acked
        self._ask_at = max(self._limit_bytes // 2, (self._unacked + self._limit_bytes) // 2)
        return self._unacked > self._limit_bytes

    def cut(self) -> None:
        """End the connection at once: what waits for its client is dropped."""
        if self._client is not None:
            _use(self._fd, self._client, lambda sock: sock.shutdown(socket.SHUT_RDWR))

    def _ask(self) -> _Taken | None:
        assert self._client is not None
        if self._fd < 0:
            self._fd = _find(self._client)
        return _use(self._fd, self._client, _measure)


class _Taken(NamedTuple):
    acked: int
    """Bytes of the whole connection."""
    queued: int
    """Bytes that the kernel has and that are not acknowledged."""


def _measure(sock: socket.socket) -> _Taken:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    queued: int = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]
    return _Taken(_BYTES_ACKED.unpack(info)[0], queued)


def _parse(client: str) -> _Address | None:
    """Return the address, or None for what is none, as of a Unix socket."""
    host, _, port = client.rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """Return an IP address in its shortest form, of an IPv4 one in IPv6 the former."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _find(client: _Address) -> int:
    """Return this process's descriptor of the connection to a client, -1 when there is none."""
    fds = (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    return next((fd for fd in fds if _use(fd, client, lambda _sock: True)), -1)


def _use(fd: int, client: _Address, work: Callable[[socket.socket], _T]) -> _T | None:
    """Do work on the socket of a descriptor that stays its owner's; None when it is not, or not any more, the client's.

    Never on a copy of the descriptor: that would keep a connection open which its owner closes meanwhile.
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
