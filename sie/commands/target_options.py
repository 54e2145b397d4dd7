"""The flags of client commands: the server's address, the API key, the TLS files, and ranges of numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from sie.config.sources import KEY_VARIABLE, URL_VARIABLE, SettingsError

if TYPE_CHECKING:
    from sie.loadgen.target import Target

DEFAULT_URL: Final = "http://127.0.0.1:8080"
_Command = Callable[..., Any]

_OPTIONS = (
    click.option(
        "--key",
        envvar=[KEY_VARIABLE, "BENCH_API_KEY"],
        show_envvar=True,
        default="",
        help="API key. OPENAI_API_KEY is used, too, if --url or SIE_URL names the server.",
    ),
    click.option(
        "--ca",
        "ca_file",
        type=click.Path(),
        default="",
        help="PEM file of the authorities to trust instead of the system's.",
    ),
    click.option("--cert", "cert_file", type=click.Path(), default="", help="PEM file of this client's certificate."),
    click.option(
        "--cert-key", "key_file", type=click.Path(), default="", help="PEM file of the private key of --cert."
    ),
)


class NumberRange(click.FloatRange):
    """A range of numbers. NaN is in no range, although it is neither below nor above one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def url_option(forms: str) -> Callable[[_Command], _Command]:
    """Add `--url`, whose help lists the accepted forms of an address."""
    return click.option(
        "--url", envvar=URL_VARIABLE, show_envvar=True, default=DEFAULT_URL, show_default=True, help=forms
    )


def target_options(command: _Command) -> _Command:
    """Add the options of `named_target` besides the address: key, ca_file, cert_file, key_file."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def named_target(url: str, *, key: str, **tls_files: str) -> Target:
    """Return the server that the current command's flags and variables name. Raises TargetError.

    The key of another service must not reach a server that the user did not name, so `OPENAI_API_KEY` counts only
    beside an explicit address.
    """
    from msgspec import structs

    from sie.loadgen.target import parse_target

    is_named = click.get_current_context().get_parameter_source("url") is not ParameterSource.DEFAULT
    key = key or (os.environ.get("OPENAI_API_KEY", "") if is_named else "")
    return structs.replace(parse_target(url, key=key, **tls_files), find_server=_find_server)


def _find_server(port: int) -> int | None:
    from sie.config.settings import load_settings
    from sie.runtime.server_locks import find_server

    try:
        return find_server(load_settings(None, os.environ, {}).settings.server.runtime_dir, port)
    except SettingsError:
        return None
