"""The counter pages: each process counts in its own page. The supervisor keeps a page for the process's successor.

A page outlives its writer: the supervisor creates it, a child maps it writable, and the child's successor continues
it. There is one writer at a time and any number of readers, which use `read_only_fd` copies. There are no locks: every
word is eight aligned bytes, written at once. Longer data become valid with one such word, which is written last.
The drawings are in `sie.shm.layout`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from sie.shm.layout import LAYOUT_VERSION, ProtocolError, check_version, round_up
from sie.shm.segment import Segment

Labels = tuple[tuple[str, str], ...]

_HEADER_BYTES: Final = 64
_VERSION, _USED, _DROPPED = 0, 1, 2  # indices of u64 words in the header
_RECORD: Final = Struct("<IB3xII")


class RecordKind(IntEnum):
    """The type of a record's words."""

    COUNTER = 1
    GAUGE = 2
    HISTOGRAM = 3


class Record(NamedTuple):
    """One metric of one process, as `CounterPage.records` read it."""

    kind: RecordKind
    name: str
    labels: Labels
    value: float
    """Value of the counter or gauge; for a histogram, the sum of all observations."""
    bounds: tuple[float, ...]
    """Upper bounds of a histogram's buckets, inclusive, without +Inf."""
    buckets: tuple[int, ...]
    """Number of observations in each bucket, not cumulative; one more than bounds, the last is +Inf."""


class _Meta(msgspec.Struct, array_like=True, frozen=True):
    """The description of a record; its words follow it."""

    name: str
    labels: Labels
    bounds: tuple[float, ...]


_encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(_Meta).decode


class Counter:
    """One float that only grows."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: memoryview[float], index: int) -> None:
        self._words = words
        self._index = index

    def add(self, value: float = 1.0) -> None:
        """Add value, which is not negative."""
        self._words[self._index] += value


class Gauge:
    """One float that goes up and down; starts at 0 in a successor."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: memoryview[float], index: int) -> None:
        self._words = words
        self._index = index

    def set(self, value: float) -> None:
        """Replace the value."""
        self._words[self._index] = value


class Histogram:
    """Counts of observations by size, and their sum."""

    __slots__ = ("observe",)

    def __init__(self, place: _Place, bounds: tuple[float, ...]) -> None:
        words, counts, index = place
        first = index + 1

        def observe(value: float) -> None:
            counts[first + bisect_left(bounds, value)] += 1
            words[index] += value

        self.observe: Callable[[float], None] = observe  # a closure: several times for each request
        """Count a value in the first bucket whose bound is at least that."""


class _Place(NamedTuple):
    """The place of a record's words: the same memory as float64 and as uint64, and the index of the first word."""

    words: memoryview[float]
    counts: memoryview[int]
    first: int


