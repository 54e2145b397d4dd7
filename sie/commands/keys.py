"""The command `sie keys`: makes API keys. A key is shown once, when it is made; files hold only its hash.

Its imports happen when it runs, because every other `sie` command imports this file too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from sie.config.sources import SettingsError

if TYPE_CHECKING:
    from sie.values.api_key import Scope


@click.group()
def keys() -> None:
    """Make API keys for a server that runs with `--api-keys FILE`."""


@keys.command()
@click.argument("name")
@click.option(
    "--scope", "scopes", type=click.Choice(["infer", "admin", "metrics"]), multiple=True, default=("infer",), show_default=True,
    help="Scope of the key; repeatable.",
)  # fmt: skip
@click.option("--file", "path", metavar="FILE", help="Add the key to this file, which is created if it does not exist.")
@click.option("--requests-per-minute", type=click.IntRange(1, 100_000_000), help="Most requests in a minute.")
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(1, 10_000_000_000),
    help="Most tokens of requests and answers in a minute.",
)
@click.option("--max-concurrent", type=click.IntRange(1, 1_000_000), help="Most requests at the same time.")
@click.option("--weight", type=click.IntRange(1, 1000), default=1, help="Share beside other keys in a full cluster.")
def new(  # noqa: PLR0917  # click passes them by name
    name: str, scopes: tuple[Scope, ...], path: str | None, requests_per_minute: int | None, tokens_per_minute: int | None,
    max_concurrent: int | None, weight: int,
) -> None:  # fmt: skip
    """Make a key called NAME and print it once, on standard output.

    Its entry goes to the end of FILE; a running server uses it within two seconds. Without --file the entry is printed
    on standard error.

    \b
      sie keys new ingest --file /etc/sie/keys.toml
      sie keys new ops --scope admin --scope metrics --file /etc/sie/keys.toml
    """
    from sie.values.api_key import NAME_PATTERN, ApiKey, KeyFileError, add_entry, digest_of, make_key, render_entry

    if not re.match(NAME_PATTERN, name):
        raise SettingsError(f"NAME: {name!r} is not 1 to 64 letters, digits, dots, hyphens and underscores")
    text = make_key()
    key = ApiKey(
        name=name, digest=digest_of(text), scopes=tuple(dict.fromkeys(scopes)),
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, max_concurrent=max_concurrent,
        weight=weight,
    )  # fmt: skip
    if path is None:
        click.echo(render_entry(key), err=True)
    else:
        try:
            add_entry(path, key)
        except KeyFileError as error:
            raise SettingsError(str(error)) from error
        click.echo(f"{name} is in {path}; this is its key, which is not shown again:", err=True)
    click.echo(text)
