"""Runs a benchmark by name: `python -m bench NAME`, from the repository's root. `make bench` runs it."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Final

import click

COMMANDS: Final = (
    "hop", "limits", "engine", "encoder", "scaling", "peers", "generate", "streams", "rounding", "tensors", "fairness", "queueing", "shm", "worker", "plot",
    "device-encoders", "device-decode", "agents", "memory", "loading", "cluster", "fixed-encodings",
)  # fmt: skip
"""One module each, with a click command `main`."""


class Benchmarks(click.Group):
    """Imports a benchmark when it is asked for."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(f"bench.{name.replace('-', '_')}").main if name in COMMANDS else None


@click.command(cls=Benchmarks, context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure this server, its parts, its machine, and its peers. `sie bench` measures a server that runs already."""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, as at the end of a run
    main(prog_name="python -m bench")
