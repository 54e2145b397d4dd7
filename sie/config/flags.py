"""Derives a command's flags from the settings, and lists them by section in its help.

`--help` lists the settings that most people need, and `--help-all` lists all of them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click

from sie.config.display import section_doc
from sie.config.limits import MIB
from sie.config.other_servers import hint_for_flag
from sie.config.settings import all_keys
from sie.config.sources import CONFIG_VARIABLE, Key, SettingsError

_MAX_FLAG_CHARS = 34
_MAX_METAVAR_CHARS = 14
_FILE = re.compile(r"(TOML|PEM|Jinja) file\b")
_MODEL_FILE = re.compile(r"(gliner_|open_clip_)?config\.json|modules\.json|.+\.(gguf|onnx|safetensors)")
"""The files that tell a model's directory from others."""
_COMMON: Final = frozenset(
    (
        "host", "port", "grpc_port", "frontends", "log_format", "log_level", "api_keys", "tls_cert", "tls_key", "uds",
        "model", "lazy_model", "catalog", "default_model", "model_repository", "dtype", "encoder_weights", "convert", "cache_dir",
        "lora", "idle_unload_s", "devices", "max_queued_tokens", "request_timeout_s", "weights", "tensor_parallel", "kv_cache_share",
        "max_context_tokens",
    )
)  # fmt: skip
"""The settings that `--help` lists."""
_SHORT: Final = {"pool_name": ("--pool",)}
"""Further flags of a setting."""


