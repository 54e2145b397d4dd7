"""Keeps files, skills and sessions on disk for all frontends. Knows no HTTP and no dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DATABASE: Final = "agents.db"


def has_store(directory: str) -> bool:
    """Tell whether a server has kept anything in this state directory."""
    try:
        return Path(directory, DATABASE).exists()
    except OSError:  # the first request for the store tells why
        return False
