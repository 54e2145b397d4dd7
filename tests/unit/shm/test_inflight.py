from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sie.shm.inflight import InflightPage, InflightStatus
from sie.shm.layout import ProtocolError


@pytest.fixture
def page() -> Iterator[InflightPage]:
    made = InflightPage.create(8)
    yield made
    made.close()


def test_new_page_says_idle(page: InflightPage) -> None:
    assert page.read() == InflightStatus(0, 0, 0, "idle", [])


def test_supervisor_reads_what_the_worker_wrote(page: InflightPage) -> None:
    worker = InflightPage.open(os.dup(page.fd))
    for step in range(1, 6):
        running = [(1, 2**64 - 1), (2, step)]
        worker.write(step, 10 * step, 7, "step", running, num_tokens=3)

        assert page.read() == (step, 10 * step, 7, "step", [(1, 2**64 - 1), (2, step)], 3)
    worker.write(6, 100, 0, "step")
    assert page.read() == (6, 100, 0, "step", [], 0)
    worker.close()


def test_writer_that_died_in_the_middle_leaves_the_list_before(page: InflightPage) -> None:
    page.write(1, 10, 5, "step", [(1, 2)])
    before = page.read()
    reader = InflightPage.open(os.dup(page.fd), writable=False)
    died = 0

    class DyingError(Exception):
        pass

    class Entries(list[tuple[int, int]]):
        def __iter__(self):
            yield (9, 9)
            raise DyingError

    for _ in range(2):
        with pytest.raises(DyingError):
            page.write(2, 20, 5, "step", Entries([(9, 9), (9, 9)]))
        died += reader.read() == before
    assert died == 2
    reader.close()


def test_supervisor_resets_a_dead_workers_page_and_the_successor_goes_on(page: InflightPage) -> None:
    worker = InflightPage.open(os.dup(page.fd))
    worker.write(1, 10, 5, "step", [(1, 2)])
    worker.close()
    page.reset()
    assert page.read().phase == "idle"
    successor = InflightPage.open(os.dup(page.fd))
    successor.write(1, 30, 5, "step", [(1, 3)])

    assert page.read().entries == [(1, 3)]
    successor.close()


def test_page_holds_a_full_step_and_refuses_a_larger_one(page: InflightPage) -> None:
    running = [(1, request_id) for request_id in range(page.max_entries)]
    page.write(1, 1, 1, "step", running)

    assert page.max_entries >= 8
    assert page.read().entries == running
    with pytest.raises(ValueError, match="the page holds"):
        page.write(2, 1, 1, "step", [*running, (1, 1)])
    assert page.read().entries == running


def test_writer_faster_than_every_attempt_reads_as_idle(page: InflightPage) -> None:
    page.write(1, 10, 5, "step", [(1, 2)])

    class Racing:
        """A turn that moves on between any two looks."""

        turn = 0

        def __getitem__(self, index: int) -> int:
            self.turn += 1
            return self.turn

    page._words = Racing()
    assert page.read().phase == "idle"


@pytest.mark.parametrize(("offset", "value"), [(0, 9), (64 + 24, 3), (64 + 32, 2**60)])
def test_page_that_no_writer_leaves_is_a_protocol_error(page: InflightPage, offset: int, value: int) -> None:
    page._words[offset // 8] = value

    with pytest.raises(ProtocolError):
        InflightPage.open(os.dup(page.fd), writable=False).read()
