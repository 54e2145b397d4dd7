"""Starts a follower: it loads its part of a model in step with the leader, and then runs each step that it is told.

It has no ring, no queue and no state of requests. Whatever fails ends it, and with it the group.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from sie import native
from sie.ipc.exit_statuses import DEVICE_LOST_STATUS
from sie.runtime import child_setup
from sie.runtime.logs import configure, get_logger
from sie.values.errors import Internal, SieError, not_loaded, to_wire
from sie.workers.device.faults import DeviceLostError, is_device_lost, is_out_of_memory, set_device
from sie.workers.loading import light_imports
from sie.workers.members.messages import Embed, FollowerLaunch, Loaded, Start, Step, encode, receive

if TYPE_CHECKING:
    from sie.workers.generation.runner import TextGenerator

_log = get_logger(__name__)


def main() -> int:
    """Run one follower; the launch record is the only argument."""
    launch = msgspec.json.decode(sys.argv[1], type=FollowerLaunch)
    child_setup.die_with_parent(launch.leader_pid)
    child_setup.dump_stacks_on_abort()
    child_setup.die_before_siblings()
    child_setup.pin_to(launch.cores)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its leader
    configure(launch.log_format, launch.log_level, launch.name)  # type: ignore[arg-type]
    set_device(launch.device)
    sock = socket.socket(fileno=launch.socket_fd)
    start = receive(sock)
    if not isinstance(start, Start):
        return 1
    native.allow(allowed=start.native_kernels)
    try:
        runner = _load(launch, start)
    except Exception as error:
        _log.exception("loading %s failed", start.card.id)
        sock.sendall(encode(Loaded(to_wire(_load_error(start, error)))))
        return DEVICE_LOST_STATUS if is_device_lost(error) else 1
    sock.sendall(encode(Loaded()))
    try:
        return _follow(sock, runner)
    except DeviceLostError as error:
        _log.critical("the device is lost to this process: %s", error)
    except Exception as error:
        _log.exception("a step of %s failed", start.card.id)
        return DEVICE_LOST_STATUS if is_device_lost(error) else 1
    return DEVICE_LOST_STATUS


def _load(launch: FollowerLaunch, start: Start) -> TextGenerator:
    light_imports.prepare()
    from sie.workers.device.device import resolve_device
    from sie.workers.loading.loader import load_generator  # imports torch
    from sie.workers.sharded.group import Group

    group = Group(launch.rank, launch.size, resolve_device(launch.device), launch.store_fd, start.timeout_s)
    return load_generator(
        start.card, launch.device, start.dtype, start.generation, _ignore,
        room=start.room, group=group,
    )  # fmt: skip


def _ignore(_fraction: float, _text: str) -> None:
    pass


def _load_error(start: Start, error: Exception) -> SieError:
    if isinstance(error, SieError):
        return error
    kind = "OOM" if is_out_of_memory(error) else "UNKNOWN"
    reason = f"{type(error).__name__} in a follower; the server's log has the details"
    return Internal(not_loaded(start.card.id, reason), extras={"error_class": kind})


def _follow(sock: socket.socket, runner: TextGenerator) -> int:
    """Run each step; return the exit status once the leader has closed its end."""
    while (message := receive(sock)) is not None:
        match message:
            case Step():
                runner.run_logits(message.slots(), message.copies)
            case Embed():
                runner.run_tokens(message.token_ids())
            case _:
                return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # a library may be in a collective operation that never ends
