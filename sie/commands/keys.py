"""The command `sie keys`: makes and lists API keys. A key is shown once, when it is made; files hold only its hash.

Its imports happen when it runs, because every other `sie` command imports this file too.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from sie.config.sources import SettingsError

if TYPE_CHECKING:
    from sie.values.api_key import ApiKey, Scope

_UNITS_S: Final = {"h": 3600, "d": 86400, "w": 7 * 86400}
_COLUMNS: Final = ("NAME", "SCOPES", "LIMITS", "EXPIRES")


@click.group()
def keys() -> None:
    """Make and list API keys of a server that runs with `--api-keys FILE`."""


class Expiry(click.ParamType):
    """A time in the future as Unix time: so many hours, days or weeks from now, or a date and time, UTC by default."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the time in seconds."""
        try:
            expires_s = _read_time(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time such as 12h, 30d, 8w, 2027-01-31 or 2027-01-31T18:00:00Z", param, ctx)
        if expires_s <= time.time():
            self.fail(f"{value!r} is past", param, ctx)
        return expires_s


def _read_time(text: str) -> int:
    """Return the Unix time that a text means. Raises ValueError, OverflowError."""
    if found := re.fullmatch(r"([0-9]{1,9})([hdw])", text):
        moment = datetime.fromtimestamp(int(time.time()) + int(found[1]) * _UNITS_S[found[2]], UTC)
    else:
        moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())


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
@click.option("--expires", "expires_s", type=Expiry(), help="Time from which it is refused: 12h, 30d, 8w, 2027-01-31.")
@click.option("--weight", type=click.IntRange(1, 1000), default=1, help="Share beside other keys in a full cluster.")
def new(  # noqa: PLR0917  # click passes them by name
    name: str, scopes: tuple[Scope, ...], path: str | None, requests_per_minute: int | None, tokens_per_minute: int | None,
    max_concurrent: int | None, expires_s: int | None, weight: int,
) -> None:  # fmt: skip
    """Make a key called NAME and print it once, on standard output.

    Its entry goes to the end of FILE; a running server uses it within two seconds. Without --file the entry is printed
    on standard error.

    \b
      sie keys new ingest --file /etc/sie/keys.toml
      sie keys new ops --scope admin --scope metrics --file /etc/sie/keys.toml
      sie keys new guest --expires 30d --file /etc/sie/keys.toml
    """
    from sie.values.api_key import NAME_PATTERN, ApiKey, KeyFileError, add_entry, digest_of, make_key, render_entry

    if not re.match(NAME_PATTERN, name):
        raise SettingsError(f"NAME: {name!r} is not 1 to 64 letters, digits, dots, hyphens and underscores")
    text = make_key()
    key = ApiKey(
        name=name, digest=digest_of(text), scopes=tuple(dict.fromkeys(scopes)),
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, max_concurrent=max_concurrent,
        expires_s=expires_s, weight=weight,
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


@keys.command("list")
@click.option("--file", "path", metavar="FILE", required=True, help="The file of keys.")
def list_keys(path: str) -> None:
    """List the keys in FILE with their scopes, limits and expiry. The keys themselves are in no file."""
    from sie.values.api_key import KeyFileError, read_key_file

    try:
        found = read_key_file(path).keys
    except KeyFileError as error:
        raise SettingsError(str(error)) from error
    rows = [_COLUMNS, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _cells(key: ApiKey) -> tuple[str, str, str, str]:
    """Return the cells of a key's row, one for each column."""
    from sie.values.api_key import LIMITS

    limits = [f"{name}={getattr(key, name)}" for name in LIMITS if getattr(key, name) is not None]
    expiry = f"{key.shown_expiry}{' (expired)' if key.is_expired(time.time()) else ''}"
    return key.name, ",".join(key.scopes), " ".join(limits) or "-", expiry or "never"
