"""Measures the unacknowledged bytes of a response, and cuts slow connections. Must never keep a copy of a descriptor.

Granian buffers everything it is given, so its return value says nothing. Only the kernel knows the acknowledged bytes.
The socket is one of this process's own descriptors, found by the client's address. That works in every sandbox, even
where netlink is forbidden. Connections over a Unix socket have no distinct addresses: see `unix_backlog`.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import stat
import struct
import termios
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar, cast

_TCP_INFO_BYTES: Final = 128
_BYTES_ACKED: Final = struct.Struct("=120xQ")
"""`tcpi_bytes_acked`. Source: Linux, include/uapi/linux/tcp.h, struct tcp_info."""
_EMPTY_NS: Final = 50_000_000
"""Granian fills the free space of the kernel's queue within this time."""
_NEARLY_BYTES: Final = 64 * 1024
"""A client may have read this little: it may delay an acknowledgement for 40 ms, and send its next request before that."""
_QUEUE_BYTES: Final = 4 << 20
"""The kernel's queues of a connection may take an answer up to this size at once."""
_SMALL_PART: Final = 8
_SMALL_BYTES: Final = 64 * 1024
"""A part is large if it is over this and over an eighth of the limit. The events of a few tokens never are."""
_MAX_FILES: Final = 1 << 16
_Address = tuple[str, int]
_T = TypeVar("_T")


