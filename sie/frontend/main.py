"""Starts a frontend slot: a Granian server of its own, with one child process, which our supervisor alone restarts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import msgspec
from granian.constants import HTTPModes, Interfaces, Loops
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server import Server

from sie import process
from sie.control_messages import Launch
from sie.frontend.app import App
from sie.frontend.process import connect
from sie.logs import LOG_CONFIG, configure

_HEADER_TIMEOUT_MS = 30_000
_MIN_BACKPRESSURE = 65_536
"""Granian's own bound counts connections, idle ones too; admission is ours, so it must not be the first to act."""


def load_app(launch: Launch) -> Callable[..., Any]:
    """Return the app; Granian calls this in the child."""
    configure(launch.log_format, launch.log_level, f"frontend-{launch.slot}")  # type: ignore[arg-type]
    # Granian looks for `__rsgi__` and its kin before it thinks of calling what it is given.
    return cast("Callable[..., Any]", App(connect(launch)))


def main() -> int:
    """Run one frontend slot; the launch record is the only argument."""
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    process.die_with_parent(launch.supervisor_pid)
    configure(launch.log_format, launch.log_level, f"frontend-{launch.slot}")  # type: ignore[arg-type]
    server = Server(
        "sie.frontend.app",
        address=launch.host,
        port=launch.port,
        interface=Interfaces.RSGI,
        workers=1,
        loop=Loops.uvloop,
        http=HTTPModes.http1,
        websockets=True,
        backlog=launch.backlog,
        backpressure=max(_MIN_BACKPRESSURE, launch.backlog),
        http1_settings=HTTP1Settings(header_read_timeout=_HEADER_TIMEOUT_MS),
        log_level=LogLevels.warning,
        log_dictconfig=LOG_CONFIG,
        respawn_failed_workers=False,
    )
    server.serve(target_loader=functools.partial(load_app, launch), wrap_loader=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
