"""The commands `sie ps` and `sie stop`: look at a running server, unload a model of it, or stop it.

Their imports happen when they run, because every other `sie` command imports this file too.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from sie.commands.target_options import named_target, target_options, url_option
from sie.commands.terminal import HARMLESS, fail

if TYPE_CHECKING:
    from sie.commands.server_status import Frame
    from sie.loadgen.target import Target

_COLUMNS = ("MODEL", "STATE", "DEVICE", "MEMORY", "QUEUE", "OUTPUTS")
_AFTER_DRAIN_S = 15.0
"""A server may take this long to end after drain_timeout_s."""


@click.command()
@url_option("http[s]://HOST:PORT[/PATH] or unix:PATH.")
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print the server's whole status frame as JSON.")
def ps(*, url: str, as_json: bool, **access: str) -> int:
    """Show a running server and its models.

    Exit status 1: no server answers, or it is not ready.
    """
    from sie.commands.http_client import ServerError
    from sie.loadgen.target import TargetError

    try:
        frame, data = _ask_frame(named_target(url, **access))
    except (TargetError, ServerError, ValueError) as error:
        return fail(str(error))
    click.echo(data.decode() if as_json else _render(frame, url))
    return int(not frame.ready)


def _ask_frame(target: Target) -> tuple[Frame, bytes]:
    """Return a server's status and its JSON. Raises TargetError, ServerError or ValueError."""
    from sie.commands.http_client import ServerError, frames
    from sie.commands.server_status import read_frame

    with closing(frames(target)) as feed:
        data = next(feed, b"")
    if not data:
        raise ServerError(f"{target.url} ended the feed at once")
    return read_frame(data), data


def _render(frame: Frame, url: str) -> str:
    from sie.commands.server_status import model_cells, problems, shown_uptime

    ready = "ready" if frame.ready else "not ready"
    about = f"sie {frame.server.version} at {url}: {ready}, up {shown_uptime(frame.server.uptime_seconds)}, pid {frame.server.pid}"
    table = [list(_COLUMNS), *(model_cells(frame, model) for model in frame.models)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([about, *problems(frame), "", *rows]).translate(HARMLESS)


@click.command()
@click.argument("model", required=False)
@url_option("With MODEL: http[s]://HOST:PORT[/PATH] or unix:PATH.")
@target_options
@click.option("--port", type=click.IntRange(1, 65535), help="Without MODEL: the port of the server on this host.")
@click.option("--config", "config_file", metavar="FILE", help="Without MODEL: the settings file of that server.")
def stop(*, model: str | None, url: str, port: int | None, config_file: str | None, **access: str) -> int:
    """Stop the server on this host, or only unload MODEL.

    Accepted requests finish first, within drain_timeout_s; a second stop meanwhile ends them. The server is found by
    its port's lock file in runtime_dir.

    \b
      sie stop
      sie stop --port 9000
      sie stop mine
    """
    if model is not None:
        if port is not None or config_file is not None:
            return fail("--port and --config name a server to stop; with a MODEL, --url names the server that has it")
        return _unload(model, url, access)
    if click.get_current_context().get_parameter_source("url") is ParameterSource.COMMANDLINE:
        return fail(
            "--url needs a MODEL to unload there; without one, this host's server is stopped: name it with --port"
        )
    return _stop_server(port, config_file)


def _unload(model: str, url: str, access: dict[str, str]) -> int:
    from sie.commands.http_client import ServerError, call, refusal
    from sie.loadgen.target import TargetError

    path = "/v1/models/unload"
    try:
        target = named_target(url, **access)
        status, body = call(target, "POST", path, {"model_id": model})
        if status == 404 and (model_id := _id_of(target, model)):
            status, body = call(target, "POST", path, {"model_id": model_id})
    except (TargetError, ServerError, ValueError) as error:
        return fail(str(error))
    if status not in {200, 202}:
        return fail(refusal(path, status, body))
    click.echo(f"{model} is unloaded" if status == 200 else f"{model} is unloading: its last requests are running")
    return 0


def _id_of(target: Target, shown: str) -> str:
    """Return the id of the model that `sie ps` shows under another name, or an empty text."""
    frame, _ = _ask_frame(target)
    return next((model.name for model in frame.models if frame.shown_name(model) == shown != model.name), "")


def _stop_server(port: int | None, config_file: str | None) -> int:
    from sie.config.settings import load_settings
    from sie.runtime.server_locks import find_server, lock_directories, locked_ports

    flags: dict[str, Any] = {} if port is None else {"port": str(port)}
    settings = load_settings(config_file, os.environ, flags).settings
    server, uds = settings.server, settings.access.uds
    if uds and port is None:
        # It holds no lock of a port: the server that does is another one.
        return fail(
            f"these settings listen on unix:{uds}, not on a port: `sie ps --url unix:{uds}` shows the server's pid, and "
            "`kill PID` stops it"
        )
    pid = find_server(server.runtime_dir, server.port)
    if pid is not None:
        return _end(pid, server.port, server.drain_timeout_s + _AFTER_DRAIN_S)
    reason = f"no server on this host has port {server.port}: no lock is held in {server.runtime_dir}"
    others = ", ".join(
        f"`sie stop --port {port}`" for path in lock_directories(server.runtime_dir) for port in locked_ports(path)
    )
    return fail(f"{reason}; others can be stopped with {others}" if others else reason)


def _end(pid: int, port: int, timeout_s: float) -> int:
    """Ask the server to end, and wait until it has."""
    unit = _unit_of(pid)
    if unit:
        return fail(f"the server on port {port} (pid {pid}) is the systemd service {unit}: run `systemctl stop {unit}`")
    try:
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            click.echo(f"stopping the server on port {port} (pid {pid})", err=True)
            ended, _, _ = select.select([pidfd], [], [], timeout_s)
        finally:
            os.close(pidfd)
    except ProcessLookupError:
        return 0
    except OSError as error:
        return fail(f"cannot stop the server on port {port} (pid {pid}): {error.strerror}")
    return 0 if ended else fail(f"the server on port {port} (pid {pid}) has not ended within {timeout_s:g} s")


def _unit_of(pid: int) -> str:
    """Return the systemd service that a process belongs to, or an empty text. Source: proc_pid_cgroup(5)."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    names = [Path(line.rpartition(":")[2]).name for line in lines]
    # A login's own service (user@1000.service) is above its scopes, so only the last part counts.
    return next((name for name in names if name.startswith("sie") and name.endswith(".service")), "")
