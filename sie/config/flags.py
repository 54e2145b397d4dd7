"""Derives a command's flags from the settings, and lists them by section in its help."""

from __future__ import annotations

import itertools
from typing import Any, Literal, get_args, get_origin

import click

from sie.config.display import section_doc
from sie.config.limits import MIB
from sie.config.settings import all_keys
from sie.config.sources import CONFIG_VARIABLE, Key, SettingsError, did_you_mean

_MAX_FLAG_CHARS = 34
_MAX_METAVAR_CHARS = 14


class ConfiguredCommand(click.Command):
    """A command that takes `--config` and each setting as a flag; a wrong flag raises SettingsError."""

    def __init__(self, *args: Any, params: list[click.Parameter] | None = None, **kwargs: Any) -> None:
        config = click.Option(
            ["--config", "config_file"], metavar="FILE", help=f"TOML file of settings, else {CONFIG_VARIABLE} names it."
        )
        super().__init__(*args, params=[*(params or []), config, *map(_option, all_keys())], **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but report errors in the form of a wrong variable or TOML key."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [flag for param in self.get_params(ctx) for flag in param.opts]
            raise SettingsError(f"{error.option_name}: unknown flag{did_you_mean(error.option_name, known)}") from None
        except click.UsageError as error:
            raise SettingsError(error.format_message()) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then the settings under section headings."""
        names = {key.name for key in all_keys()}
        own = [param for param in self.get_params(ctx) if param.name not in names]
        with formatter.section("Options"):
            formatter.write_dl([row for param in own if (row := param.get_help_record(ctx))], col_max=_MAX_FLAG_CHARS)
        for section, keys in itertools.groupby(all_keys(), key=lambda key: key.section):
            with formatter.section(section_doc(section).rstrip(".")):
                rows = [(f"{key.flag} {_metavar(key)}".rstrip(), _help(key)) for key in keys]
                formatter.write_dl(rows, col_max=_MAX_FLAG_CHARS)


def _option(key: Key) -> click.Option:
    if isinstance(key.default, bool):
        return click.Option([f"{key.flag}/--no-{key.flag[2:]}", key.name], default=None)
    kind = click.Choice(choices) if (choices := _choices(key)) else click.STRING
    return click.Option([key.flag, key.name], type=kind, multiple=key.is_list)


def _choices(key: Key) -> tuple[str, ...]:
    plain = get_args(key.annotation)[0]
    return get_args(plain) if get_origin(plain) is Literal else ()


def _metavar(key: Key) -> str:
    """Return the placeholder of the value: its choices if short, its unit, or the last word of its name."""
    if isinstance(key.default, bool):
        return ""
    if choices := _short_choices(key):
        return choices
    for ending, unit in (("_bytes", "BYTES"), ("_ms", "MS"), ("_s", "SECONDS")):
        if key.name.endswith(ending):
            return unit
    return "N" if isinstance(key.default, int) else key.name.rpartition("_")[2].upper()


def _short_choices(key: Key) -> str:
    text = "|".join(_choices(key))
    return text if len(text) <= _MAX_METAVAR_CHARS else ""


def _help(key: Key) -> str:
    choices = "" if _short_choices(key) else ", ".join(_choices(key))
    accepts = f" One of {choices}." if choices else f" As {key.form}." if key.form else ""
    return f"{key.doc}{accepts}{_shown_default(key)}"


def _shown_default(key: Key) -> str:
    if key.default in ("", (), False):
        return ""
    if key.name.endswith("_bytes") and key.default % MIB == 0:
        return f" [{key.default // MIB} MiB]"
    return f" [{key.default:g}]" if isinstance(key.default, float) else f" [{key.default}]"
