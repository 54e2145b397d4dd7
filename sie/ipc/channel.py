"""Carries `sie.ipc.messages` between the supervisor and its children over a socket.

Each child has one SOCK_SEQPACKET connection. A datagram is one message with its file descriptors (SCM_RIGHTS). A child
connects to the supervisor's 0600 socket and sends `Hello` first. End of file means that the other side is gone.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from typing import Any

import msgspec

from sie.ipc.messages import Hello, Launch, Message, Spilled

MAX_INLINE_BYTES = 64 << 10
"""A longer message goes through a memfd, because the host's net.core.wmem_max limits the socket."""
MAX_MESSAGE_BYTES = 64 << 20
"""The limit of any message; a model card takes about a KiB."""
MAX_FDS = 250
"""The kernel passes at most 253 descriptors in one message."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ChannelClosedError(ConnectionError):
    """The other side is gone or sent an invalid message."""


class Channel:
    """One end of a control connection. `try_receive` never waits; `send` waits at most send_timeout_s."""

    def __init__(self, sock: socket.socket, send_timeout_s: float = 5.0) -> None:
        self._sock = sock
        self._send_timeout_s = send_timeout_s
        sock.setblocking(False)  # with a timeout, Python would wait despite MSG_DONTWAIT

    def fileno(self) -> int:
        """Return the socket's descriptor, for an event loop."""
        return self._sock.fileno()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send one message with copies of fds. Raises ChannelClosedError if the peer is gone or does not read."""
        data = _encoder.encode(message)
        if len(data) > MAX_INLINE_BYTES:
            self._spill(data, fds or [])
        else:
            self._send(data, fds or [])

    def _spill(self, data: bytes, fds: list[int]) -> None:
        spill_fd = os.memfd_create("control", os.MFD_CLOEXEC)
        try:
            os.pwrite(spill_fd, data, 0)  # a memfd takes all bytes or raises
            self._send(_encoder.encode(Spilled(len(data))), [*fds, spill_fd])
        finally:
            os.close(spill_fd)

    def _send(self, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._send_with_patience(data, rights)
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def _send_with_patience(self, data: bytes, rights: list[Any]) -> None:
        if not self._wait(select.POLLOUT, self._send_timeout_s):
            raise ChannelClosedError(f"the peer read nothing for {self._send_timeout_s:g} s")
        try:
            self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def try_receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors (now owned by the caller), or None if there is no message.

        Raises ChannelClosedError at end of file.
        """
        space = socket.CMSG_SPACE(MAX_FDS * 4)
        try:
            data, rights, flags, _ = self._sock.recvmsg(MAX_INLINE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        fds = _fds_of(rights)
        try:
            if not data:
                raise ChannelClosedError("end of file")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelClosedError("a control message was cut")
            message = _decoder.decode(data)
            if isinstance(message, Spilled):
                message = _decoder.decode(_read_spilled(message, fds.pop() if fds else -1))
            return message, fds
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ChannelClosedError) as error:
            for fd in fds:
                os.close(fd)
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float) -> tuple[Message, list[int]]:
        """Wait for one message. Raises ChannelClosedError at end of file and TimeoutError without a message."""
        received = self.try_receive()
        if received is None and self._wait(select.POLLIN, timeout_s):
            received = self.try_receive()
        if received is None:
            raise TimeoutError(f"no control message within {timeout_s} s")
        return received

    def _wait(self, event: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the socket; the peer then reads end of file."""
        self._sock.close()


def connect(launch: Launch) -> Channel:
    """Connect a child to its supervisor and send `Hello`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(launch.control_path)
    channel = Channel(sock)
    channel.send(Hello(launch.role, launch.slot, launch.incarnation))
    return channel


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel recorded them at connect."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _read_spilled(message: Spilled, fd: int) -> bytes:
    """Return the content of a spilled message's memfd. Takes ownership of fd."""
    if fd < 0:
        raise ChannelClosedError("a spilled message without its memory")
    try:
        if not 0 <= message.nbytes <= MAX_MESSAGE_BYTES:
            raise ChannelClosedError(f"a spilled message of {message.nbytes} bytes")
        return os.pread(fd, message.nbytes, 0)
    finally:
        os.close(fd)


def _fds_of(rights: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
