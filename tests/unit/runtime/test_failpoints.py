"""Failpoints: texts that are refused, and the effect of an armed point on its process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from sie.runtime import failpoints


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm(())


def test_nothing_happens_at_a_point_that_is_not_armed():
    failpoints.arm(["worker.after_reply=raise"])
    failpoints.reach("worker.before_reply")


def test_a_count_is_the_only_pass_that_acts():
    failpoints.arm(["worker.before_reply=raise@3"])
    failpoints.reach("worker.before_reply")
    failpoints.reach("worker.before_reply")
    with pytest.raises(RuntimeError, match=r"failpoint worker\.before_reply"):
        failpoints.reach("worker.before_reply")
    failpoints.reach("worker.before_reply")


def test_passes_that_are_reported_together_count_each():
    failpoints.arm(["worker.after_reply=raise@3"])
    failpoints.reach("worker.after_reply", 2)
    with pytest.raises(RuntimeError):
        failpoints.reach("worker.after_reply", 2)


def test_without_a_count_each_pass_acts():
    failpoints.arm(["worker.before_reply=raise"])
    for _ in range(2):
        with pytest.raises(RuntimeError):
            failpoints.reach("worker.before_reply")


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit:75", 75)], ids=["kill", "exit"])
def test_a_process_ends_as_it_was_told(action, status):
    code = f"from sie.runtime import failpoints as f; f.arm(['worker.mid_write={action}']); f.reach('worker.mid_write')"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == status


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("worker.before_reply", "the form is"),
        ("worker.before_repli=kill", "did you mean 'worker.before_reply'"),
        ("worker.before_reply=explode", "'explode' is not an action"),
        ("worker.before_reply=sleep", "'sleep' is not an action"),
        ("worker.before_reply=kill:3", "'kill' is not an action"),
        ("worker.before_reply=kill@", "the form is"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        failpoints.parse(text)


def test_a_hold_stops_every_thread_of_the_process():
    failpoints.arm(["load.tokenizer=hold:300"])
    holding = threading.Thread(target=failpoints.reach, args=["load.tokenizer"])
    turns_s = [time.monotonic()]
    holding.start()
    while holding.is_alive():
        turns_s.append(time.monotonic())
    turns_s.append(time.monotonic())
    assert max(after - before for before, after in pairwise(turns_s)) >= 0.3
