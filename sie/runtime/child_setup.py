"""Prepares a child process: it dies with its parent, stays on its cores, and dumps its stacks on abort."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

from sie.runtime.sandbox_entry import LONGEST_SLICE_NS, set_slice

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that libraries read when they are loaded: the sizes of their thread pools."""
_PR_SET_PDEATHSIG = 1
_YIELDING_NICE = 10
_OWN_FILES = 1024
"""Descriptors reserved for shared memory, workers and files."""
_OOM_SCORE = 300
"""Thousandths of the usable memory that count as a worker's, beside its own (proc(5), oom_score_adj). 100 would be too few: in
a group of 300 MiB, a frontend may hold more than 30 MiB more than a worker."""


def die_with_parent(expected_parent_pid: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends; exit if it has already ended.

    Call it from the main thread. With expected_parent_pid, a parent that died before this call is noticed too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if expected_parent_pid is not None and os.getppid() != expected_parent_pid:
        sys.exit(1)


def pin_to(cores: tuple[int, ...]) -> None:
    """Pin this process, and every thread it starts, to these cores; an empty tuple changes nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


def die_before_siblings() -> None:
    """If memory is short, let the kernel choose this worker before a frontend or the supervisor.

    A worker's requests run again elsewhere or in its successor, but a frontend's connections are lost with it.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        path.write_text(str(min(int(path.read_text()) + _OOM_SCORE, 1000)))


def yield_to_siblings() -> None:
    """Let the other processes of the server take the core when they wake up. On a busy host this one still gets a tenth of a core.

    Call it before threads are started: each keeps what its maker had.
    """
    os.nice(_YIELDING_NICE)
    set_slice(os.SCHED_OTHER, LONGEST_SLICE_NS)


def max_connections(wanted: int) -> int:
    """Raise the limit of open files as far as possible, and return how many connections may be open at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, hard - min(_OWN_FILES, hard // 2)))


def exclude_imports_from_collections() -> None:
    """Exclude the objects that imports made from all garbage collections.

    Called once, when everything is imported. The interpreter collects garbage when it ends, too, which took 80 ms of a
    frontend's processor time.
    """
    gc.freeze()


def calm_collector() -> None:
    """Collect garbage once, exclude the live objects from later collections, and make those rarer.

    Called when a process has started and after each load. Objects alive at that time stay for good, and scanning them
    again and again caused pauses of tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def dump_stacks_on_abort() -> None:
    """Print every thread's stack to stderr on faults and on SIGABRT, which the supervisor sends to a hung worker."""
    faulthandler.enable(all_threads=True)
