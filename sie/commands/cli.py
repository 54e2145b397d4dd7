"""The command `sie`: its flags, help and exit statuses. The flags are derived from `sie.config.settings`.

Imports only what `--help` needs; each command imports the rest itself. Exit statuses: 0 done, 1 failed while running,
2 a command that does not exist, 78 (EX_CONFIG) a setting, a flag or a model that stops the start.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from sie import __version__
from sie.commands.bench import bench
from sie.commands.chat import chat
from sie.commands.convert import convert
from sie.commands.keys import keys
from sie.commands.pull import pull
from sie.commands.run import run
from sie.commands.running import ps, stop
from sie.commands.service import service
from sie.commands.target_options import NumberRange
from sie.commands.top import top
from sie.config.bundled import with_bundled_files, with_bundled_model
from sie.config.display import RENDERERS
from sie.config.flags import ConfiguredCommand, ModelsCommand, with_models
from sie.config.settings import Loaded, load_settings
from sie.config.sources import SettingsError, did_you_mean, is_utf8
from sie.doctor import AREAS
from sie.ipc.exit_statuses import CONFIG_STATUS

_MAX_HELP_CHARS: Final = 90
_OF_PATHS: Final = frozenset((errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EROFS))
_STDOUT: Final = 1
_CONTEXT = {"max_content_width": 120, "help_option_names": ["-h", "--help"]}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. An error that stops a start is one line on stderr."""
    given = sys.argv[1:] if args is None else args
    for number, text in enumerate(given, 1):
        if not is_utf8(text):
            click.echo(f"sie: argument {number}: {text!r} is not UTF-8 text", err=True)
            return 2
    try:
        result = cli.main(args=given, prog_name="sie", standalone_mode=False)
    except SettingsError as error:
        click.echo(f"sie: {error}", err=True)
        return CONFIG_STATUS
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except OSError as error:
        if not (reason := _reason_of(error)):
            raise
        click.echo(f"sie: {reason}", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _reason_of(error: OSError) -> str:
    """Return what is wrong with a path or with the output, for people; empty for an error of the program."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}" if error.errno in _OF_PATHS else ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__") == click.echo.__module__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # takes what Python still holds when it ends
        return f"cannot write the output: {error.strerror}"
    try:
        os.getcwd()  # noqa: PTH109  # pathlib answers from a cache
    except FileNotFoundError:
        return "the current directory does not exist any more"
    return ""


_GROUPS: Final = {
    "Serve": ("serve", "gateway", "agents", "run", "pull", "convert", "list", "doctor", "config", "keys", "service"),
    "Use a server": ("chat", "ps", "top", "stop", "bench"),
    "This command": ("completion", "version"),
}


class _Commands(click.Group):
    """The group of all commands. Its help has headings, and an unknown command gets the nearest name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            hint = did_you_mean(args[0], self.list_commands(ctx)) or "; `sie --help` lists the commands"
            ctx.fail(f"{args[0]!r}: unknown command{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command's first line under its heading."""
        for heading, names in _GROUPS.items():
            with formatter.section(heading):
                commands = [(name, self.commands[name].get_short_help_str(_MAX_HELP_CHARS)) for name in names]
                formatter.write_dl(commands, col_max=12)


@click.group(cls=_Commands, context_settings=_CONTEXT)
@click.version_option(__version__, "-V", "--version", prog_name="sie", message="%(prog)s %(version)s")
def cli() -> None:
    """One inference server: one engine, several wire dialects.

    Without a model it serves the bundled all-MiniLM-L6-v2 on http://127.0.0.1:8080:

    \b
      sie serve
      sie serve org/name mine=/srv/models/mine ./model.gguf --port 9000
      sie run ./model.gguf
    """


@cli.command(cls=ModelsCommand)
def serve(named: tuple[str, ...], config_file: str | None, **flags: Any) -> int:
    """Serve models until SIGTERM.

    Each MODEL is the id of a repository on the hub, ID=DIR, or a path to a directory or a .gguf file. Every flag is
    also a SIE_* variable and a TOML key: `sie config` shows the current values.
    """
    from sie.catalog.listing import check_adapters

    given = with_models(flags, named)  # once: a reload finds the same models, whatever directories there are by then

    def load() -> Loaded:
        return with_bundled_model(_load(config_file, given))

    loaded = _warned(load())
    check_adapters(loaded)
    from sie.supervisor import main as supervisor
    from sie.supervisor.host_resources import StartError

    try:
        return supervisor.main(loaded, load)
    except StartError as error:
        raise SettingsError(str(error)) from error


@cli.command(
    cls=ConfiguredCommand, help_sections=("server", "access", "limits", "cluster"), help_without=("grpc_port",)
)
def gateway(config_file: str | None, **flags: Any) -> int:
    """Serve the models of a cluster's hosts until SIGTERM.

    A gateway has no models and no devices. It passes requests to the hosts that were started with the same --nats:

    \b
      sie serve --nats nats://10.0.0.5:4222 org/name
      sie gateway --nats nats://10.0.0.5:4222 --port 9000
    """

    def load() -> Loaded:
        return _load(config_file, flags)

    loaded = _warned(load())
    from sie.supervisor import main as supervisor
    from sie.supervisor.host_resources import StartError

    try:
        return supervisor.main(loaded, load, is_gateway=True)
    except StartError as error:
        raise SettingsError(str(error)) from error


@cli.command(cls=ConfiguredCommand, help_sections=("agents",))
def agents(config_file: str | None, **flags: Any) -> int:
    """Run the agent process as a service of its own until SIGTERM.

    Servers of this host with the same --agent-socket use it. `sie service install --agents` writes its units.
    """
    loaded = _warned(_load(config_file, flags))
    if not loaded.settings.agents.agent_socket:
        raise SettingsError("agent_socket: `sie agents` needs the path of its socket (--agent-socket PATH)")
    from sie.agents.host.main import serve_service
    from sie.supervisor.host_resources import StartError
    from sie.supervisor.start_checks import check_agents

    try:
        check_agents(loaded.settings)
        return serve_service(loaded.settings)
    except StartError as error:
        raise SettingsError(str(error)) from error
    except OSError as error:
        where = loaded.settings.agents.agent_socket
        raise SettingsError(f"agent_socket: cannot listen on {where}: {error.strerror or error}") from error


@cli.command(
    "list",
    cls=ModelsCommand,
    help_sections=("models",),
    params=[
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
        click.Option(
            ["--catalogue"], is_flag=True, help="List the reference server's models, and which are served here."
        ),
    ],
)
def list_(named: tuple[str, ...], config_file: str | None, as_json: bool, catalogue: bool, **flags: Any) -> int:
    """List the models that `serve` would serve, and check their files.

    Downloads nothing and reads no weights. `sie models` is the same command. Exit status 1: a load will refuse a model.
    """
    if catalogue:
        from sie.catalog.families import read_catalogue, render_catalogue

        known = read_catalogue()
        click.echo(_as_json(known) if as_json else render_catalogue(known))
        return 0
    from sie.catalog.listing import list_models, render_table
    from sie.supervisor.card_helper import check_models

    rows = list_models(with_bundled_model(_warned(_load(config_file, with_models(flags, named)))), check_models)
    click.echo(_as_json(rows) if as_json else render_table(rows))
    return int(any(row.check == "refused" for row in rows))


@cli.command(
    cls=ConfiguredCommand,
    params=[
        click.Option(
            ["--format", "output_format"],
            type=click.Choice(list(RENDERERS)),
            default="text",
            help="Output format [text].",
        )
    ],
)
def config(config_file: str | None, output_format: str, **flags: Any) -> None:
    """Print every setting, its value, and where the value came from."""
    click.echo(RENDERERS[output_format](_warned(_load(config_file, flags))), nl=False)


cli.add_command(list_, "models")
for _command in (bench, chat, convert, keys, ps, pull, run, service, stop, top):
    cli.add_command(_command)


@cli.command(
    cls=ConfiguredCommand,
    params=[
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
        click.Option(
            ["--only"],
            type=click.Choice(AREAS),
            metavar="AREA",
            multiple=True,
            help=f"Check only this area; repeatable. One of {', '.join(AREAS)}.",
        ),
        click.Option(
            ["--wait-s"],
            type=NumberRange(0, 3600),
            default=0.0,
            help="Repeat the checks for up to this time, until no error is left.",
        ),
        click.Option(
            ["--bundle", "bundle_file"],
            metavar="FILE",
            help="Also write FILE, a .tar.gz for a report: settings without secrets, versions, findings, the end of the log, and a minute of a running server's status.",
        ),
        click.Option(
            ["--bundle-log"], metavar="FILE", default="", help="The log for --bundle, instead of the journal's."
        ),
    ],
)
def doctor(  # noqa: PLR0917  # click passes them by name
    config_file: str | None, as_json: bool, only: tuple[str, ...], wait_s: float, bundle_file: str | None, bundle_log: str,
    **flags: Any,
) -> int:  # fmt: skip
    """Check this host and these settings, and say how to correct faults.

    Exit status 1: an error was found, so the server would not start or would not answer requests.
    """
    from sie.doctor import examine, render_json, render_text

    def load() -> Loaded:
        return with_bundled_files(_load(config_file, flags))

    findings = examine(load, only or AREAS, wait_s)
    if bundle_file is not None:
        from sie.commands.bundle import write_bundle

        click.echo("sie: collecting for a minute", err=True)
        names = write_bundle(bundle_file, load, findings, log_file=bundle_log)
        click.echo(f"sie: {bundle_file} has {', '.join(names)}; read it before you send it", err=True)
    click.echo(render_json(findings) if as_json else render_text(findings), nl=False)
    return int(any(finding.level == "error" for finding in findings))


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"sie {__version__}")


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    \b
    For bash:
      sie completion bash > ~/.local/share/bash-completion/completions/sie
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(cli, {}, "sie", "_SIE_COMPLETE").source(), nl=False)


def _as_json(rows: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(rows)).decode()


def _load(config_file: str | None, flags: dict[str, Any]) -> Loaded:
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    return load_settings(config_file, os.environ, given)


def _warned(loaded: Loaded) -> Loaded:
    """Write the settings' warnings to stderr, and return the settings."""
    for text in loaded.warnings:
        click.echo(f"sie: warning: {text}", err=True)
    return loaded
