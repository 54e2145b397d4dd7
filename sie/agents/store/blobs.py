"""Keeps the bytes of files and skills in one folder, each in a file with a random name. Must never use a client's name.

A blob is written beside its place and renamed when it is complete, so a name stands for all of its bytes or for none.
Every call blocks.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from sie.runtime.shared_files import share

_PART: Final = ".part"
_FLAGS: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_BUFFER_BYTES: Final = 1 << 18
_SPARE_BYTES: Final = 8 << 20
"""Room on the disk that blobs leave to the database: without it, nothing could be deleted from a disk that they filled."""
_LATE_S: Final = 86_400.0
"""An unfinished blob, or one that no row names, is deleted after this time."""


class BlobWriter:
    """One blob that is being written. Commit or discard it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / secrets.token_hex(16)
        self._part = self._path.with_suffix(_PART)
        self._file = os.fdopen(os.open(self._part, _FLAGS, 0o600), "wb", buffering=0)
        share(self._part)
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self.num_bytes = 0
        self.is_utf8 = True
        """Whether the bytes so far are UTF-8; the last character may be incomplete until `commit`."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError, for example if the disk is full."""
        view = memoryview(data)
        self._check_room(view.nbytes)
        self.num_bytes += view.nbytes
        self._decode(data)
        while view:
            view = view[self._file.write(view) or 0 :]

    def _check_room(self, nbytes: int) -> None:
        disk = os.fstatvfs(self._file.fileno())
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < nbytes + _SPARE_BYTES:  # some file systems count no blocks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def commit(self) -> str:
        """Put the blob in its place and return its name. Raises OSError, and then nothing is left of it."""
        try:
            return self._commit()
        except BaseException:
            self.discard()
            raise

    def _commit(self) -> str:
        self._decode(b"", final=True)
        os.fsync(self._file.fileno())  # else a crash may leave the name without the bytes
        self._file.close()
        self._part.rename(self._path)
        return self._path.name

    def discard(self) -> None:
        """Delete what was written, unless it was committed."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def as_file(self) -> BinaryIO:
        """Return a file object that writes to the blob and cannot seek; closing it changes nothing."""
        return cast("BinaryIO", io.BufferedWriter(_Raw(self), _BUFFER_BYTES))

    def open_part(self) -> BinaryIO:
        """Open what was written so far for reading."""
        return self._part.open("rb")

    def _decode(self, data: bytes | memoryview, *, final: bool = False) -> None:
        if self.is_utf8:
            try:
                self._utf8.decode(bytes(data), final)
            except UnicodeDecodeError:
                self.is_utf8 = False


class _Raw(io.RawIOBase):
    """Passes the writes of a file object on to a blob."""

    def __init__(self, blob: BlobWriter) -> None:
        super().__init__()
        self._blob = blob

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        self._blob.write(view)
        return view.nbytes


class BlobFolder:
    """The folder of all blobs of a server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self) -> BlobWriter:
        """Begin a new blob. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return BlobWriter(self._directory)

    def add(self, data: bytes) -> BlobWriter:
        """Return a complete blob that only has to be committed. Raises OSError."""
        writer = self.begin()
        try:
            writer.write(data)
        except BaseException:
            writer.discard()
            raise
        return writer

    def find(self, name: str, num_bytes: int) -> Path | None:
        """Return the path of a blob, or None if it is not there or has another size."""
        path = self._directory / name
        try:
            is_whole = bool(name) and path.stat().st_size == num_bytes
        except FileNotFoundError:
            return None
        return path if is_whole else None

    def read(self, name: str, num_bytes: int, wanted_bytes: int) -> bytes | None:
        """Return the first bytes of a blob of this size, or None as `find` does."""
        path = self.find(name, num_bytes)
        if path is None:
            return None
        with path.open("rb") as opened:
            return opened.read(wanted_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """Delete blobs; missing ones are ignored."""
        for name in names:
            (self._directory / name).unlink(missing_ok=True)

    def sweep(self, known: frozenset[str]) -> None:
        """Delete old blobs that nothing names: an earlier process ended while it wrote them, or a database was lost."""
        oldest_s = time.time() - _LATE_S
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as found:
            for entry in found:
                if entry.name not in known and entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                    Path(entry.path).unlink(missing_ok=True)
