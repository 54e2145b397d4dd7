from __future__ import annotations

import signal

import pytest

from sie.shm.inflight import InflightStatus
from sie.supervisor.hang_detector import HangDetector

WATCHDOG_S = 10.0


def step(started_s: float, allowed_s: float = 1.0, seq: int = 1) -> InflightStatus:
    return InflightStatus(seq, int(started_s * 1e9), int(allowed_s * 1e9), "step", [])


@pytest.fixture
def judge():
    return HangDetector(WATCHDOG_S)


def test_step_within_its_allowance_and_the_watchdog_is_fine(judge):
    assert judge.judge_worker(0, step(100), 111.0, 0.0) == "fine"


def test_step_over_both_is_aborted_then_killed_but_not_before_its_stacks_are_out(judge):
    assert judge.judge_worker(0, step(100), 111.1, 0.0) == "abort"
    assert judge.judge_worker(0, step(100), 111.2, 0.0) == "fine"
    assert judge.judge_worker(0, step(100), 111.7, 0.0) == "kill"


def test_larger_step_may_take_longer(judge):
    assert judge.judge_worker(0, step(100, allowed_s=20), 129.9, 0.0) == "fine"
    assert judge.judge_worker(0, step(100, allowed_s=20), 130.1, 0.0) == "abort"


def test_a_silence_that_was_announced_counts_from_its_end(judge):
    judge.excuse(0, 130.0)
    assert judge.judge_worker(0, step(100), 139.9, 0.0) == "fine"
    assert judge.judge_worker(1, step(100), 139.9, 0.0) == "abort"
    assert judge.judge_worker(0, step(100), 140.1, 0.0) == "abort"


def test_a_silence_that_ended_early_excuses_no_longer(judge):
    judge.excuse(0, 160.0)
    assert judge.judge_worker(0, step(100), 120.0, 0.0) == "fine"
    judge.excuse(0, 120.0)
    assert judge.judge_worker(0, step(100), 129.9, 0.0) == "fine"
    assert judge.judge_worker(0, step(100), 130.1, 0.0) == "abort"


def test_a_late_supervisor_lengthens_an_announced_silence_that_lies_ahead_and_no_other(judge):
    judge.excuse(0, 130.0)
    judge.excuse(1, 105.0)
    assert judge.judge_worker(0, step(100), 120.0, 10.0) == "fine"
    assert judge.judge_worker(0, step(115, seq=2), 149.9, 0.0) == "fine"
    assert judge.judge_worker(0, step(115, seq=2), 150.1, 0.0) == "abort"
    assert judge.judge_worker(1, step(100), 116.0, 10.0) == "fine"
    assert judge.judge_worker(1, step(106, seq=2), 117.1, 0.0) == "abort"


def test_an_announced_silence_is_that_of_one_process(judge):
    judge.excuse(0, 200.0)
    judge.forget(0)
    assert judge.judge_worker(0, step(100), 111.1, 0.0) == "abort"


def test_worker_whose_loop_has_not_turned_yet_is_not_judged(judge):
    assert judge.judge_worker(0, InflightStatus(0, 0, 0, "idle", []), 1e6, 0.0) == "fine"


def test_intervals_in_which_the_supervisor_was_late_are_forgiven_once_each(judge):
    assert judge.judge_worker(0, step(100), 115.0, 8.0) == "fine"
    assert judge.judge_worker(0, step(100), 118.0, 0.0) == "fine"
    assert judge.judge_worker(0, step(100), 119.1, 0.0) == "abort"


def test_what_was_forgiven_belongs_to_one_step(judge):
    assert judge.judge_worker(0, step(100), 115.0, 8.0) == "fine"
    assert judge.judge_worker(0, step(120, seq=2), 131.1, 0.0) == "abort"


def test_workers_are_judged_apart(judge):
    assert judge.judge_worker(0, step(100), 112.0, 0.0) == "abort"
    assert judge.judge_worker(1, step(110), 112.0, 0.0) == "fine"


def test_successor_of_an_aborted_worker_starts_afresh(judge):
    assert judge.judge_worker(0, step(100), 112.0, 0.0) == "abort"
    judge.forget(0)
    assert judge.judge_worker(0, step(112), 113.0, 0.0) == "fine"


