"""How this server starts its own modules as processes."""

from __future__ import annotations

import sys
from pathlib import Path

import sie


def run_module(name: str) -> list[str]:
    """Return the command that runs a module of this package.

    Python looks into the working directory first: a folder `sie` there would run with the server's rights. It may not
    (-P), except where that directory is the one that holds this package, as in a checkout that nobody installed.
    """
    try:
        is_here = Path(sie.__file__).resolve().parents[1] == Path.cwd()
    except FileNotFoundError:  # the working directory was removed
        is_here = False
    return [sys.executable, *(() if is_here else ("-P",)), "-m", name]
