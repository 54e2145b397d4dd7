"""Keeps the folder of prepared weights: names, the lock of a writer, and the removal of what was used least recently.

A file's name is `MODEL-VERSION.weights`. MODEL stands for the checkpoint's files and the settings that change its
weights, VERSION for everything else: this code, the libraries, the processor.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from sie.config.sections import Models
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
DIGITS: Final = 24
"""The length of a digest in a file's name."""
_SUFFIX: Final = ".weights"
_DIGEST: Final = f"[0-9a-f]{{{DIGITS}}}"
_FILE: Final = re.compile(rf"{_DIGEST}-{_DIGEST}\{_SUFFIX}")
_PART: Final = re.compile(rf"\.{_FILE.pattern}\..+")
_POLL_S: Final = 0.05
_STALE_PART_S: Final = 3600
"""A temporary file without a writer for this long was left by one that died."""


class Name(NamedTuple):
    """The two halves of a file's name: hexadecimal digests."""

    model: str
    version: str


class LockTimeoutError(Exception):
    """Another process still holds the lock."""


class Lock:
    """The lock of a model's writers, as one process holds it or waits for it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._began_ns = time.time_ns()  # after the file was created

    @property
    def was_given_up(self) -> bool:
        """Whether an earlier holder found, while this process waited, that there will be no file."""
        return self._began_ns < os.fstat(self._fd).st_mtime_ns <= time.time_ns()

    def give_up(self) -> None:
        """Release the lock before the block ends, and tell those who wait that there will be no file."""
        now_ns = time.time_ns()  # the kernel's own time of a change is some milliseconds late
        with suppress(OSError):  # then each of them tries for itself
            os.utime(self._fd, ns=(now_ns, now_ns))  # unlike a byte, this needs no room on the disk
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class Folder:
    """One folder of prepared weights, which several servers may share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file_of(self, name: Name) -> Path:
        """Return the path of a file, which need not exist."""
        return self.path / f"{name.model}-{name.version}{_SUFFIX}"

    def make(self) -> None:
        """Create the folder, for this user only, or warn about one that others may write to. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o022:  # each file is checked when it is read, so this is not refused
            _log.warning("weights_dir: others may write to %s, and so remove its files", self.path)

    @contextmanager
    def lock(self, name: Name, timeout_s: float) -> Iterator[Lock]:
        """Hold the lock of a model's writers within the block; it ends with the process that holds it.

        An error in the block gives it up for those who wait, too. Raises LockTimeoutError, and OSError if the folder
        cannot be written to.
        """
        deadline_s = time.monotonic() + timeout_s
        fd = os.open(self.path / f"{name.model}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        lock = Lock(fd)
        try:
            while not _try_lock(fd):
                if time.monotonic() > deadline_s:
                    raise LockTimeoutError
                time.sleep(_POLL_S)
            try:
                yield lock
            except BaseException:
                lock.give_up()
                raise
        finally:
            os.close(fd)

    def mark_used(self, path: Path) -> None:
        """Note that a file is used now."""
        with suppress(OSError):  # the file may be gone, or belong to a server that reads only
            os.utime(path)

    def remove_surplus(self, newest: Name, max_bytes: int) -> None:
        """Remove other versions of a model, and the files used least recently until the rest fit into max_bytes.

        The newest stays, and so does a file that a process has open: its space would not become free, and the process's
        successor would prepare it again.
        """
        kept = self.file_of(newest)
        sizes: dict[Path, os.stat_result] = {}
        for path in _matching(self.path, _FILE):
            with suppress(OSError):
                sizes[path] = path.stat()
        for path in [path for path in sizes if path.name.startswith(f"{newest.model}-") and path != kept]:
            self._remove(path, sizes)
        for path in sorted(sizes, key=lambda path: sizes[path].st_mtime_ns):
            if sum(known.st_size for known in sizes.values()) <= max_bytes:
                break
            if path != kept:
                self._remove(path, sizes)
        self._remove_parts()

    def _remove(self, path: Path, sizes: dict[Path, os.stat_result]) -> None:
        with suppress(OSError), _unused(path):
            path.unlink()
            _log.info("removed the prepared weights %s: %d MiB", path.name, sizes.pop(path).st_size >> 20)

    def _remove_parts(self) -> None:
        for path in _matching(self.path, _PART):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_PART_S:
                    path.unlink()


def weights_folder(models: Models) -> Path:
    """Return the folder of prepared weights under these settings."""
    return Path(models.weights_dir or Path(models.cache_dir or ".", "weights"))


def measure_folder(path: Path) -> tuple[int, int]:
    """Return the number of files of prepared weights in a folder, and their bytes; none if there is no folder."""
    sizes: list[int] = []
    for file in _matching(path, _FILE):
        with suppress(OSError):
            sizes.append(file.stat().st_size)
    return len(sizes), sum(sizes)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files with these names. A folder that the user names may hold other files, which are left alone."""
    return [path for path in folder.glob("*") if pattern.fullmatch(path.name)]


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    """Lock a file against new readers within the block. Raises OSError, BlockingIOError if a process has it open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
