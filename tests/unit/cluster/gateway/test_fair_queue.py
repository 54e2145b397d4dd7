"""Turns of API keys: by weight and cost, in order within a key, without credit for idle time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sie.cluster.gateway.fair_queue import Caller, FairQueue

A, B, HEAVY = Caller("a"), Caller("b"), Caller("heavy", 3)


def filled(**counts: tuple[Caller, int, float]) -> FairQueue[tuple[str, int]]:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for name, (caller, count, cost) in counts.items():
        for number in range(count):
            queue.add(caller, (name, number), cost)
    return queue


def taken(queue: FairQueue[tuple[str, int]], count: int) -> Counter[str]:
    return Counter(queue.pop()[0] for _ in range(count))


def test_keys_share_by_weight():
    assert taken(filled(a=(A, 100, 1.0), heavy=(HEAVY, 100, 1.0)), 80) == {"a": 20, "heavy": 60}


def test_keys_share_what_items_cost():
    shares = taken(filled(large=(A, 100, 10.0), small=(B, 100, 1.0)), 66)
    assert shares == {"large": 6, "small": 60}


def test_a_key_that_was_idle_saves_up_nothing_and_waits_for_one_item_of_the_others():
    queue = filled(a=(A, 100, 1.0))
    taken(queue, 50)
    for number in range(100):
        queue.add(B, ("b", number), 1.0)
    assert taken(queue, 40) == {"a": 20, "b": 20}


def test_the_number_of_items_before_a_new_one():
    queue = filled(a=(A, 100, 1.0), heavy=(HEAVY, 2, 1.0))
    assert queue.num_before(A) == 102
    assert queue.num_before(B) == 1 + 2
    assert FairQueue[int]().num_before(B) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_nothing_is_lost_or_taken_twice_and_each_key_keeps_its_order(steps: list[tuple[str, bool]]):
    queue: FairQueue[int] = FairQueue()
    waiting: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number, (name, is_discarded) in enumerate(steps):
        queue.add(Caller(name), number, 1.0)
        waiting[name].append(number)
        if is_discarded:
            oldest = waiting[name].pop(0)
            queue.discard(Caller(name), oldest)
            queue.discard(Caller(name), oldest)
    assert len(queue) == sum(map(len, waiting.values()))
    found = [queue.pop() for _ in range(len(queue))]
    assert sorted(found) == sorted(number for numbers in waiting.values() for number in numbers)
    for numbers in waiting.values():
        assert [number for number in found if number in numbers] == numbers
