"""Lets tests break this process on purpose at named points: `POINT=ACTION[:ARGUMENT][@COUNT]`.

The points are compiled in and listed in `POINTS`. They do nothing until `arm` is called, which settings refuse without
`test`. Each process counts for itself and starts again from one after a restart.
"""

from __future__ import annotations

import ctypes
import difflib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

POINTS: Final[dict[str, str]] = {
    "frontend.before_commit": "a request lies whole in shared memory, its descriptor was not pushed",
    "frontend.after_push": "the descriptor lies in the ring, the worker may not have been told, the client still waits",
    "frontend.before_release": "a reply was encoded, its extent not given back",
    "worker.before_step": "the supervisor was told what runs, the forward pass has not begun",
    "worker.mid_write": "rows of a reply were written, others perhaps not",
    "worker.before_reply": "a reply lies whole in shared memory, its descriptor was not pushed",
    "worker.after_reply": "the descriptor of a reply was pushed",
    "cluster.taken": "a host took a work item from NATS, and has not begun to run it",
    "cluster.published": "a host published the result of a work item, and has not acknowledged it",
    "load.tokenizer": "a load in a worker is about to read a tokenizer, the supervisor was told if that may take long",
}
FAILPOINT_FORM: Final = "POINT=kill|stop|spin|raise|exit:STATUS|sleep:MILLISECONDS|hold:MILLISECONDS|leak:KIB[@COUNT]"

_TEXT: Final = re.compile(
    r"(?P<point>[a-z_.]+)=(?P<action>[a-z]+)(:(?P<argument>[0-9]{1,6}))?(@(?P<count>[0-9]{1,9}))?"
)
_WITH_ARGUMENT: Final = frozenset({"exit", "hold", "leak", "sleep"})

Action = Callable[[], None]


class Failpoint:
    """One armed point: its action, and the pass at which it acts (None: every pass)."""

    __slots__ = ("_action", "_count", "_num_passes", "point")

    def __init__(self, point: str, action: Action, count: int | None) -> None:
        self.point = point
        self._action = action
        self._count = count
        self._num_passes = 0

    def hit(self) -> None:
        """Count one pass, and act if it is the chosen one."""
        self._num_passes += 1
        if self._count is None or self._num_passes == self._count:
            self._action()


_armed: dict[str, Failpoint] = {}


def arm(texts: Sequence[str]) -> None:
    """Arm the points in texts, and disarm all others. Raises ValueError as `parse` does."""
    failpoints = [parse(text) for text in texts]
    _armed.clear()
    _armed.update({failpoint.point: failpoint for failpoint in failpoints})


def reach(point: str, num_passes: int = 1) -> None:
    """Report that this process has reached a point, so many times. Returns at once unless the point is armed."""
    if _armed and point in _armed:
        for _ in range(num_passes):
            _armed[point].hit()


def parse(text: str) -> Failpoint:
    """Return the failpoint of a text. Raises ValueError that quotes the text and names the accepted form."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"failpoint {text!r}; the form is {FAILPOINT_FORM}")
    point, action, argument = match["point"], match["action"], match["argument"]
    if point not in POINTS:
        near = difflib.get_close_matches(point, POINTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"failpoint {text!r}: there is no point {point!r}; did you mean {near!r}?")
    if action not in _ACTIONS or (action in _WITH_ARGUMENT) != (argument is not None):
        raise ValueError(f"failpoint {text!r}: {action!r} is not an action; the form is {FAILPOINT_FORM}")
    make = _ACTIONS[action]
    return Failpoint(point, make(point, int(argument or 0)), int(match["count"]) if match["count"] else None)


def _signal(number: signal.Signals) -> Callable[[str, int], Action]:
    return lambda _point, _argument: lambda: os.kill(os.getpid(), number)


def _spin(_point: str, _argument: int) -> Action:
    def spin() -> None:
        while True:
            pass

    return spin


def _raise(point: str, _argument: int) -> Action:
    def fail() -> None:
        raise RuntimeError(f"failpoint {point}")

    return fail


def _leak(_point: str, kib: int) -> Action:
    kept: list[bytes] = []
    return lambda: kept.append(os.urandom(kib << 10))  # random, since zeros might never allocate a page


def _hold(_point: str, milliseconds: int) -> Action:
    """Sleep while holding the interpreter lock, so that no other thread runs."""
    library = ctypes.PyDLL(None)

    def hold() -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a signal would end the sleep
        library.usleep(milliseconds * 1000)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return hold


_ACTIONS: Final[dict[str, Callable[[str, int], Action]]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "spin": _spin,
    "raise": _raise,
    "leak": _leak,
    "exit": lambda _point, status: lambda: os._exit(status),
    "hold": _hold,
    "sleep": lambda _point, milliseconds: lambda: time.sleep(milliseconds / 1e3),
}
