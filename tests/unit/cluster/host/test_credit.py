"""How much a host takes: what its engine has room for, by tokens, and no more."""

from __future__ import annotations

from sie.cluster.host.credit import Credit


def measured(num_tokens: int) -> Credit:
    """Return the credit of a host that has answered one item of so many tokens."""
    credit = Credit(max_items=10_000)
    credit.begin()
    credit.end(num_tokens)
    return credit


def test_a_host_that_has_answered_nothing_takes_a_few_items_and_learns_their_cost_from_the_first():
    credit = Credit(max_items=10_000)
    assert (credit.room(0, 1024, 1), credit.room(0, 1024, 2)) == (8, 16)
    for _ in range(8):
        credit.begin()
    assert credit.room(0, 1024, 1) == 0
    credit.end(512)
    assert credit.room(7 * 512, 1024, 1) == 0
    assert measured(512).room(0, 1024, 1) == 4


def test_an_idle_host_takes_two_steps_of_work_and_a_busy_one_nothing():
    credit = measured(1)
    assert credit.room(0, 1024, 1) == 2048
    assert credit.room(0, 1024, 2) == 4096
    assert credit.room(2048, 1024, 1) == 0
    assert credit.room(0, 1024, 0) == 0


def test_long_items_are_fewer():
    credit = Credit(max_items=10_000)
    for _ in range(200):
        credit.begin()
        credit.end(512)
    assert 4 <= credit.room(0, 1024, 1) <= 5


def test_one_item_is_taken_though_it_is_larger_than_the_room():
    credit = Credit(max_items=10)
    for _ in range(200):
        credit.begin()
        credit.end(100_000)
    assert credit.room(0, 1024, 1) == 1
    credit.begin()
    assert credit.room(0, 1024, 1) == 0


def test_items_that_run_count_against_the_limit():
    credit = Credit(max_items=3)
    assert credit.room(0, 1024, 1) == 3
    credit.begin()
    credit.begin()
    assert credit.room(0, 1024, 1) == 1
