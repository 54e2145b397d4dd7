"""The page of one worker's running requests: written before each step, read by the supervisor at any time.

When the worker dies, only requests on this page are suspects. While it lives, the times here show whether it is stuck.
There are two slots, and the valid one is never written. So a reader always finds a whole list, even after the writer
was killed.
"""

from __future__ import annotations

from collections.abc import Collection
from struct import Struct
from typing import Final, Literal, NamedTuple

from sie.shm.layout import LAYOUT_VERSION, ProtocolError, check_version, round_up
from sie.shm.segment import Segment

Phase = Literal["idle", "step"]

_PHASES: Final[tuple[Phase, ...]] = ("idle", "step")
_HEADER_BYTES: Final = 64
_VERSION, _TURN = 0, 1  # indices of u64 words in the header
_SLOT: Final = Struct("<QQQQQQ16x")
_ENTRY: Final = Struct("<I4xQ")
_READ_ATTEMPTS: Final = 16


class InflightEntry(NamedTuple):
    """One request that a worker is running."""

    frontend: int
    request_id: int


class InflightStatus(NamedTuple):
    """The last status of a worker. Times are on CLOCK_MONOTONIC."""

    step_seq: int
    started_ns: int
    allowed_ns: int
    phase: Phase
    entries: list[InflightEntry]
    num_tokens: int = 0
    """Tokens of the step."""


class InflightPage:
    """The running requests of one worker. One writer at a time: the worker, or the supervisor after its death."""

    __slots__ = ("_segment", "_slot_bytes", "_words", "max_entries")

    def __init__(self, segment: Segment) -> None:
        """Use `create` or `open`."""
        self._segment = segment
        self._words = segment.view.cast("Q")
        self._slot_bytes = (segment.nbytes - _HEADER_BYTES) // 2
        self.max_entries = (self._slot_bytes - _SLOT.size) // _ENTRY.size
        """Most requests that one step may run."""

    @classmethod
    def create(cls, max_entries: int) -> InflightPage:
        """Reserve a page that says idle, for steps of at least max_entries requests. Raises ReservationError."""
        slot_bytes = round_up(_SLOT.size + max_entries * _ENTRY.size)
        page = cls(Segment.create("inflight", _HEADER_BYTES + 2 * slot_bytes, reopenable=True))
        page._words[_VERSION] = LAYOUT_VERSION
        return page

    @classmethod
    def open(cls, fd: int, *, writable: bool = True) -> InflightPage:
        """Map a page that another process created. Takes over fd. Raises ProtocolError on another layout."""
        page = cls(Segment.reopen(fd, writable=writable))
        try:
            check_version(page._words[_VERSION])
        except ProtocolError:
            page.close()
            raise
        return page

    @property
    def fd(self) -> int:
        """The page's memory, for its writer; stays owned by this object."""
        return self._segment.fd

    def write(
        self,
        step_seq: int,
        started_ns: int,
        allowed_ns: int,
        phase: Phase,
        running: Collection[tuple[int, int]] = (),
        *,
        num_tokens: int = 0,
    ) -> None:
        """Replace the page's status. running contains a (frontend, request_id) for each request of the step.

        Raises ValueError on more than max_entries requests.
        """
        if len(running) > self.max_entries:
            raise ValueError(f"{len(running)} requests in a step, the page holds {self.max_entries}")
        turn = self._words[_TURN] + 1
        start = _HEADER_BYTES + (turn & 1) * self._slot_bytes
        view = self._segment.view
        _SLOT.pack_into(view, start, step_seq, started_ns, allowed_ns, _PHASES.index(phase), len(running), num_tokens)
        start += _SLOT.size
        for frontend, request_id in running:
            _ENTRY.pack_into(view, start, frontend, request_id)
            start += _ENTRY.size
        # ORDER: after the slot's bytes; from here this slot is the valid one and the other may be written.
        self._words[_TURN] = turn

    def reset(self) -> None:
        """Set idle; for the supervisor, when the worker is dead and its running requests have been read."""
        self.write(0, 0, 0, "idle")

    def read(self) -> InflightStatus:
        """Return the last status. Raises ProtocolError on a page that no writer could have written.

        Returns idle if the writer was faster than every attempt to copy the page: it is alive and not stuck.
        """
        for _ in range(_READ_ATTEMPTS):
            turn = self._words[_TURN]
            start = _HEADER_BYTES + (turn & 1) * self._slot_bytes
            slot = bytes(self._segment.view[start : start + self._slot_bytes])
            # ORDER: after the copy; the writer writes this slot again only after it has changed `turn`.
            if self._words[_TURN] == turn:
                return self._unpack(slot)
        return InflightStatus(0, 0, 0, "idle", [])

    def close(self) -> None:
        """Unmap the page; its content remains while any process has its fd."""
        self._words = memoryview(b"")
        self._segment.close()

    def _unpack(self, slot: bytes) -> InflightStatus:
        step_seq, started_ns, allowed_ns, phase, count, num_tokens = _SLOT.unpack_from(slot)
        if count > self.max_entries or phase >= len(_PHASES):
            raise ProtocolError(f"phase {phase} with {count} requests in a page of {self.max_entries}")
        packed = slot[_SLOT.size : _SLOT.size + count * _ENTRY.size]
        entries = [InflightEntry._make(fields) for fields in _ENTRY.iter_unpack(packed)]
        return InflightStatus(step_seq, started_ns, allowed_ns, _PHASES[phase], entries, num_tokens)
