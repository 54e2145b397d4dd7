"""The flags of commands that are clients of a server: the API key and the files of TLS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_Command = Callable[..., Any]

_OPTIONS = (
    click.option("--key", envvar="BENCH_API_KEY", show_envvar=True, default="", help="API key."),
    click.option(
        "--ca",
        "ca_file",
        type=click.Path(),
        default="",
        help="PEM file of the authorities to trust instead of the system's.",
    ),
    click.option(
        "--cert", "cert_file", type=click.Path(), default="", help="PEM file of the certificate that this client shows."
    ),
    click.option("--cert-key", "key_file", type=click.Path(), default="", help="PEM file of its private key."),
)


def target_options(command: _Command) -> _Command:
    """Add what `sie.loadgen.target.parse_target` takes beside an address: key, ca_file, cert_file, key_file."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
