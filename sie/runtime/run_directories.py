"""Directories that a process has for its run, each with a lock, so that others remove only those of processes that died."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def alone_in(base: Path) -> Iterator[None]:
    """Wait until no other process makes, locks or removes entries of base. Raises OSError."""
    fd = os.open(base, _DIRECTORY_FLAGS)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def make_locked(base: Path, prefix: str) -> tuple[Path, int]:
    """Make a private directory (0700) in base. Return it and the descriptor that holds its lock. Needs `alone_in(base)`."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    fd = os.open(path, _DIRECTORY_FLAGS)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return path, fd


def remove_unlocked(base: Path, pattern: str, remove: Callable[[Path], object]) -> None:
    """Call remove for the entries of base whose names match and that nobody has locked. Needs `alone_in(base)`."""
    for path in base.glob(pattern):
        with suppress(OSError):  # its process lives, or it is not ours
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
            finally:
                os.close(fd)
