"""The room for work items that a gateway's API keys share."""

from __future__ import annotations

import pytest

from sie.cluster.gateway.fair_queue import Caller
from sie.cluster.gateway.room import Room
from sie.values.errors import Overloaded, Unavailable

A, B = Caller("a", 1), Caller("b", 1)


def test_a_request_over_the_limit_enters_only_an_empty_gateway():
    room = Room(4)
    assert room.check(A, 9) is None
    room.take(A, 4)
    with pytest.raises(Overloaded, match=r"max_in_flight \(4\)"):
        room.check(A, 1)


def test_who_holds_the_most_for_its_weight_makes_room_for_others():
    room, heavy = Room(4), Caller("c", 8)
    room.take(A, 3)
    room.take(B, 1)
    assert room.check(B, 1) == A
    with pytest.raises(Overloaded):
        room.check(B, 2)
    assert room.check(heavy, 4) == A


def test_ended_items_leave_room():
    room = Room(2)
    room.take(A, 2)
    room.give_back(A)
    assert room.check(B, 1) is None


def test_only_a_full_pool_says_when_to_come_back():
    room = Room(2)
    error = Unavailable("no server")
    assert room.with_retry_after(error, "p", 5) is error
    assert room.with_retry_after(Overloaded("full"), "p", 5).retry_after_s == 5, "a guess, as nothing was answered yet"