class ConfiguredCommand(click.Command):
    """A command that takes `--config` and each setting as a flag; a wrong flag raises SettingsError.

    A flag of the command's own takes the place of a setting's with the same name. `--help` lists the common settings of
    `help_sections`, by default of all sections; of one without common settings it lists all. It leaves out `help_without`.
    """

    def __init__(
        self,
        *args: Any,
        params: list[click.Parameter] | None = None,
        help_sections: Sequence[str] = (),
        help_without: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self._help_sections = help_sections
        self._help_without = help_without
        config = click.Option(
            ["--config", "config_file"], metavar="FILE", help=f"TOML file of settings, else {CONFIG_VARIABLE} names it."
        )
        help_all = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all_help,
            help="Show this message with every setting and exit.",
        )  # fmt: skip
        own = {flag for param in params or () for flag in param.opts}
        settings = [option for option in _options() if own.isdisjoint(option.opts)]
        super().__init__(*args, params=[*(params or []), config, *settings, help_all], **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but report errors in the form of a wrong variable or TOML key."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [flag for param in self.get_params(ctx) for flag in param.opts]
            raise SettingsError(f"{error.option_name}: unknown flag{hint_for_flag(error.option_name, known)}") from None
        except click.UsageError as error:
            raise SettingsError(error.format_message()) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then settings under section headings: the common ones, or all."""
        names = {key.name for key in all_keys()}
        params = self.get_params(ctx)
        own = [param for param in params if isinstance(param, click.Option) and param.name not in names]
        with formatter.section("Options"):
            formatter.write_dl([row for param in own if (row := param.get_help_record(ctx))], col_max=_MAX_FLAG_CHARS)
        shown = [key for key in all_keys() if ctx.meta.get(_ALL) or self._is_in_help(key)]
        for section, keys in itertools.groupby(shown, key=lambda key: key.section):
            with formatter.section(section_doc(section).rstrip(".")):
                rows = [(f"{key.flag} {_metavar(key)}".rstrip(), _help(key)) for key in keys]
                formatter.write_dl(rows, col_max=_MAX_FLAG_CHARS)
        if num_left := len(all_keys()) - len(shown):
            formatter.write_paragraph()
            formatter.write_text(f"--help-all also lists the {num_left} other settings.")

    def _is_in_help(self, key: Key) -> bool:
        if key.name in self._help_without:
            return False
        if not self._help_sections:
            return key.name in _COMMON
        return key.section in self._help_sections and (key.name in _COMMON or key.section not in _common_sections())


class ModelsCommand(ConfiguredCommand):
    """A ConfiguredCommand whose arguments are models, as `--model` names them, or paths."""

    def __init__(self, *args: Any, params: list[click.Parameter] | None = None, **kwargs: Any) -> None:
        named = click.Argument(["named"], nargs=-1, metavar="[MODEL]...")
        super().__init__(*args, params=[named, *(params or [])], **kwargs)


def with_models(flags: dict[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """Return the flags with the named models before those of `--model`."""
    specs = tuple(model_spec(text) for text in named)
    return {**flags, "model": (*specs, *(flags.get("model") or ()))} if specs else flags


def model_spec(text: str) -> str:
    """Return a named model in the form of `--model`.

    A name that begins with `/`, `./`, `../` or `~`, or ends with `/` or `.gguf`, is a path. The model's id is then the
    last part of the path, without `.gguf`. Any other name is the id itself: of a directory here that has this name and
    holds a model's files, or else of a repository on the hub. A name with a revision always means the hub.
    """
    if "=" in text:
        return text
    if text.startswith(("/", "./", "../", "~")) or text.endswith(("/", ".gguf")) or text in {".", ".."}:
        path = Path(text).expanduser().resolve()
        return f"{path.name.removesuffix('.gguf')}={path}"
    return f"{text}={Path(text).resolve()}" if "@" not in text and _has_model_files(text) else text


def _has_model_files(directory: str) -> bool:
    try:
        return any(_MODEL_FILE.fullmatch(path.name) for path in Path(directory).iterdir())
    except OSError:
        return False


_ALL: Final = "sie.help_all"


def _show_all_help(ctx: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


@functools.cache
def _common_sections() -> frozenset[str]:
    return frozenset(key.section for key in all_keys() if key.name in _COMMON)


@functools.cache
def _options() -> tuple[click.Option, ...]:
    """Return the flag of every setting; all commands share them, because making them takes long."""
    return tuple(map(_option, all_keys()))


def _option(key: Key) -> click.Option:
    if isinstance(key.default, bool):
        return click.Option([f"{key.flag}/--no-{key.flag[2:]}", key.name], default=None)
    kind = click.Choice(choices) if (choices := _choices(key)) else click.STRING
    return click.Option([key.flag, *_SHORT.get(key.name, ()), key.name], type=kind, multiple=key.is_list)


def _choices(key: Key) -> tuple[str, ...]:
    plain = get_args(key.annotation)[0]
    return get_args(plain) if get_origin(plain) is Literal else ()


def _metavar(key: Key) -> str:
    """Return the placeholder of the value: its choices if short, FILE, its unit, or the last word of its name."""
    if isinstance(key.default, bool):
        return ""
    if choices := _short_choices(key):
        return choices
    if _FILE.match(key.doc):
        return "FILE"
    for ending, unit in (("_per_s", "N"), ("_bytes", "BYTES"), ("_ms", "MS"), ("_s", "SECONDS")):
        if key.name.endswith(ending):
            return unit
    return "N" if isinstance(key.default, int | float) else key.name.rpartition("_")[2].upper()


def _short_choices(key: Key) -> str:
    text = "|".join(_choices(key))
    return text if len(text) <= _MAX_METAVAR_CHARS else ""


def _help(key: Key) -> str:
    choices = "" if _short_choices(key) else ", ".join(_choices(key))
    accepts = f" One of {choices}." if choices else f" Format: {key.form}." if key.form else ""
    return f"{key.doc}{accepts}{_shown_default(key)}"


def _shown_default(key: Key) -> str:
    if key.default in ("", (), False):
        return ""
    if key.default is True:
        return f" [on; --no-{key.flag[2:]} turns it off]"
    if key.name.endswith("_bytes") and key.default % MIB == 0:
        return f" [{key.default // MIB} MiB]"
    return f" [{key.default:.10g}]" if isinstance(key.default, float) else f" [{key.default}]"
