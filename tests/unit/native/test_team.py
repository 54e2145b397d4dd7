"""Helpers on lent cores: they take part while the owner waits, and leave when it needs its core. In a process of their own,
because a process borrows once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sie.native import team
from sie.native.linear import LinearCall, Matrix, WeightFormat, pack_bf16, run_linear, scratch_bytes
from sie.shm.core_board import CoreBoard
from tests.kernels import needs_kernels

OWNER, BORROWER, CORE = 0, 1, 0
DEADLINE_S = 60.0
ENOUGH = 1 << 30
CORES = sorted(os.sched_getaffinity(0))

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(len(CORES) < 2, reason="one core"),
]


class Rig:
    """A process pinned to one core, which may borrow another."""

    def __init__(self, num_own: int) -> None:
        os.sched_setaffinity(0, {CORES[0]})
        self.board = CoreBoard.create(2, 1)
        self.user = ctypes.c_uint32.from_address(self.board.borrower_address(CORE))
        """The worker that uses the core, plus one; 0 for nobody."""
        cores = [team.LentCore(self.board.needed_address(OWNER), self.board.borrower_address(CORE), CORES[1])]
        team.borrow(cores, max_lent=3, num_own=num_own, name=BORROWER + 1)
        values = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
        self._weights = pack_bf16((values.view(np.uint32) >> 16).astype(np.uint16))
        self._input = np.ones((4, 1024), np.float32)

    def multiply(self, num_threads: int) -> np.ndarray[Any, Any]:
        """Return a product that so many threads may share out."""
        output = np.empty((4, 512), np.float32)
        scratch = np.empty(scratch_bytes(4, 1024, num_threads) + 64, np.uint8)
        matrix = Matrix(weights=self._weights.ctypes.data, inputs=1024, outputs=512, format=WeightFormat.BF16)
        call = LinearCall(
            matrix, self._input.ctypes.data, output.ctypes.data, scratch.ctypes.data + -scratch.ctypes.data % 64, 1024, 512,
            4, 0, num_threads,
        )  # fmt: skip
        run_linear(call)
        return output

    def multiply_until(self, is_true: Callable[[], bool], num_threads: int = 2) -> None:
        """Make products until something is true. Raises AssertionError after the deadline."""
        deadline_s = time.monotonic() + DEADLINE_S
        expected = self.multiply(1)
        while not is_true():
            assert time.monotonic() < deadline_s
            assert (self.multiply(num_threads) == expected).all()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Raise AssertionError if something does not become true."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def is_borrowed(self) -> bool:
        return self.user.value == BORROWER + 1


_rig: list[Rig] = []


def rig(num_own: int = 1) -> Rig:
    """Return the rig of this process."""
    if not _rig:
        _rig.append(Rig(num_own))
    rig = _rig[0]
    rig.board.set_needed(OWNER, needed=False)
    return rig


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def check_step_has_the_threads_of_idle_cores() -> None:
    own = rig()
    assert team.num_threads(1, ENOUGH, 1) == 2
    own.board.set_needed(OWNER, needed=True)
    assert team.num_threads(1, ENOUGH, 1) == 1


def check_small_step_asks_nobody() -> None:
    rig()
    assert team.num_threads(1, 1000, 10) == 1


def check_load_asks_nobody() -> None:
    rig()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(team.num_threads(1, ENOUGH, 1)))
    thread.start()
    thread.join()
    assert found == [1]


def check_helper_runs_on_the_lent_core_and_sleeps() -> None:
    own = rig()
    own.multiply_until(own.is_borrowed)
    tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    assert {CORES[1]} in [os.sched_getaffinity(task) for task in tasks]
    own.wait_until(lambda: not own.is_borrowed())


def check_time_that_a_lent_core_saves_is_counted() -> None:
    own = rig()
    before = team.saved_ns()
    own.multiply_until(own.is_borrowed)
    own.multiply_until(lambda: team.saved_ns() > before)
    own.board.set_needed(OWNER, needed=True)
    own.multiply_until(lambda: not own.is_borrowed())
    alone = team.saved_ns()
    for _ in range(100):
        own.multiply(2)
    assert team.saved_ns() == alone


def check_task_without_helpers_gets_none() -> None:
    """As a load's, which measures times: it has this process's own threads, while a helper spins and sees the task."""
    own = rig(num_own=2)
    own.multiply_until(own.is_borrowed, num_threads=3)
    for _ in range(20):
        own.multiply(3)
        before = team.saved_ns()
        for _ in range(20):
            own.multiply(2)
        assert team.saved_ns() == before


def check_owner_gets_its_core_back() -> None:
    own = rig()
    own.multiply_until(own.is_borrowed)
    own.board.set_needed(OWNER, needed=True)
    own.multiply_until(lambda: not own.is_borrowed())
    for _ in range(100):
        own.multiply(2)
        assert not own.is_borrowed()


def check_core_in_use_by_a_third_is_left_alone() -> None:
    own = rig()
    own.wait_until(lambda: not own.is_borrowed())
    own.user.value = OWNER + 1
    try:
        assert team.num_threads(1, ENOUGH, 1) == 1
        for _ in range(100):
            own.multiply(2)
        assert own.user.value == OWNER + 1
    finally:
        own.board.forget(OWNER)
    own.multiply_until(own.is_borrowed)


@pytest.mark.parametrize("check", [
    check_step_has_the_threads_of_idle_cores, check_small_step_asks_nobody, check_load_asks_nobody,
    check_helper_runs_on_the_lent_core_and_sleeps, check_owner_gets_its_core_back,
    check_core_in_use_by_a_third_is_left_alone, check_time_that_a_lent_core_saves_is_counted,
], ids=lambda check: check.__name__)  # fmt: skip
def test_lent_core(process: ProcessPoolExecutor, check: Callable[[], None]) -> None:
    process.submit(check).result(2 * DEADLINE_S)


def test_task_without_helpers_gets_none() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(check_task_without_helpers_gets_none).result(2 * DEADLINE_S)