def test_tick_tells_how_late_it_came_and_only_if_that_matters(judge):
    assert [judge.tick(now_s) for now_s in (50.0, 50.1, 50.55, 53.55)] == [0.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("status", [1, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS])
def test_every_death_but_a_kill_may_be_the_input_s_doing(judge, status):
    assert judge.blames_input(status, 0, was_oom_killed=False)


def test_kill_from_outside_blames_nothing(judge):
    assert not judge.blames_input(-signal.SIGKILL, 0, was_oom_killed=False)
    assert not judge.blames_input(0, 0, was_oom_killed=False), "a worker that was asked to stop exits with 0"


def test_kill_after_our_own_abort_blames_the_step(judge):
    judge.judge_worker(0, step(100), 112.0, 0.0)
    assert judge.blames_input(-signal.SIGKILL, 0, was_oom_killed=False)
    assert not judge.blames_input(-signal.SIGKILL, 1, was_oom_killed=False)


def test_kill_for_want_of_memory_blames_the_step(judge):
    assert judge.blames_input(-signal.SIGKILL, 0, was_oom_killed=True)


def test_a_worker_is_silent_some_time_before_it_is_judged_to_hang(judge):
    for now_s, is_hung in ((107.9, False), (108.1, True), (111.1, True), (111.3, True)):
        judge.judge_worker(0, step(100), now_s, 0.0)
        assert judge.is_hung(0, 3.0) is is_hung, now_s
    judge.forget(0)
    assert not judge.is_hung(0, 3.0)


def test_a_long_grace_is_half_of_the_watchdog(judge):
    judge.judge_worker(0, step(100), 105.9, 0.0)
    assert not judge.is_hung(0, 1000.0)
    judge.judge_worker(0, step(100), 106.1, 0.0)
    assert judge.is_hung(0, 1000.0)


def test_a_worker_that_moves_on_is_not_silent(judge):
    judge.judge_worker(0, step(100), 110.0, 0.0)
    assert judge.is_hung(0, 3.0)
    judge.judge_worker(0, step(110, seq=2), 110.1, 0.0)
    assert not judge.is_hung(0, 3.0)


# --- late workers ------------------------------------------------------------------------------------------------------


def late(judge: HangDetector, *looks: tuple[str, float, float]) -> None:
    """Judge a worker whose step began at 100 and may take 1 s; looks are (state, processor time, now)."""
    for state, cpu_s, now_s in looks:
        judge.judge_worker(0, step(100), now_s, 0.0)
        judge.note_run_state(0, state, cpu_s, now_s)


def test_worker_is_late_a_second_after_its_step_may_have_ended(judge):
    for now_s, is_late in ((101.9, False), (102.1, True), (111.1, True)):
        judge.judge_worker(0, step(100), now_s, 0.0)
        assert judge.is_late(0) is is_late, now_s
    judge.judge_worker(0, step(111, seq=2), 111.2, 0.0)
    assert judge.is_late(0), "one that was aborted does not come back"
    judge.forget(0)
    assert not judge.is_late(0)
    judge.judge_worker(0, step(111, seq=2), 113.5, 0.0)
    assert judge.is_late(0)
    judge.judge_worker(0, step(113.4, seq=3), 113.6, 0.0)
    assert not judge.is_late(0)


def test_worker_that_announced_a_silence_is_late_a_second_after_its_end(judge):
    judge.excuse(0, 130.0)
    judge.judge_worker(0, step(100), 130.9, 0.0)
    assert not judge.is_late(0)
    judge.judge_worker(0, step(100), 131.1, 0.0)
    assert judge.is_late(0)


@pytest.mark.parametrize(
    ("looks", "is_blamed"),
    [
        ([("T", 5.0, 103.0), ("T", 5.0, 111.1)], False),
        ([("T", 5.0, 103.0), ("S", 5.0, 111.1)], False),  # it was let go on just before
        ([("R", 5.0, 103.0), ("R", 5.1, 111.1)], False),  # others have the processors
        ([("R", 5.0, 103.0), ("R", 13.0, 111.1)], True),  # it spins
        ([("S", 5.0, 103.0), ("S", 5.0, 111.1)], True),  # it is locked up
        ([("D", 5.0, 103.0), ("D", 5.0, 111.1)], True),
    ],
)
@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGABRT])
def test_input_of_a_worker_that_was_kept_from_running_is_not_to_blame(judge, looks, status, is_blamed):
    late(judge, *looks)
    assert judge.blames_input(status, 0, was_oom_killed=False) is is_blamed
    assert judge.blames_input(status, 0, was_oom_killed=True)


def test_fault_of_its_own_is_the_step_s_although_it_was_stopped_before(judge):
    late(judge, ("T", 5.0, 103.0))
    assert judge.blames_input(-signal.SIGSEGV, 0, was_oom_killed=False)


def test_having_been_stopped_in_an_earlier_step_excuses_nothing(judge):
    late(judge, ("T", 5.0, 103.0))
    judge.judge_worker(0, step(104, seq=2), 104.1, 0.0)
    judge.judge_worker(0, step(104, seq=2), 115.1, 0.0)
    judge.note_run_state(0, "S", 5.0, 115.1)
    assert judge.blames_input(-signal.SIGKILL, 0, was_oom_killed=False)
