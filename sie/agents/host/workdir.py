"""Reads the files of a session's working directory, where strangers choose the names. No link or path leads out of it.

Files may change while they are read: each is opened once, beneath the directory, and then judged by its descriptor.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import io
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_OPENAT2: Final = 437
_BENEATH_WITHOUT_LINKS: Final = 0x02 | 0x04 | 0x08
"""RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS and RESOLVE_BENEATH. Source: openat2(2)."""
_BLOCK: Final = 512
_MAX_DEPTH: Final = 32
_UNSHOWN: Final = frozenset({"node_modules", "venv", "env", "__pycache__", "build", "dist", "target", "skills"})
"""Directories of dependencies and of what programs build; a model's files are not in there."""


class Seen(NamedTuple):
    """The properties that tell one version of a file from another."""

    inode: int
    size: int
    changed_ns: int


class Usage(NamedTuple):
    """The size of a directory. problem is the reason if it cannot be measured."""

    num_bytes: int
    num_files: int
    problem: str = ""


def open_beneath(root: int, name: str, flags: int, mode: int = 0) -> int:
    """Open a path beneath the directory `root`. Raises OSError, also for a path with a link or with `..` out of it.

    mode is that of a new file, and must be 0 without O_CREAT.
    """
    if "\0" in name:  # the kernel would read the name up to it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, _BENEATH_WITHOUT_LINKS)
    libc = ctypes.CDLL(None, use_errno=True)
    path = ctypes.c_char_p(os.fsencode(name))
    fd = libc.syscall(
        ctypes.c_long(_OPENAT2), ctypes.c_int(root), path, ctypes.c_char_p(how), ctypes.c_size_t(len(how))
    )
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return int(fd)


def read_text(directory: Path, name: str, start: int, end: int) -> tuple[str, int, os.stat_result]:
    """Return the characters from start to end of an ordinary file, how many were passed, and what is known of it.

    The characters before start are read and not kept. Raises OSError unless the file is an ordinary one.
    """
    decoder, kept, passed = codecs.getincrementaldecoder("utf-8")("replace"), io.StringIO(), 0

    def take(data: bytes, *, is_last: bool = False) -> None:
        nonlocal passed
        text = decoder.decode(data, is_last)
        kept.write(text[max(0, start - passed) : max(0, end - passed)])
        passed += len(text)

    about = copy_file(directory, name, take, 4 * end)  # a character takes at most four bytes
    take(b"", is_last=True)
    return kept.getvalue(), passed, about


def copy_file(
    directory: Path, name: str, write: Callable[[bytes], object], max_bytes: int, *, is_whole: bool = False
) -> os.stat_result:
    """Pass up to max_bytes of an ordinary file on, in pieces; return what is known of it. Raises OSError for anything else.

    With is_whole, nothing of a larger file is passed on. One that grows meanwhile is cut at max_bytes.
    """
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_beneath(root, name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not make us wait
    finally:
        os.close(root)
    with os.fdopen(fd, "rb", buffering=0) as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{name} is not an ordinary file")
        left = max_bytes if about.st_size <= max_bytes or not is_whole else 0
        while left and (part := file.read(min(left, 1 << 20))):
            write(part)
            left -= len(part)
        return about


def look(directory: Path, max_files: int) -> dict[str, Seen]:
    """Return the ordinary files that may be shown, by their path, at most max_files of them."""
    found: dict[str, Seen] = {}
    for path, about in _walk(directory, shown_only=True):
        if stat.S_ISREG(about.st_mode):
            found[path] = Seen(about.st_ino, about.st_size, about.st_mtime_ns)
            if len(found) >= max_files:
                break
    return found


def measure(directory: Path, max_files: int) -> Usage:
    """Return the disk space and number of everything below a directory; it stops counting beyond max_files."""
    num_bytes = num_files = 0
    try:
        for _path, about in _walk(directory, shown_only=False):
            num_bytes += about.st_blocks * _BLOCK
            num_files += 1
            if num_files > max_files:
                break
    except OSError as error:  # too deep, or closed to us: then nobody can tell what it holds
        return Usage(num_bytes, num_files, f"a directory cannot be read: {error.strerror}")
    return Usage(num_bytes, num_files)


def _walk(directory: Path, *, shown_only: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything below a directory, without following a link.

    With shown_only, hidden and deep ones are left out, and a directory that cannot be read is skipped.
    """
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        todo = [""]
        while todo:
            place = todo.pop()
            for name, about in _list(root, place, is_strict=not shown_only):
                path = f"{place}/{name}" if place else name
                if shown_only and _is_unshown(path, name):
                    continue
                yield path, about
                if stat.S_ISDIR(about.st_mode):
                    todo.append(path)
    finally:
        os.close(root)


def _list(root: int, place: str, *, is_strict: bool) -> list[tuple[str, os.stat_result]]:
    try:
        fd = open_beneath(root, place or ".", os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # removed since it was listed
        return []
    except OSError:
        if is_strict:
            raise
        return []
    found: list[tuple[str, os.stat_result]] = []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    finally:
        os.close(fd)
    return found


def _is_unshown(path: str, name: str) -> bool:
    is_odd = not name.isprintable() or any(0xD800 <= ord(character) <= 0xDFFF for character in name)
    return is_odd or name.startswith(".") or name in _UNSHOWN or path.count("/") >= _MAX_DEPTH