class Backlog:
    """The bytes that were sent to one client and that it has not acknowledged.

    The kernel is first queried when half of the limit may be unacknowledged; a smaller backlog needs no query. That
    first query does not tell how many bytes were acknowledged before it. So a client that has not caught up by then is
    cut at a backlog between half of the limit and the limit.

    The limit is for what gathers while the client does not read. A large part, such as a prompt that is repeated, comes
    at once however fast the client reads. So it raises the limit until it is read.
    """

    def __init__(self, client: str, limit_bytes: int, sockets: Sockets | None = None) -> None:
        """Measure the connection of a client. client is Granian's form of its address, `host:port`.

        sockets finds the connection; without it, each backlog looks for its own.
        """
        self._client = _parse(client)
        self._sockets = sockets if sockets is not None else Sockets()
        self._limit_bytes = limit_bytes
        self._large_bytes = max(_SMALL_BYTES, limit_bytes // _SMALL_PART)
        self._allowed = 0
        """The bytes of large parts that may be unread beside the limit."""
        self._query_at = limit_bytes // 2
        self._unacked = 0
        self._acked_before: int | None = None
        self._empty_ns = 0
        self._queued = 0
        self._added_ns = 0
        self._was_full = False
        self._fd = -1

    def add(self, nbytes: int) -> bool:
        """Record that nbytes more were handed to Granian. Return whether the backlog is over the limit now."""
        self._unacked += nbytes
        self._added_ns = time.monotonic_ns()
        if nbytes > self._large_bytes:
            self._allowed += nbytes
        if self._unacked < self._query_at or self._client is None:
            return False
        return self.measure() > self._limit_bytes + self._allowed

    @property
    def num_bytes(self) -> int:
        """The backlog at the last query, plus the bytes added since; 0 for a connection that cannot be measured."""
        return self._unacked if self._client is not None else 0

    def measure(self) -> int:
        """Query the kernel, and return the backlog."""
        if self._client is None:
            return 0
        taken = self._query()
        if taken is None:
            self._client = None
            return 0
        if not self._check_empty(taken) and self._acked_before is not None:
            self._unacked -= min(self._unacked, taken.acked - self._acked_before)
        self._acked_before = taken.acked
        self._allowed = min(self._allowed, self._unacked)
        limit = self._limit_bytes + self._allowed
        self._query_at = max(limit // 2, (self._unacked + limit) // 2)
        return self._unacked

    @property
    def is_moving(self) -> bool:
        """Whether the kernel's queue was empty at the last query: the client had read everything in it."""
        return self._empty_ns > 0

    @property
    def is_nearly_read(self) -> bool:
        """Whether the queue is so small that the client may have read it and not yet acknowledged it.

        That of a large answer is also small before Granian begins to fill it.
        """
        has_begun = self._was_full or self._unacked <= _QUEUE_BYTES
        return self._queued < _NEARLY_BYTES and (has_begun or time.monotonic_ns() - self._added_ns > _EMPTY_NS)

    def _check_empty(self, taken: TcpState) -> bool:
        """Return whether the client read everything: the queue is empty, and Granian adds nothing to it."""
        self._queued = taken.queued
        self._was_full = self._was_full or taken.queued >= _NEARLY_BYTES
        if taken.queued:
            self._empty_ns = 0
            return False
        now_ns = time.monotonic_ns()
        self._empty_ns = self._empty_ns or now_ns
        if now_ns - self._empty_ns >= _EMPTY_NS:
            self._unacked = 0
        return self._unacked == 0

    def cut(self) -> None:
        """Shut the connection down at once, and drop the bytes that are still queued."""
        if self._client is not None:
            _shut_down(self._fd if self._fd >= 0 else self._sockets.find(self._client), self._client)

    def _query(self) -> TcpState | None:
        assert self._client is not None
        if self._fd < 0:
            self._fd = self._sockets.find(self._client)
        return _use(self._fd, self._client, _measure)


class Sockets:
    """The TCP connections of this process by their clients. One scan of all descriptors finds them all.

    Querying the peers of thousands of sockets takes long. So a descriptor is queried once for each inode.
    """

    def __init__(self) -> None:
        self._fds: dict[_Address, int] = {}
        self._peers: dict[int, tuple[int, _Address | None]] = {}
        self._is_fresh = False

    def expire(self) -> None:
        """Make the next unknown client cause a new scan of the descriptors."""
        self._is_fresh = False

    def find(self, client: _Address) -> int:
        """Return this process's descriptor of the connection to a client, or -1."""
        fd = _use(self._fds.get(client, -1), client, socket.SocketType.fileno)
        if fd is None and not self._is_fresh:
            self._is_fresh = True
            self._look()
            fd = self._fds.get(client)
        return fd if fd is not None else -1

    def _look(self) -> None:
        """Scan the descriptors for connections and their clients."""
        before, self._peers = self._peers, {}
        for fd in open_files():
            try:
                inode = os.fstat(fd).st_ino
            except OSError:  # closed meanwhile
                continue
            known = before.get(fd)
            self._peers[fd] = known if known is not None and known[0] == inode else (inode, _peer(fd))
        self._fds = {peer: fd for fd, (_, peer) in self._peers.items() if peer is not None}


class TcpState(NamedTuple):
    """The progress of a connection's peer."""

    acked: int
    """Bytes acknowledged since the connection was opened."""
    queued: int
    """Unacknowledged bytes that the kernel holds."""


def measure(fd: int) -> TcpState | None:
    """Return the state of the connection behind a descriptor, also of one over a Unix socket, or None without one."""
    return with_socket(fd, _measure)


def _measure(sock: socket.SocketType) -> TcpState:
    queued: int = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return TcpState(0, queued)
    return TcpState(_BYTES_ACKED.unpack(info)[0], queued)


def _parse(client: str) -> _Address | None:
    """Return the address, or None if the text is not one, as for a Unix socket."""
    host, _, port = client.rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def has_address(client: str) -> bool:
    """Whether Granian's name of a client is an address, and not a Unix socket's."""
    return _parse(client) is not None


@lru_cache(1024)
def _plain(host: str) -> str:
    """Return an IP address in its shortest form. An IPv4-mapped IPv6 address becomes IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])  # a scope is a number or a name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def open_files() -> Iterable[int]:
    """Return the open descriptors, or all possible ones if no descriptor is free to list them."""
    try:
        return map(int, os.listdir("/proc/self/fd"))  # noqa: PTH208  # there may be thousands
    except OSError:
        return range(_MAX_FILES)


def _peer(fd: int) -> _Address | None:
    """Return the address of the client at the other end of a descriptor, or None without one."""
    return with_socket(fd, _address)


def _address(sock: socket.SocketType) -> _Address | None:
    peer = cast("tuple[str, int] | str | bytes", sock.getpeername())
    return (_plain(peer[0]), peer[1]) if isinstance(peer, tuple) else None


def _use(fd: int, client: _Address, work: Callable[[socket.SocketType], _T]) -> _T | None:
    """Run work on the socket behind fd, or return None if fd is not, or is no longer, the client's connection.

    The descriptor belongs to its owner, whose threads may close it at any time. Then a read may be from another
    connection, and work must change nothing.
    """
    return with_socket(fd, lambda sock: work(sock) if _address(sock) == client else None)


def _shut_down(fd: int, client: _Address) -> None:
    """Shut down a client's connection, and never the next one with the same descriptor.

    A copy of the descriptor keeps the connection while it is checked and shut down. It is closed at once, because the
    owner cannot end the connection before that.
    """
    try:
        copy = os.dup(fd)
    except OSError:  # closed meanwhile
        return
    try:
        _use(copy, client, lambda sock: sock.shutdown(socket.SHUT_RDWR))
    finally:
        os.close(copy)


def with_socket(fd: int, work: Callable[[socket.SocketType], _T | None]) -> _T | None:
    """Run work on the socket behind fd, or return None if fd is not a socket, or work failed."""
    try:
        if fd < 0 or not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        # Not Python's wrapper class. This family has the longest addresses, and Python cuts addresses to its length.
        sock = socket.SocketType(socket.AF_INET6, socket.SOCK_STREAM, 0, fd)
    except OSError:
        return None
    try:
        return work(sock)
    except (OSError, ValueError, struct.error):
        return None
    finally:
        sock.detach()
