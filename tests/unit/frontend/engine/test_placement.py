from __future__ import annotations

from types import SimpleNamespace

import pytest

from sie.frontend.engine.placement import choose_worker


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
    workers = [SimpleNamespace(slot=number, outstanding_tokens=tokens, is_late=False) for number, tokens in outstanding]
    for found in (choose_worker(workers), choose_worker(iter(reversed(workers)))):
        assert (found.slot if found is not None else None) == slot


@pytest.mark.parametrize(("late", "slot"), [({0}, 1), ({0, 1}, 2), ({1, 2}, 0), ({0, 1, 2}, 0)])
def test_late_worker_is_chosen_only_if_all_are_late(late, slot):
    workers = [SimpleNamespace(slot=n, outstanding_tokens=10 * n, is_late=n in late) for n in range(3)]
    found = choose_worker(workers)
    assert found is not None
    assert found.slot == slot
