"""Reads a file whose content acts with the server's rights: its keys, or commands that it runs."""

from __future__ import annotations

import os
import stat


def read_trusted_file(path: str, max_bytes: int) -> tuple[bytes, int]:
    """Return a file's bytes and mode, both from the same open file.

    Raises ValueError for a file that others than root and this user own or may write to, that is too large or not a
    regular file, and OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("is not a regular file")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("others than its owner may write to it; chmod go-w")
        if found.st_uid not in (0, os.geteuid()):
            raise ValueError(f"belongs to another user (uid {found.st_uid}), neither root nor this one")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"is over {max_bytes >> 20} MiB")
    return data, found.st_mode
