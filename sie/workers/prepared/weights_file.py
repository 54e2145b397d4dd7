"""Writes and opens a file of prepared weights: arrays that are used where they lie, and facts about the model.

    0      magic, bytes of the file, start and bytes of the index (u64 each), SHA-256 of the index, SHA-256 of these
    4096   arrays, each at a multiple of 64
    index  JSON: the place, format and shape of each array, and the facts; to the end of the file

The first 4,096 bytes are written last, and the file gets its name after that. Nobody changes a file that has its name:
it is only ever removed, and a removed file lives as long as a process maps it. So a mapping never loses its pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

SPARE_BYTES: Final = 1 << 30
"""Disk space that a writer leaves free for others."""
_MAGIC: Final = b"SIEWGHT1"
_HEAD: Final = struct.Struct("<8sQQQ32s")
_HEAD_BYTES: Final = 4096
_ALIGNMENT: Final = 64
_WRITE_BYTES: Final = 16 << 20
"""A multiple of a huge page: the system then keeps the file in huge pages, where its file system can."""
_SYNC_BYTES: Final = 64 << 20
_PAGE: Final = mmap.PAGESIZE


class DamagedFileError(Exception):
    """A file that is not a whole file of prepared weights of this user; the text says why."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is in the file. format is the name that its owner gave it; shape is in elements."""

    start: int
    num_bytes: int
    format: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct, frozen=True):
    arrays: dict[str, Place]
    facts: dict[str, Any]