class CounterPage:
    """The metrics of one process slot, over all processes that run in it."""

    __slots__ = ("_counts", "_index", "_known", "_parsed", "_segment", "_words")

    def __init__(self, segment: Segment) -> None:
        """Use `create` or `open`."""
        self._segment = segment
        self._words: memoryview[float] = segment.view.cast("d")
        self._counts: memoryview[int] = segment.view.cast("Q")
        self._known: list[tuple[RecordKind, _Meta, int]] = []  # in the page's order, with the first word's index
        self._index: dict[tuple[RecordKind, _Meta], int] = {}
        self._parsed = _HEADER_BYTES  # end of the records that are in _known

    @classmethod
    def create(cls, nbytes: int) -> CounterPage:
        """Reserve an empty page of nbytes, a multiple of 64. Raises ReservationError."""
        page = cls(Segment.create("counters", nbytes, reopenable=True))
        page._counts[_USED] = _HEADER_BYTES
        page._counts[_VERSION] = LAYOUT_VERSION
        return page

    @classmethod
    def open(cls, fd: int, *, writable: bool) -> CounterPage:
        """Map a page that another process created. Takes over fd. Raises ProtocolError on another layout.

        With writable, this process is the page's only writer from now on: its predecessor is dead. Counters and
        histograms continue from their values; gauges start at 0.
        """
        page = cls(Segment.reopen(fd, writable=writable))
        try:
            check_version(page._counts[_VERSION])
            page._parse()
        except ProtocolError:
            page.close()
            raise
        if writable:
            for kind, _, index in page._known:
                if kind == RecordKind.GAUGE:
                    page._words[index] = 0.0
        return page

    @property
    def fd(self) -> int:
        """The page's memory, for its next writer; stays owned by this object."""
        return self._segment.fd

    @property
    def dropped(self) -> int:
        """Number of requests for a metric that did not fit on the page; its values are not counted."""
        return self._counts[_DROPPED]

    @property
    def is_roomy(self) -> bool:
        """Whether less than half of the page is used; statistics that can do without more records ask for this."""
        return self._parsed * 2 < self._segment.nbytes

    def read_only_fd(self) -> int:
        """Return an fd for a reader, which cannot map the page writable; the caller closes it."""
        return self._segment.read_only_fd()

    def counter(self, name: str, labels: Labels = ()) -> Counter:
        """Return the counter of this name and labels. Keep it: only `add` belongs on a hot path."""
        place = self._place(RecordKind.COUNTER, _Meta(name, labels, ()), 1)
        return Counter(place.words, place.first)

    def gauge(self, name: str, labels: Labels = ()) -> Gauge:
        """Return the gauge of this name and labels. Call it once and keep the gauge, as with a counter."""
        place = self._place(RecordKind.GAUGE, _Meta(name, labels, ()), 1)
        return Gauge(place.words, place.first)

    def histogram(self, name: str, labels: Labels, bounds: tuple[float, ...]) -> Histogram:
        """Return the histogram of this name, labels and ascending bounds. Call it once, as with a counter."""
        place = self._place(RecordKind.HISTOGRAM, _Meta(name, labels, bounds), len(bounds) + 2)
        return Histogram(place, bounds)

    def records(self) -> list[Record]:
        """Return all metrics with their current values, oldest first. Raises ProtocolError on a broken page."""
        self._parse()
        words, counts = self._words, self._counts
        found: list[Record] = []
        for kind, meta, index in self._known:
            end = index + 2 + len(meta.bounds)
            buckets = tuple(counts[index + 1 : end]) if kind == RecordKind.HISTOGRAM else ()
            found.append(Record(kind, meta.name, meta.labels, words[index], meta.bounds, buckets))
        return found

    def reader(self, kind: RecordKind, name: str, labels: Labels = ()) -> Callable[[], float] | None:
        """Return a function that reads one counter or gauge, or None while the page has no such record."""
        self._parse()
        index = self._index.get((kind, _Meta(name, labels, ())))
        if index is None:
            return None
        words = self._words
        return lambda: words[index]

    def close(self) -> None:
        """Unmap the page; its values remain while any process has its fd. Its metrics must not be used any more."""
        for view in (self._words, self._counts):
            view.release()  # metrics share these; in a cycle of references they would keep the mapping for good
        self._segment.close()

    def _place(self, kind: RecordKind, meta: _Meta, num_words: int) -> _Place:
        """Return this metric's words, in a new record if needed; words outside the page when it is full."""
        index = self._index.get((kind, meta))
        if index is None:
            index = self._append(kind, meta, num_words)
        if index:
            return _Place(self._words, self._counts, index)
        self._counts[_DROPPED] += 1
        scratch = memoryview(bytearray(8 * num_words))
        return _Place(scratch.cast("d"), scratch.cast("Q"), 0)

    def _append(self, kind: RecordKind, meta: _Meta, num_words: int) -> int:
        """Write a new record of zeros; return the index of its first word, or 0 when the page is full."""
        label = _encode_meta(meta)
        start = self._parsed
        first = start + _words_offset(len(label))
        end = start + round_up(first - start + 8 * num_words)
        if end > self._segment.nbytes:
            return 0
        view = self._segment.view
        _RECORD.pack_into(view, start, end - start, kind, len(label), num_words)
        view[start + _RECORD.size : start + _RECORD.size + len(label)] = label
        view[first:end] = bytes(end - first)  # a predecessor may have died while writing here
        # ORDER: after the whole record; pairs with `_parse`.
        self._counts[_USED] = end
        self._remember(kind, meta, first // 8, end)
        return first // 8

    def _parse(self) -> None:
        """Read the records that were appended since the last call."""
        # ORDER: before the records; all records up to here were whole when it was written.
        used = self._counts[_USED]
        if not self._parsed <= used <= self._segment.nbytes or used % 64:
            raise ProtocolError(f"{used} bytes used in a page of {self._segment.nbytes} bytes")
        view = self._segment.view
        while self._parsed < used:
            start = self._parsed
            nbytes, kind, label_bytes, num_words = _RECORD.unpack_from(view, start)
            first = start + _words_offset(label_bytes)
            end = start + nbytes
            if not first + 8 * num_words <= end <= used or nbytes % 64:
                raise ProtocolError(f"a record of {nbytes} bytes at {start}")
            label = bytes(view[start + _RECORD.size : start + _RECORD.size + label_bytes])
            try:
                known_kind, meta = RecordKind(kind), _decode_meta(label)
            except (ValueError, msgspec.MsgspecError) as error:
                raise ProtocolError(f"a record at {start} that cannot be decoded") from error
            if num_words != (len(meta.bounds) + 2 if kind == RecordKind.HISTOGRAM else 1):
                raise ProtocolError(f"a record of {num_words} words at {start}")
            self._remember(known_kind, meta, first // 8, end)

    def _remember(self, kind: RecordKind, meta: _Meta, index: int, end: int) -> None:
        self._known.append((kind, meta, index))
        self._index[kind, meta] = index
        self._parsed = end


def _words_offset(label_bytes: int) -> int:
    """Return the offset of a record's words from its start."""
    return (_RECORD.size + label_bytes + 7) & ~7
