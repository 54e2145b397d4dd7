"""Sets options of this process's listening TCP sockets, which belong to Granian. Must never keep a descriptor."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from typing import Final

from sie.frontend.http.backlog import open_files

_AGAIN_S: Final = 0.01
_SO_ATTACH_REUSEPORT_CBPF: Final = 51
_SO_DETACH_REUSEPORT_BPF: Final = 68
"""Source of both: Linux, include/uapi/asm-generic/socket.h."""
_INSTRUCTION: Final = struct.Struct("=HBBI")
_PROGRAM: Final = struct.Struct("@HP")
_RETURN_CONSTANT: Final = 0x06
"""BPF_RET | BPF_K. Source: Linux, include/uapi/linux/filter.h, which has the two structures, too."""


async def until_accepting(host: str, port: int) -> None:
    """Wait until a listener at this address accepts. Granian opens ours a little before or after the event loop starts."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(_AGAIN_S)
        else:
            writer.close()
            return


def limit_unread_time(timeout_s: float) -> None:
    """Make the kernel reset the connections whose clients read nothing, or acknowledge nothing, for this time.

    A connection has the limit of its listener. Source: tcp(7), TCP_USER_TIMEOUT.
    """
    _set_option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))


def steer_to(position: int) -> None:
    """Make the kernel give new connections to one of the listeners that share our port, by its position among them.

    Positions have the order in which the listeners began, from 0; the last listener takes the place of one that ends.
    Without a listener at that position the kernel chooses by hash, as usual. Source: socket(7),
    SO_ATTACH_REUSEPORT_CBPF.
    """
    code = ctypes.create_string_buffer(_INSTRUCTION.pack(_RETURN_CONSTANT, 0, 0, position), _INSTRUCTION.size)
    program = _PROGRAM.pack(1, ctypes.addressof(code))
    _set_option(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)


def stop_steering() -> None:
    """Make the kernel choose among the listeners of our port by hash again."""
    _set_option(socket.SOL_SOCKET, _SO_DETACH_REUSEPORT_BPF, 0)


def _set_option(level: int, option: int, value: int | bytes) -> None:
    """Set an option of each listening socket that has it."""
    for fd in open_files():
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
        except OSError:
            continue
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.setsockopt(level, option, value)
        except OSError:  # not a TCP socket, or the kernel refuses the option
            continue
        finally:
            sock.detach()
