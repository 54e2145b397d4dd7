"""Starts a frontend slot: its own Granian server with one child process, which only our supervisor restarts."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from granian.constants import HTTPModes, Interfaces, Loops
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.net import SocketHolder  # pyright: ignore[reportPrivateImportUsage]  # granian's own way to name it
from granian.server import mp
from granian.server.mp import MPServer

from sie.frontend.app import App
from sie.frontend.connect import connect
from sie.frontend.process import MakeRemote
from sie.ipc.messages import Launch
from sie.runtime import child_setup
from sie.runtime.logs import LOG_CONFIG, configure

_HEADER_TIMEOUT_MS = 30_000
_MIN_BACKPRESSURE = 65_536
"""Granian's limit counts all connections, also idle ones. Our admission must act before it does."""


class _Server(MPServer):
    """A Granian server that can serve an inherited listening Unix socket.

    Granian itself can only bind a path, which has one owner, but all frontends share ours. So the method that binds is
    replaced here (granian 2.8, `MPServer._init_shared_socket`).
    """

    listen_fd = -1

    def build_ssl_context(  # noqa: PLR0917  # granian's own signature
        self,
        cert: Path | None,
        key: Path | None,
        password: str | None,
        proto: Any,
        ca: Path | None,
        crl: list[Path],
        client_verify: bool,
    ) -> None:
        """Pass the names of the files unresolved: the names of inherited in-memory files cannot be resolved.

        Granian's own method also checks the files, which the supervisor has done (granian 2.8, `build_ssl_context`).
        """
        files = [str(path) if path is not None else None for path in (cert, key, ca)]
        self.ssl_ctx = (cert is not None, files[0], files[1], password, str(proto), files[2], crl, client_verify)

    def _init_shared_socket(self) -> None:
        if self.listen_fd < 0:
            super()._init_shared_socket()
            return
        self._ssp = None
        self._sfd = self.listen_fd
        self._shd = SocketHolder(self.listen_fd, True, self.backlog)  # pyright: ignore[reportCallIssue]  # its stub lacks it
        self._sso = socket.socket(fileno=self.listen_fd)
        self._sso.set_inheritable(True)


def load_app(launch: Launch, make_remote: MakeRemote | None = None) -> Callable[..., Any]:
    """Return the app; Granian calls this in the child. make_remote: see `FrontendProcess`."""
    configure(launch.log_format, launch.log_level, f"frontend-{launch.slot}")  # type: ignore[arg-type]
    app = App(connect(launch, make_remote))
    mp._new_cbscheduler = app.scheduler  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]  # called once, behind `__rsgi_init__`
    # Granian looks for `__rsgi__` and its hooks before it would call the object.
    return cast("Callable[..., Any]", app)


def main() -> int:
    """Run one frontend slot; the launch record is the only argument."""
    return run_slot()


def run_slot(make_remote: MakeRemote | None = None) -> int:
    """Run one frontend slot, whose operations run elsewhere if make_remote says so."""
    child_setup.exclude_imports_from_collections()
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    child_setup.die_with_parent(launch.supervisor_pid)
    configure(launch.log_format, launch.log_level, f"frontend-{launch.slot}")  # type: ignore[arg-type]
    server = _Server(
        "sie.frontend.app",
        address=launch.host,
        port=launch.port,
        interface=Interfaces.RSGI,
        workers=1,
        loop=Loops.uvloop,
        http=HTTPModes.http1,
        websockets=True,
        backlog=launch.backlog,
        # Connections over it wait in the kernel. Without a free descriptor Granian would retry without pause.
        backpressure=child_setup.max_connections(max(_MIN_BACKPRESSURE, launch.backlog)),
        http1_settings=HTTP1Settings(header_read_timeout=_HEADER_TIMEOUT_MS),
        log_level=LogLevels.warning,
        log_dictconfig=LOG_CONFIG,
        respawn_failed_workers=False,
        ssl_cert=_path(launch.tls_cert),
        ssl_key=_path(launch.tls_key),
        ssl_ca=_path(launch.tls_client_ca),
        ssl_client_verify=bool(launch.tls_client_ca),
    )
    server.listen_fd = launch.listen_fd
    server.serve(target_loader=functools.partial(load_app, launch, make_remote), wrap_loader=False)
    return 0


def _path(text: str) -> Path | None:
    return Path(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
