"""Sends and receives the messages of two attached processes on their socket, with their file descriptors.

Every message is one SOCK_SEQPACKET packet with a fixed number of descriptors. Nothing here waits.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import msgspec

from sie.shm.layout import ProtocolError

_MESSAGE_BYTES: Final = 1024
_MAX_FDS: Final = 4


class Offer(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """This side's memory and ring. It carries four fds: segment, ring, bell, credit."""

    layout_version: int
    generation: int
    segment_bytes: int
    ring_capacity: int


class Announce(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A large segment that the next descriptors may use. It carries the segment's fd."""

    number: int
    nbytes: int


class Retire(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A large segment that descriptors no longer use."""

    number: int


Message = Offer | Announce | Retire
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
_FD_COUNTS: Final[dict[type, int]] = {Offer: 4, Announce: 1, Retire: 0}


def send(sock: socket.socket, message: Message, fds: list[int]) -> bool:
    """Send one message; False when the socket is full."""
    try:
        socket.send_fds(sock, [_encode(message)], fds, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    return True


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its fds, or None when none is waiting.

    Raises ConnectionError at end of file, ProtocolError on an incomplete message or a wrong number of fds.
    """
    try:
        data, fds, flags, _ = socket.recv_fds(sock, _MESSAGE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    if not data:
        close_all(fds)
        raise ConnectionError("the peer closed the attachment")
    try:
        message: Message = _decode(data)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != _FD_COUNTS[type(message)]:
            raise ProtocolError(f"{type(message).__name__} with {len(fds)} descriptors")
    except (msgspec.MsgspecError, ValueError) as error:
        close_all(fds)
        raise ProtocolError(f"a message that cannot be decoded: {type(error).__name__}") from error
    except ProtocolError:
        close_all(fds)
        raise
    return message, fds


def close_all(fds: list[int]) -> None:
    """Close the descriptors of a rejected message."""
    for fd in fds:
        os.close(fd)
