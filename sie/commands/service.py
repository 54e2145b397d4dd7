"""The command `sie service`: writes and removes the systemd files that run the server on this host."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sie.units import AGENTS, DEFAULT_CONFIG, GATEWAY_DROP_IN, GPU_DROP_IN, MARKER, PLACES, Host, render

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._+/-]+")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_HIDDEN = tuple(f"/{name}/" for name in ("home", "root", "run/user", "tmp", "var/tmp"))
"""Directories of this host that the unit cannot see: ProtectHome and PrivateTmp replace them."""
_LEFT = ("/etc/sie", "/var/cache/sie", "/var/lib/sie", "/var/lib/sie-agents")


def _check_path(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _PLAIN_PATH.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not an absolute path of letters, digits and . _ + - /", ctx, param)
    return value


def _check_user(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not _USER.fullmatch(value) or value == "root":
        raise click.BadParameter(f"{value!r} is not the name of an unprivileged user", ctx, param)
    return value


def _check_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value not in PLACES:
        raise click.BadParameter(f"{value!r} is not one of {', '.join(PLACES)}", ctx, param, param_hint="FILE")
    return value


@click.group()
def service() -> None:
    """Run the server under systemd: install, uninstall or print its unit.

    \b
    As root:
      sie service install
      systemctl enable --now sie
    """


def _host_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags for values that differ between hosts."""
    options = (
        click.option(
            "--executable", metavar="FILE", callback=_check_path, help="The command `sie` [that of this installation]."
        ),
        click.option(
            "--config", metavar="FILE", default=DEFAULT_CONFIG, show_default=True, callback=_check_path,
            help="TOML file of settings.",
        ),
        click.option(
            "--user", default="sie", show_default=True, callback=_check_user, help="User that the server runs as."
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@service.command("print", epilog="\b\nFILE is one of:\n  " + "\n  ".join(PLACES))
@click.argument("name", metavar="[FILE]", default="sie.service", callback=_check_name)
@_host_options
def print_unit(name: str, executable: str | None, config: str, user: str) -> None:
    """Print a file that `install` would write on this host.

    Without FILE it prints sie.service.
    """
    click.echo(render(name, _host(executable, config, user, Path("/"))), nl=False)


@service.command()
@_host_options
@click.option("--gpu/--no-gpu", default=None, help="Give the service the GPUs [if this host has NVIDIA's driver].")
@click.option("--gateway", is_flag=True, help="Run a gateway of a cluster, `sie gateway`, instead of a server.")
@click.option("--agents", is_flag=True, help="Run the agent process as a service of its own, with sandboxes.")
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default="/",
    help="Write beneath this directory, for example of an image.",
)
@click.option("--force", is_flag=True, help="Overwrite files that `sie service` did not write.")
def install(  # one for each flag
    *,
    executable: str | None,
    config: str,
    user: str,
    gpu: bool | None,
    gateway: bool,
    agents: bool,
    root: Path,
    force: bool,
) -> None:
    """Write the unit and the files that belong to it.

    These are the unit's user, its directories, helpful kernel settings and a first settings file. Existing settings
    stay. A repeated install changes only files that differ.
    """
    is_live = root.resolve() == Path("/")
    has_gpu = gpu if gpu is not None else is_live and not gateway and Path("/dev/nvidiactl").exists()
    chosen = {GPU_DROP_IN: has_gpu, GATEWAY_DROP_IN: gateway, **dict.fromkeys(AGENTS, agents)}
    host = _host(executable, config, user, root)
    texts = {root / PLACES[name]: render(name, host) for name in PLACES if chosen.get(name, True)}
    foreign = [path for path in texts if path.exists() and not _is_ours(path)]
    if foreign and not force:
        listed = ", ".join(map(str, foreign))
        raise click.ClickException(f"not written by `sie service`: {listed}; --force overwrites it")
    for path, text in texts.items():
        _write(path, text)
    for name, is_wanted in chosen.items():
        if not is_wanted:
            _remove(root / PLACES[name])
    _write_first_settings(root / config.lstrip("/"))
    if is_live and _systemd_runs():
        for program, kind in ((("systemd-sysusers",), "sysusers"), (("systemd-tmpfiles", "--create"), "tmpfiles")):
            for name in ("sie", "sie-agents")[: 1 + agents]:
                _call(*program, "/" + PLACES[f"{name}.{kind}.conf"])
        _call("systemctl", "daemon-reload")
    _warn_of_hidden(host.executable)
    _say_next(host, agents=agents)


def _warn_of_hidden(executable: str) -> None:
    """Warn if the unit's protection hides the command, or the interpreter that its environment uses."""
    used = [executable]
    if executable == _own_path():
        used.append(f"{Path(sys.base_prefix).resolve()}/")
    for path in used:
        if path.startswith(_HIDDEN):
            click.echo(f"warning: the service does not see {path}: install into /opt with a system Python", err=True)


@service.command()
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default="/",
    help="Remove beneath this directory, for example of an image.",
)
def uninstall(root: Path) -> None:
    """Stop the service and remove the files of `install`.

    Settings, caches, responses and the user stay.
    """
    is_live = root.resolve() == Path("/") and _systemd_runs()
    if is_live and _is_ours(root / PLACES["sie.service"]):
        _call("systemctl", "disable", "--now", "sie.service")
        if _is_ours(root / PLACES["sie-agents.service"]):
            _call("systemctl", "disable", "--now", "sie-agents.service", "sie-agents.socket")
    for place in PLACES.values():
        _remove(root / place)
    if is_live:
        _call("systemctl", "daemon-reload")
    left = [str(path) for name in _LEFT if (path := root / name.lstrip("/")).exists()]
    click.echo(f"not removed: {', '.join([*left, 'the user that the server ran as'])}")


