from __future__ import annotations

from types import SimpleNamespace

import pytest

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


def stream_workers(streams: list[int], *, late: int | None = None) -> list[SimpleNamespace]:
    """Return workers with so many streams of the model `m`, and tokens that choose the last one."""
    return [
        SimpleNamespace(
            slot=slot,
            outstanding_tokens=100 - slot,
            slowness=1.0,
            is_late=slot == late,
            count_streams=lambda model, count=count: count if model == "m" else 0,
        )
        for slot, count in enumerate(streams)
    ]


@pytest.mark.parametrize(
    ("streams", "slot"),
    [([0, 0, 0], 2), ([1, 0, 0], 0), ([1, 3, 0], 1), ([4, 3, 0], 1), ([4, 4, 4], 2), ([0, 9, 0], 2)],
)
def test_streams_of_a_model_gather_up_to_a_number(streams, slot):
    assert choose_for_stream(stream_workers(streams), "m", 4).slot == slot


def test_streams_of_other_models_attract_none():
    assert choose_for_stream(stream_workers([1, 2, 0]), "n", 4).slot == 2


def test_a_late_worker_attracts_no_stream():
    assert choose_for_stream(stream_workers([1, 2, 0], late=1), "m", 4).slot == 0


@pytest.mark.parametrize("most_together", [0, 1])
def test_streams_spread_where_gathering_does_not_pay(most_together):
    assert choose_for_stream(stream_workers([1, 0, 0]), "m", most_together).slot == 2


def test_a_stream_without_a_worker_waits():
    assert choose_for_stream([], "m", 4) is None
