from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie.shm.layout import ProtocolError
from sie.shm.pages import CounterPage, Record, RecordKind

_BOUNDS = (0.1, 1.0)


@pytest.fixture
def page() -> Iterator[CounterPage]:
    made = CounterPage.create(4096)
    yield made
    made.close()


def _reader(page: CounterPage) -> CounterPage:
    return CounterPage.open(page.read_only_fd(), writable=False)


def _successor(page: CounterPage) -> CounterPage:
    return CounterPage.open(os.dup(page.fd), writable=True)


def _fill(page: CounterPage) -> None:
    page.counter("requests", (("model", "m"), ("status", "200"))).add()
    page.gauge("depth").set(4)
    latency = page.histogram("latency", (("model", "m"),), _BOUNDS)
    for value in (0.05, 0.1, 0.5, 7.0):
        latency.observe(value)


def test_one_value_can_be_followed_from_when_it_is_there(page: CounterPage) -> None:
    reader = _reader(page)
    labels = (("key", "a"),)
    assert reader.reader(RecordKind.COUNTER, "n", labels) is None
    counter = page.counter("n", labels)
    assert reader.reader(RecordKind.COUNTER, "n", (("key", "b"),)) is None
    assert reader.reader(RecordKind.GAUGE, "n", labels) is None
    read = reader.reader(RecordKind.COUNTER, "n", labels)
    assert read is not None
    counter.add(3)
    assert read() == 3.0


def test_reader_sees_names_labels_and_values(page: CounterPage) -> None:
    reader = _reader(page)
    _fill(page)

    assert reader.records() == [
        Record(RecordKind.COUNTER, "requests", (("model", "m"), ("status", "200")), 1.0, (), ()),
        Record(RecordKind.GAUGE, "depth", (), 4.0, (), ()),
        Record(RecordKind.HISTOGRAM, "latency", (("model", "m"),), 7.65, _BOUNDS, (2, 1, 1)),
    ]
    reader.close()


def test_reader_sees_records_that_came_after_its_first_look(page: CounterPage) -> None:
    reader = _reader(page)
    page.counter("a").add(1)
    assert [record.name for record in reader.records()] == ["a"]
    page.counter("b").add(2)
    page.counter("a").add(2)

    assert [(record.name, record.value) for record in reader.records()] == [("a", 3.0), ("b", 2.0)]
    reader.close()


def test_reader_cannot_write(page: CounterPage) -> None:
    page.counter("a")
    reader = _reader(page)

    with pytest.raises(TypeError):
        reader.counter("a").add()
    reader.close()


def test_same_name_and_labels_are_one_record_and_others_are_not(page: CounterPage) -> None:
    page.counter("a", (("m", "1"),)).add()
    page.counter("a", (("m", "1"),)).add()
    page.counter("a", (("m", "2"),)).add()
    page.gauge("a", (("m", "1"),)).set(9)

    assert [record.value for record in page.records()] == [2.0, 1.0, 9.0]


def test_successor_goes_on_from_counters_and_histograms_and_resets_gauges(page: CounterPage) -> None:
    _fill(page)
    successor = _successor(page)
    successor.counter("requests", (("model", "m"), ("status", "200"))).add(2)
    successor.histogram("latency", (("model", "m"),), _BOUNDS).observe(0.5)

    counter, gauge, histogram = page.records()
    assert (counter.value, gauge.value, histogram.buckets) == (3.0, 0.0, (2, 2, 1))
    successor.close()


def test_record_that_its_writer_did_not_finish_is_not_there(page: CounterPage) -> None:
    page.counter("a").add()
    used = page._parsed
    page._segment.view[used : used + 256] = b"\xff" * 256
    successor = _successor(page)
    assert [record.name for record in successor.records()] == ["a"]
    successor.histogram("h", (), _BOUNDS)

    assert page.records()[1].buckets == (0, 0, 0)
    successor.close()


def test_full_page_counts_what_it_drops_and_never_raises() -> None:
    page = CounterPage.create(256)
    page.counter("kept").add()
    for number in range(10):
        page.counter(f"number-{number}").add()
        page.histogram(f"histogram-{number}", (), _BOUNDS).observe(1.0)

    assert page.dropped == 20 + 1 - len(page.records())
    page.counter("kept").add()
    assert page.records()[0].value == 2.0
    page.close()


def test_closed_page_is_unmapped_although_a_cycle_holds_its_metrics() -> None:
    """A view that a cycle keeps is never released by Python 3.11, and so the mapping and its descriptor stayed."""

    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("sie-counters")

    before = num_mapped()
    page = CounterPage.create(4096)
    metrics: list[object] = [page.counter("a"), page.gauge("b"), page.histogram("c", (), _BOUNDS), page]
    metrics.append(metrics)
    assert num_mapped() == before + 1
    page.close()
    page.close()
    assert num_mapped() == before


def test_words_are_aligned_and_little_endian(page: CounterPage) -> None:
    page.counter("odd-length-name").add(2.5)
    place = page._place(*next((kind, meta, 1) for kind, meta, _ in page._known))

    assert struct.unpack_from("<d", page._segment.view, 8 * place.first) == (2.5,)


@pytest.mark.parametrize(("word", "value"), [(0, 99), (1, 63), (1, 100), (1, 8192), (1, 2**63)])
def test_header_that_no_writer_leaves_is_a_protocol_error(page: CounterPage, word: int, value: int) -> None:
    page._counts[word] = value

    with pytest.raises(ProtocolError):
        _reader(page)


@pytest.mark.parametrize(
    ("field", "value"), [(0, 0), (0, 65), (0, 2**32 - 1), (4, 9), (8, 2**32 - 1), (12, 2), (12, 2**32 - 1)]
)
def test_record_that_no_writer_leaves_is_a_protocol_error(page: CounterPage, field: int, value: int) -> None:
    page.counter("a")
    page._segment.view[64 + field : 68 + field] = struct.pack("<I", value)

    with pytest.raises(ProtocolError):
        _reader(page)