def has_room(place: int | Path, num_bytes: int) -> bool:
    """Return whether the disk of a file or folder keeps its spare bytes with so many more. Raises OSError."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize >= num_bytes + SPARE_BYTES


class Writer:
    """Writes a file under a temporary name, on a thread of its own. `close` removes what was not published."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raise OSError if the folder cannot be written to. More than max_bytes raise OSError ENOSPC later."""
        self._path = path
        self._max_bytes = max_bytes
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        self._fd, self._part = fd, Path(name)
        self._room = bytearray(_WRITE_BYTES)
        self._filled = _HEAD_BYTES
        self._written = 0
        self._synced = 0
        self._num_added = 0
        self._arrays: dict[str, Place] = {}
        self.facts: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, "weights")
        self._writes: list[Future[None]] = []
        self._has_failed = False
        self.on_error: Callable[[OSError], None] = lambda _: None
        """Called once, on the thread, with the first fault of a write: ENOSPC if the disk is short."""

    def add(self, name: str, data: NDArray[np.uint8], form: str, shape: tuple[int, ...]) -> None:
        """Have an array written, given as its bytes (n,), which must stay as they are until `publish`."""
        self._writes.append(self._thread.submit(self._add, name, data, form, shape))

    def _add(self, name: str, data: NDArray[np.uint8], form: str, shape: tuple[int, ...]) -> None:
        if self._has_failed:
            return
        try:
            self._write(bytes(-(self._written + self._filled) % _ALIGNMENT))
            self._arrays[name] = Place(self._written + self._filled, data.nbytes, form, shape)
            self._write(data.data)
            self._num_added += 1
            if self._num_added == len(self._writes):
                self._sync()
        except OSError as error:
            self._has_failed = True
            self.on_error(error)
            raise

    def _sync(self) -> None:
        """Put what was written on the disk now, while the load still compares, so that `publish` waits less."""
        if self._written - self._synced >= _SYNC_BYTES:
            os.fdatasync(self._fd)
            self._synced = self._written

    def publish(self) -> None:
        """Finish the file and give it its name. Raises OSError, also that of an array. No array is added after it."""
        for write in self._writes:
            write.result()
        start = self._written + self._filled
        index = msgspec.json.encode(_Index(self._arrays, self.facts))
        self._write(index)
        self._flush()
        head = _HEAD.pack(_MAGIC, self._written, start, len(index), hashlib.sha256(index).digest())
        os.pwrite(self._fd, head + hashlib.sha256(head).digest(), 0)
        os.fchmod(self._fd, 0o400)
        os.fsync(self._fd)  # ORDER: before the name: a power cut must not leave the name without the bytes
        self._part.replace(self._path)

    def close(self) -> None:
        """Free the file; an unpublished one is removed."""
        self._thread.shutdown(cancel_futures=True)
        os.close(self._fd)
        self._part.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            if not self._filled and len(view) >= _WRITE_BYTES:  # not copied: a copy costs a third of the write
                self._put(view[:_WRITE_BYTES])
                view = view[_WRITE_BYTES:]
                continue
            count = min(len(view), _WRITE_BYTES - self._filled)
            self._room[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == _WRITE_BYTES:
                self._flush()

    def _flush(self) -> None:
        self._put(memoryview(self._room)[: self._filled])
        self._filled = 0

    def _put(self, view: memoryview) -> None:
        if self._written + len(view) > self._max_bytes or not has_room(self._fd, len(view)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while view:
            count = os.pwrite(self._fd, view, self._written)
            self._written += count
            view = view[count:]


class WeightsFile:
    """A published file, mapped read-only. Its arrays keep the mapping alive; a write to one ends the process."""

    def __init__(self, path: Path) -> None:
        """Open and check it. Raises FileNotFoundError, DamagedFileError, and OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
        try:
            with suppress(OSError):  # its owner removes it just now, or the file system has no locks
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as long as the mapping, which keeps the file open
            start, index_bytes, digest = _check_head(fd)
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        text = self._map[start : start + index_bytes]
        if hashlib.sha256(text).digest() != digest:
            raise DamagedFileError("its index was changed")
        index = msgspec.json.decode(text, type=_Index)
        self._places = index.arrays
        self.facts: Mapping[str, Any] = index.facts
        self._owner = np.frombuffer(self._map, np.uint8)
        _advise(self._map, "MADV_HUGEPAGE")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def place(self, name: str) -> Place:
        """Return where an array is. Raises KeyError."""
        return self._places[name]

    def view(self, name: str) -> NDArray[np.uint8]:
        """Return an array's bytes (n,) in the mapping. Raises KeyError.

        NumPy believes that they may be written, because torch warns of other arrays.
        """
        place = self._places[name]
        room = (ctypes.c_uint8 * place.num_bytes).from_address(self._owner.ctypes.data + place.start)
        room.owner = self._owner  # type: ignore[attr-defined]  # the array's base is this object
        return np.frombuffer(memoryview(room), np.uint8)

    def keep_small(self, name: str) -> None:
        """Map an array's pages one by one: of a table, few rows are read. Raises KeyError."""
        place = self._places[name]
        first = -(-place.start // _PAGE) * _PAGE
        _advise(self._map, "MADV_NOHUGEPAGE", first, (place.start + place.num_bytes) // _PAGE * _PAGE - first)

    def forget_pages(self) -> None:
        """Let go of pages that only a load has read. The next read maps a page again, from the system's cache."""
        _advise(self._map, "MADV_DONTNEED")


def _check_head(fd: int) -> tuple[int, int, bytes]:
    """Return the start, bytes and digest of the index. Raises DamagedFileError."""
    known = os.fstat(fd)
    if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid() or known.st_mode & 0o022:
        raise DamagedFileError("it is not a file that only this user may write")
    head = os.pread(fd, _HEAD.size + 32, 0)
    if len(head) != _HEAD.size + 32 or hashlib.sha256(head[:-32]).digest() != head[-32:]:
        raise DamagedFileError("its beginning is not that of prepared weights")
    magic, size, start, index_bytes, digest = _HEAD.unpack(head[:-32])
    if magic != _MAGIC or known.st_size != size or start + index_bytes != size:
        raise DamagedFileError(f"it has {known.st_size} bytes instead of {size}")
    return start, index_bytes, digest


def _advise(mapped: mmap.mmap, name: str, start: int = 0, length: int | None = None) -> None:
    advice = getattr(mmap, name, None)
    if advice is None or (length is not None and length <= 0):
        return
    with suppress(OSError):  # a system without huge pages refuses advice about them
        mapped.madvise(advice, start, len(mapped) - start if length is None else length)
