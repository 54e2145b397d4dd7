"""The board on which workers lend their cores to each other: who needs a core now, and who uses it.

All workers map it writable, and frontends read it. A worker writes that it needs its cores before a step, and that it does not before it waits
for work. The compiled library claims a core for its process with one compare-and-swap (`sie/native/src/team.cpp`). A dead
worker's words are cleared by the supervisor. The words are advice: a wrong one costs time, never a result.
"""

from __future__ import annotations

import ctypes
from typing import Final

from sie.shm.layout import ALIGNMENT, LAYOUT_VERSION, ProtocolError, check_version
from sie.shm.segment import Segment

_LINE_WORDS: Final = ALIGNMENT // 4
_VERSION, _NUM_WORKERS = 0, 1  # indices of u32 words in the first line


class CoreBoard:
    """One word for each worker, and one for each core, each in a cache line of its own. Cores are named by their index."""

    __slots__ = ("_num_workers", "_segment", "_words")

    def __init__(self, segment: Segment) -> None:
        """Use `create` or `open`."""
        self._segment = segment
        self._words = segment.view.cast("I")
        self._num_workers = self._words[_NUM_WORKERS]

    @classmethod
    def create(cls, num_workers: int, num_cores: int) -> CoreBoard:
        """Reserve a board on which nobody needs or uses a core. Raises ReservationError."""
        segment = Segment.create("cores", (1 + num_workers + num_cores) * ALIGNMENT, reopenable=True)
        words = segment.view.cast("I")
        words[_VERSION], words[_NUM_WORKERS] = LAYOUT_VERSION, num_workers
        return cls(segment)

    @classmethod
    def open(cls, fd: int, *, writable: bool = True) -> CoreBoard:
        """Map a board that another process created. Takes over fd. Raises ProtocolError on another layout."""
        segment = Segment.reopen(fd, writable=writable)
        try:
            check_version(segment.view.cast("I")[_VERSION])
            board = cls(segment)
            if 1 + board._num_workers > len(segment.view) // ALIGNMENT:
                raise ProtocolError(
                    f"a board of {len(segment.view)} bytes has no lines of {board._num_workers} workers"
                )
        except ProtocolError:
            segment.close()
            raise
        return board

    @property
    def fd(self) -> int:
        """The board's memory, to send to workers; stays owned by this object."""
        return self._segment.fd

    def read_only_fd(self) -> int:
        """Return a descriptor for a reader, which cannot map the board writable; the caller closes it."""
        return self._segment.read_only_fd()

    @property
    def num_cores(self) -> int:
        """Number of cores on the board."""
        return len(self._words) // _LINE_WORDS - 1 - self._num_workers

    def set_needed(self, worker: int, needed: bool) -> None:
        """Publish whether a worker needs its cores. Only that worker may call it, or the supervisor for a dead one."""
        self._words[(1 + worker) * _LINE_WORDS] = int(needed)

    def is_needed(self, worker: int) -> bool:
        """Return whether a worker needs its cores."""
        return bool(self._words[(1 + worker) * _LINE_WORDS])

    def forget(self, worker: int) -> None:
        """Free a dead worker's cores, and those of others that it used; for the supervisor."""
        self.set_needed(worker, needed=False)
        for core in range(self.num_cores):
            at = self._line_of(core) * _LINE_WORDS
            if self._words[at] == worker + 1:
                self._words[at] = 0

    def needed_address(self, worker: int) -> int:
        """Return the address of a worker's word in this process; valid until `close`."""
        return self._address(1 + worker)

    def borrower_address(self, core: int) -> int:
        """Return the address of a core's word in this process: the number of its user plus one, 0 for nobody."""
        return self._address(self._line_of(core))

    def close(self) -> None:
        """Unmap the board."""
        self._words = memoryview(b"")
        self._segment.close()

    def _line_of(self, core: int) -> int:
        return 1 + self._num_workers + core

    def _address(self, line: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._segment.view)) + line * ALIGNMENT
