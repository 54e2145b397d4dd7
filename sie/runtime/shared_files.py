"""Shares the files of a directory with its group, if the operator made it so that its files belong to its group."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path
from typing import Final

_SHARED: Final = 0o660


def share(path: Path) -> None:
    """Let the group of a setgid directory read and write this file in it. A file elsewhere stays as it is."""
    if path.parent.stat().st_mode & stat.S_ISGID:
        with contextlib.suppress(PermissionError):  # another user of the group made it, and shared it
            path.chmod(_SHARED)
