"""Owns what a child process does to itself first: die with its parent, stay on its cores, dump its stack on abort."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent_pid: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends; exit if it already has.

    Call from the main thread. With expected_parent_pid, a parent that died before this call is noticed too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if expected_parent_pid is not None and os.getppid() != expected_parent_pid:
        sys.exit(1)


def pin_to(cores: tuple[int, ...]) -> None:
    """Keep this process, and every thread it starts, on these cores; none means wherever it may run already."""
    if cores:
        os.sched_setaffinity(0, cores)


def calm_collector() -> None:
    """Collect garbage once, keep what is alive out of later collections, and make those rarer.

    Called when a process has started and after each load. What lives then lives for good, and walking it again and
    again showed as pauses of tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def dump_stacks_on_abort() -> None:
    """Print every thread's stack to stderr on SIGABRT and on faults: what the supervisor sends to a hung worker."""
    faulthandler.enable(all_threads=True)
