"""The flags of client commands: the API key and the TLS files."""

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
    """Add the options of `sie.loadgen.target.parse_target` besides the address: key, ca_file, cert_file, key_file."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
