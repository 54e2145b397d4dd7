from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sie.frontend.engine.placement import choose_for_stream, choose_worker, measure_slowness


@pytest.mark.parametrize(
    ("outstanding", "slot"),
    [
        ([], None),
        ([(3, 100)], 3),
        ([(0, 10), (1, 5), (2, 7)], 1),
        ([(2, 0), (1, 0), (5, 0)], 1),
        ([(0, 1 << 40), (9, 1 << 39)], 9),
    ],
)
def test_fewest_tokens_win_and_the_lowest_slot_of_equals(outstanding, slot):
    workers = [
        SimpleNamespace(slot=number, outstanding_tokens=tokens, slowness=1.0, is_late=False)
        for number, tokens in outstanding
    ]
    for found in (choose_worker(workers), choose_worker(iter(reversed(workers)))):
        assert (found.slot if found is not None else None) == slot


@pytest.mark.parametrize(("late", "slot"), [({0}, 1), ({0, 1}, 2), ({1, 2}, 0), ({0, 1, 2}, 0)])
def test_late_worker_is_chosen_only_if_all_are_late(late, slot):
    workers = [SimpleNamespace(slot=n, outstanding_tokens=10 * n, slowness=1.0, is_late=n in late) for n in range(3)]
    found = choose_worker(workers)
    assert found is not None
    assert found.slot == slot


def test_slow_worker_is_sent_less_and_an_idle_one_is_always_taken():
    workers = [
        SimpleNamespace(slot=slot, outstanding_tokens=tokens, slowness=slowness, is_late=False)
        for slot, (tokens, slowness) in enumerate([(100, 1.0), (40, 2.0), (40, 4.0)])
    ]
    assert choose_worker(workers).slot == 1
    workers[2].outstanding_tokens = 0
    assert choose_worker(workers).slot == 2


@pytest.mark.parametrize(
    ("paces", "slowness"),
    [([], []), ([0.0, 0.0], [1, 1]), ([10.0, 20.0, 0.0], [1, 2, 1]), ([5.0, 500.0], [1, 4])],
)
def test_slowness_is_relative_to_the_fastest_and_bounded(paces, slowness):
    assert measure_slowness(paces) == slowness


def stream_workers(streams: list[int], *, late: int | None = None, busy: int | None = None) -> list[SimpleNamespace]:
    """Return workers with so many streams of the model `m`, of ten tokens each; `busy` needs its cores without any."""
    return [
        SimpleNamespace(
            slot=slot,
            outstanding_tokens=10 * count,
            slowness=1.0,
            is_late=slot == late,
            is_free=not count and slot != busy,
            count_streams=lambda model, count=count: count if model == "m" else 0,
        )
        for slot, count in enumerate(streams)
    ]


def choose(workers: list[SimpleNamespace], *, model: str = "m", most: int = 4, num_tokens: int = 10, room: int = 1000):
    return choose_for_stream(workers, model, most_together=most, num_tokens=num_tokens, max_tokens=room)


@pytest.mark.parametrize(
    ("streams", "slot"),
    [([0, 0, 0], 0), ([0, 1, 0], 1), ([1, 3, 0, 0], 1), ([4, 3, 0, 0], 1), ([4, 0, 0], 1), ([0, 9, 0], 0)],
)
def test_streams_of_a_model_gather_up_to_a_number(streams, slot):
    assert choose(stream_workers(streams)).slot == slot


@pytest.mark.parametrize("streams", [[2, 1], [3, 2, 0], [3, 1, 1], [1, 3, 2, 0]])
def test_streams_gather_only_where_each_busy_worker_can_borrow(streams):
    workers = stream_workers(streams)
    assert choose(workers) is choose_worker(workers)


def test_a_core_that_other_work_needs_is_not_free():
    workers = stream_workers([1, 0, 0], busy=1)
    assert choose(workers).slot == 1
    assert choose(stream_workers([1, 0, 0, 0], busy=1)).slot == 0


@pytest.mark.parametrize(("num_tokens", "room", "slot"), [(10, 30, 0), (11, 30, 1), (100, 30, 1)])
def test_streams_gather_as_far_as_the_room_for_their_tokens(num_tokens, room, slot):
    assert choose(stream_workers([2, 0]), num_tokens=num_tokens, room=room).slot == slot


@settings(max_examples=200)
@given(num_workers=st.integers(1, 5), tokens=st.lists(st.integers(1, 600), min_size=1, max_size=120))
def test_a_crowd_has_all_workers_and_none_more_than_its_share(num_workers, tokens):
    most, room = 16, 2000
    workers = stream_workers([0] * num_workers)
    placed = [0] * num_workers
    for num_tokens in tokens:
        worker = choose(workers, most=most, num_tokens=num_tokens, room=room)
        placed[worker.slot] += 1
        worker.count_streams = lambda _model, count=placed[worker.slot]: count
        worker.outstanding_tokens += num_tokens
        worker.is_free = False
    assert all(placed) or len(tokens) < most * num_workers
    outstanding = [worker.outstanding_tokens for worker in workers]
    assert max(outstanding) <= max(room, sum(tokens) / num_workers + max(tokens))


def test_streams_of_other_models_attract_none():
    assert choose(stream_workers([1, 2, 0]), model="n").slot == 2


def test_a_late_worker_attracts_no_stream():
    assert choose(stream_workers([1, 2, 0, 0, 0], late=1)).slot == 0


@pytest.mark.parametrize("most_together", [0, 1])
def test_streams_spread_where_gathering_does_not_pay(most_together):
    assert choose(stream_workers([1, 0, 0]), most=most_together).slot == 1


def test_a_stream_without_a_worker_waits():
    assert choose([]) is None
