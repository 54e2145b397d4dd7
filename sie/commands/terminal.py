"""Writes messages for people to stderr, without control characters of others."""

from __future__ import annotations

from typing import Final

import click

HARMLESS: Final = dict.fromkeys((*range(32), *range(127, 160)), "�") | {9: "\t", 10: "\n", 13: None}
"""For `str.translate`. Escape sequences of a model's or server's text rename windows, move the cursor, fill clipboards."""


def note(text: str) -> None:
    """Print a message dimly."""
    click.secho(text.translate(HARMLESS), err=True, dim=True)


def fail(text: str) -> int:
    """Print the reason of a failure, and return the command's exit status."""
    click.echo(f"sie: {text.translate(HARMLESS)}", err=True)
    return 1