def _host(executable: str | None, config: str, user: str, root: Path) -> Host:
    """Return the values for the templates; the time to stop comes from the settings, if they exist."""
    found = executable or _own_executable()
    path = root / config.lstrip("/")
    if not _exists(path):
        return Host(executable=found, config=config, user=user)
    from sie.config.settings import load_settings

    settings = load_settings(str(path), {}, {}).settings
    return Host(executable=found, config=config, user=user, drain_timeout_s=settings.server.drain_timeout_s)


def _own_path() -> str:
    return str(Path(sys.prefix, "bin", "sie"))


def _own_executable() -> str:
    import shutil  # imported here, because `--help` must be quick

    found = _own_path() if Path(_own_path()).exists() else shutil.which("sie")
    if found is None or not _PLAIN_PATH.fullmatch(found):
        raise click.ClickException(f"no usable path of the command sie ({found}); name it with --executable")
    return found


def _exists(path: Path) -> bool:
    """Return whether settings exist; an unreadable path raises an error instead of counting as missing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}; this needs root") from None
    return True


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").startswith(MARKER)
    except OSError:
        return False


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    import tempfile  # as shutil above

    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == text:
        click.echo(f"unchanged  {path}")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(fd, 0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}; this needs root, or --root") from None
    click.echo(f"wrote      {path}")


def _remove(path: Path) -> None:
    if not path.exists():
        return
    if not _is_ours(path):
        click.echo(f"kept       {path}: not written by `sie service`")
        return
    try:
        path.unlink()
        if path.parent.name == "sie.service.d" and not any(path.parent.iterdir()):
            path.parent.rmdir()
    except OSError as error:
        raise click.ClickException(f"cannot remove {path}: {error.strerror}; this needs root, or --root") from None
    click.echo(f"removed    {path}")


def _write_first_settings(path: Path) -> None:
    """Write a first settings file if it is missing, with all defaults commented out."""
    if _exists(path):
        click.echo(f"unchanged  {path}")
        return
    from sie.config.display import render_toml
    from sie.config.settings import load_settings

    directories = {
        "RUNTIME_DIRECTORY": "/run/sie",
        "CACHE_DIRECTORY": "/var/cache/sie",
        "STATE_DIRECTORY": "/var/lib/sie",
    }
    _write(
        path,
        "# Settings of sie.service; docs/settings.md explains each.\n"
        + render_toml(load_settings(None, directories, {})),
    )


def _systemd_runs() -> bool:
    """Return whether systemd is the system's manager. Source: sd_booted(3)."""
    return Path("/run/systemd/system").is_dir()


def _call(*command: str) -> None:
    """Run one of systemd's commands; its output goes to the terminal."""
    import shutil
    import subprocess

    if shutil.which(command[0]) is None:
        click.echo(f"not found  {command[0]}: run `{' '.join(command)}` yourself")
        return
    click.echo(f"ran        {' '.join(command)}")
    done = subprocess.run(command, check=False)  # noqa: S603  # fixed arguments of ours
    if done.returncode:
        raise click.ClickException(f"`{' '.join(command)}` failed with status {done.returncode}")


def _say_next(host: Host, *, agents: bool) -> None:
    click.echo(
        f"\nNext:\n"
        f"  name the models in {host.config}\n"
        f"  {host.executable} doctor --config {host.config}\n"
        + "  systemctl enable --now sie-agents.socket\n"
        * agents
        + f"  systemctl enable --now sie        # if it already runs: systemctl restart sie\n"
        f"  sysctl --load=/{PLACES['sie.sysctl.conf']}        # or reboot"
    )
