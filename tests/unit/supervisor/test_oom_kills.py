from __future__ import annotations

import pytest

from sie.supervisor.oom_kills import OomKills, count_oom_kills


class Kernel:
    """A counter of kills, at 4 when the server starts."""

    count = 4

    def __call__(self) -> int:
        return self.count


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def kills(kernel: Kernel) -> OomKills:
    return OomKills(kernel)


def ticked(kills: OomKills, start_s: float, end_s: float) -> None:
    for tenths in range(int(start_s * 10), int(end_s * 10)):
        kills.tick(tenths / 10)


def test_kills_before_the_start_explain_no_death(kills):
    ticked(kills, 100, 130)
    assert not kills.explain_death()


def test_each_kill_explains_one_death(kernel, kills):
    ticked(kills, 100, 130)
    kernel.count += 2
    assert [kills.explain_death() for _ in range(3)] == [True, True, False]


def test_a_kill_some_seconds_ago_explains_a_death_that_took_so_long_to_be_seen(kernel, kills):
    ticked(kills, 100, 130)
    kernel.count += 1
    ticked(kills, 130, 137)
    assert kills.explain_death()


def test_a_kill_of_a_minute_ago_explains_no_death(kernel, kills):
    """Something else on the host was killed; a worker that is killed from outside later has nothing to do with it."""
    ticked(kills, 100, 130)
    kernel.count += 1
    ticked(kills, 130, 190)
    assert not kills.explain_death()


def test_the_kernels_counter_can_be_read_here():
    assert count_oom_kills() >= 0
