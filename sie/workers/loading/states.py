"""Defines the states of a model or an adapter on this worker and the events that change them. Pure: no message or thread.

An event that the table does not list for a state cannot happen in that state. The form is that of h11, `h11/_state.py`.
The supervisor follows the reports of these states with a table of its own (`sie.supervisor.lifecycle.Place`).

    load:          absent, failed ──▶ queued ──▶ loading ──▶ loaded or failed
    unload:        queued ──▶ absent; loading ──▶ cancelled ──▶ absent; loaded ──▶ unloading ──▶ absent
    wanted again:  cancelled ──▶ loading; unloading ──▶ loaded
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from sie.values.card import ModelState


class LoadState(Enum):
    """The state of a model or an adapter.

    QUEUED: its load waits for others. LOADING: a thread loads it. CANCELLED: a thread still loads it, and the result
    will be dropped. LOADED: it takes new work. UNLOADING: it takes no new work, and is freed after its last item.
    """

    ABSENT = "absent"
    QUEUED = "queued"
    LOADING = "loading"
    CANCELLED = "cancelled"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left here."""
        return self in (LoadState.ABSENT, LoadState.FAILED)

    @property
    def is_loading(self) -> bool:
        """Whether its load runs or waits."""
        return self in (LoadState.QUEUED, LoadState.LOADING, LoadState.CANCELLED)

    @property
    def report(self) -> ModelState:
        """The name of this state in a report to the supervisor."""
        return _REPORTS[self]


class LoadEvent(Enum):
    """An event in the life of a model or an adapter.

    LOAD, UNLOAD: the supervisor asks for it. START: its load begins. READY, FAIL: its load has ended; a cancelled one ends
    with READY in any case. FREE: its last item is answered.
    """

    LOAD = "load"
    UNLOAD = "unload"
    START = "start"
    READY = "ready"
    FAIL = "fail"
    FREE = "free"


class LoadStateError(Exception):
    """An event that cannot happen in a state: a fault of the worker."""


_REPORTS: Final[dict[LoadState, ModelState]] = {
    LoadState.ABSENT: "available", LoadState.QUEUED: "loading", LoadState.LOADING: "loading",
    LoadState.CANCELLED: "loading", LoadState.LOADED: "loaded", LoadState.UNLOADING: "unloading",
    LoadState.FAILED: "failed",
}  # fmt: skip
_STATES: Final[dict[LoadState, dict[LoadEvent, LoadState]]] = {
    LoadState.ABSENT: {LoadEvent.LOAD: LoadState.QUEUED},
    LoadState.FAILED: {LoadEvent.LOAD: LoadState.QUEUED},
    LoadState.QUEUED: {
        LoadEvent.LOAD: LoadState.QUEUED, LoadEvent.UNLOAD: LoadState.ABSENT, LoadEvent.START: LoadState.LOADING,
    },
    LoadState.LOADING: {
        LoadEvent.LOAD: LoadState.LOADING, LoadEvent.UNLOAD: LoadState.CANCELLED, LoadEvent.READY: LoadState.LOADED,
        LoadEvent.FAIL: LoadState.FAILED,
    },
    LoadState.CANCELLED: {
        LoadEvent.LOAD: LoadState.LOADING, LoadEvent.UNLOAD: LoadState.CANCELLED, LoadEvent.READY: LoadState.ABSENT,
    },
    LoadState.LOADED: {LoadEvent.LOAD: LoadState.LOADED, LoadEvent.UNLOAD: LoadState.UNLOADING},
    LoadState.UNLOADING: {
        LoadEvent.LOAD: LoadState.LOADED, LoadEvent.UNLOAD: LoadState.UNLOADING, LoadEvent.FREE: LoadState.ABSENT,
    },
}  # fmt: skip


def next_state(state: LoadState, event: LoadEvent) -> LoadState:
    """Return the state after an event. Raises LoadStateError for one that cannot happen."""
    found = _STATES[state].get(event)
    if found is None:
        raise LoadStateError(f"{event.name} in {state.name}")
    return found
