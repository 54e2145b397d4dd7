"""Makes every operating system call on shared memory: reserve, seal, map, and check whether it will fit.

A segment is a memfd. It has no name that could leak, be guessed or be removed by others. It does not depend on the size
of /dev/shm, and it disappears with its last user, even after a crash. Every page is reserved before the first use,
because a write to an unavailable page is a SIGBUS instead of an exception.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

from sie.shm.layout import ProtocolError
from sie.values.cgroup_paths import SYSFS, cgroup_paths, read_lines

F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; missing from `fcntl` up to Python 3.13."""

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OWNER_SEALS: Final = _SIZE_SEALS | F_SEAL_FUTURE_WRITE
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})
_EMPTY: Final = memoryview(b"")
_LIMIT_FILES: Final = ("memory.max", "memory.current", "inactive_file")
_LIMIT_FILES_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class ReservationError(Exception):
    """The requested memory is not available; the message names the needed bytes."""

    def __init__(self, message: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class Segment:
    """One mapped block of shared memory.

    view is a memoryview of unsigned bytes over the whole block: writable for its owner, read-only for a peer. fd is the
    owner's descriptor, to send to peers, and -1 for a peer. Callers must not use their views after `close`.
    """

    __slots__ = ("_map", "fd", "nbytes", "view")

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
        self.fd = fd
        self.nbytes = nbytes
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, nbytes: int, *, reopenable: bool = False) -> Segment:
        """Reserve nbytes of zeroed memory, map it writable and seal it against every other writer.

        name is only a label in /proc. With reopenable, a later process may map it writable again (`reopen`).
        Raises ReservationError when the memory is not available.
        """
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least one byte, not {nbytes}")
        # For an impossible reservation, the kernel would first use all its pages, and then fail or kill.
        check_reservation(nbytes)
        fd = os.memfd_create(f"sie-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            segment = cls(fd, nbytes, writable=True)
            # ORDER: after our own mapping; FUTURE_WRITE forbids every later writable mapping, also ours.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS if reopenable else _OWNER_SEALS)
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_SPACE:
                reason = os.strerror(error.errno)
                raise ReservationError(f"cannot reserve {nbytes} bytes for {name}: {reason}", nbytes) from error
            raise
        return segment

    @classmethod
    def map_peer(cls, fd: int, nbytes: int) -> Segment:
        """Map a peer's segment read-only, after checking that it cannot be shrunk or written through fd.

        Always closes fd, because the mapping is enough. Raises ProtocolError.
        """
        try:
            _check_seals(fd, _OWNER_SEALS)
            _check_size(fd, nbytes)
            segment = cls(fd, nbytes, writable=False)
        finally:
            os.close(fd)
        segment.fd = -1
        return segment

    @classmethod
    def reopen(cls, fd: int, *, writable: bool) -> Segment:
        """Map a segment that was created `reopenable`; its size is the file's. Closes fd when it raises."""
        try:
            _check_seals(fd, _SIZE_SEALS)
            return cls(fd, os.fstat(fd).st_size, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def read_only_fd(self) -> int:
        """Return a new descriptor of the same memory that cannot be mapped writable; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap and close; a second call does nothing. Memory of a live view stays mapped until the view is gone."""
        if self._map is None:
            return
        mapped, self._map = self._map, None
        view, self.view = self.view, _EMPTY
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            view.release()
            mapped.close()
        except BufferError:
            # An array of the caller is still alive. It keeps the mapping, which ends with it.
            return


def _check_seals(fd: int, wanted: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the peer's memory is not a memfd that can be sealed") from error
    if seals & wanted != wanted:
        raise ProtocolError(f"the peer's memory has seals {seals:#x}, {wanted:#x} are needed")


def _check_size(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size != nbytes or nbytes <= 0:
        raise ProtocolError(f"the peer's memory has {size} bytes, {nbytes} were announced")


def doorbell() -> int:
    """Return a new non-blocking eventfd with count 0."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def check_reservation(total_bytes: int, *, proc: Path = Path("/proc"), sysfs: Path = SYSFS) -> None:
    """Raise ReservationError when total_bytes more exceed the free memory or this control group's limit.

    Call it once at start with the sum of all segments, because a control group over its limit kills processes.
    """
    for name, _, free_bytes in _memory_limits(proc, sysfs):
        if total_bytes > free_bytes:
            raise ReservationError(
                f"shared memory needs {total_bytes} bytes, but {name} leaves {max(free_bytes, 0)} bytes", total_bytes
            )


def read_memory(*, proc: Path = Path("/proc"), sysfs: Path = SYSFS) -> tuple[int, int] | None:
    """Return (total, available) bytes of the host or the control group, the one with less left; None if unknown."""
    limits = [(left, total) for _, total, left in _memory_limits(proc, sysfs)]
    if not limits:
        return None
    left, total = min(limits)
    return total, max(0, left)


def _memory_limits(proc: Path, sysfs: Path) -> list[tuple[str, int, int]]:
    """Return (name, total bytes, bytes left) of the host's memory and of every control group with a limit."""
    host = {line.split(":")[0]: line.split()[1] for line in read_lines(proc / "meminfo") if line.startswith("Mem")}
    groups = _cgroup_limits(proc, sysfs)
    if "MemAvailable" not in host:
        return groups
    available = int(host["MemAvailable"])
    return [("available memory", int(host.get("MemTotal", available)) * 1024, available * 1024), *groups]


def _cgroup_limits(proc: Path, sysfs: Path) -> list[tuple[str, int, int]]:
    """Return (limit's name, limit, bytes left under it) for this process's control group and all its parents."""
    found: list[tuple[str, int, int]] = []
    for group in cgroup_paths("memory", proc=proc, sysfs=sysfs):
        names = _LIMIT_FILES if group.is_unified else _LIMIT_FILES_V1
        for directory in group.with_parents():
            limit = _group_limit(directory, *names)
            if limit is not None:
                found.append((names[0], *limit))
    return found


def _group_limit(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[int, int] | None:
    """Return the limit, and the limit - usage + cache that the kernel can drop at once; None without a limit."""
    limit = read_lines(directory / limit_name)
    usage = read_lines(directory / usage_name)
    if not limit or not usage or not limit[0].isdigit():
        return None
    cache = [line.split()[1] for line in read_lines(directory / "memory.stat") if line.startswith(cache_name + " ")]
    return int(limit[0]), int(limit[0]) - int(usage[0]) + (int(cache[0]) if cache else 0)
