"""Defines the states of a model or an adapter and the events that change them. Pure: uses no message, process or clock.

There are two tables. `Place` is the state on one worker. `LifeStage` is the state on this server: the server's
intention, which also decides how its requests are treated. An event that a table does not list for a state cannot happen in
that state. The form is that of h11, `h11/_state.py`.

    request, load:   idle, failed, released, dismissed ──▶ loading ──▶ serving
    reload beside:   serving ──▶ renewing ──▶ leaving ──▶ reloading ──▶ serving
    reload:          serving ──▶ leaving ──▶ reloading ──▶ serving; not serving: ──▶ clearing ──▶ loading
    no memory:       loading ◀──▶ waiting; reloading ◀──▶ reload_waiting
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal

from sie.values.card import ModelState

# --- on one worker --------------------------------------------------------------------------------------------------


class Place(Enum):
    """The state of a load on one worker. ASKED: the load was sent, and the worker has not answered."""

    ABSENT = "absent"
    ASKED = "asked"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"

    @property
    def is_there(self) -> bool:
        """Whether the worker has it in memory, or was asked to load it."""
        return self not in (Place.ABSENT, Place.FAILED)


PlaceEvent = Literal["ask", "loading", "loaded", "unloading", "available", "failed"]
"""`ask`: a load is sent to the worker; all others are the worker's reports."""

_REPORTED: Final[dict[ModelState, Place]] = {
    "loading": Place.LOADING, "loaded": Place.LOADED, "unloading": Place.UNLOADING, "available": Place.ABSENT,
    "failed": Place.FAILED,
}  # fmt: skip
_PLACES: Final[dict[Place, dict[PlaceEvent, Place]]] = {
    **{place: {**_REPORTED, "ask": place} for place in Place},
    Place.ABSENT: {**_REPORTED, "ask": Place.ASKED},
    Place.FAILED: {**_REPORTED, "ask": Place.ASKED},
    # An unload that was sent before the load is answered after it.
    Place.ASKED: {**_REPORTED, "ask": Place.ASKED, "unloading": Place.ASKED, "available": Place.ASKED},
}


def next_place(place: Place, event: PlaceEvent) -> Place:
    """Return the state on a worker after an event there."""
    return _PLACES[place][event]


# --- on this server -------------------------------------------------------------------------------------------------


class LifeStage(Enum):
    """The server's intention for a model.

    IDLE: no request has wanted it yet. FAILED: its last load failed. RELEASED: the server unloads it, and any request
    loads it again. DISMISSED: an administrator unloaded it. LOADING: it loads. WAITING: its load waits for memory.
    SERVING: it has been loaded; while no worker has it, requests wait for the restart of its workers. RENEWING: it
    serves while its successor is loaded beside it. LEAVING: it served and is unloaded to be loaded again. RELOADING,
    RELOAD_WAITING: as LOADING and WAITING, after LEAVING. CLEARING: as LEAVING, for a model that does not serve.
    """

    IDLE = "idle"
    FAILED = "failed"
    RELEASED = "released"
    DISMISSED = "dismissed"
    LOADING = "loading"
    WAITING = "waiting"
    SERVING = "serving"
    RENEWING = "renewing"
    LEAVING = "leaving"
    RELOADING = "reloading"
    RELOAD_WAITING = "reload_waiting"
    CLEARING = "clearing"

    @property
    def is_wanted(self) -> bool:
        """Whether workers should have the model or adapter."""
        return self in _WANTED

    @property
    def is_reloading(self) -> bool:
        """Whether it served when a reload began that has not ended, so that requests wait for it."""
        return self in _RELOADING

    @property
    def waits_for_memory(self) -> bool:
        """Whether its load waits for memory and has not been sent to workers."""
        return self in (LifeStage.WAITING, LifeStage.RELOAD_WAITING)

    @property
    def loads_again(self) -> bool:
        """Whether it loads again once it is unloaded everywhere."""
        return self in (LifeStage.LEAVING, LifeStage.CLEARING)


class Event(Enum):
    """An event in the life of a model.

    WANT: a request, a retry or an administrator starts a load. SHORT, FITS: its load must wait for memory, or is sent.
    LOADED: a worker has loaded it. FAIL: its load failed and no worker has it. KEEP: a load failed, and a worker has
    it. RELEASE: the server unloads it. DISMISS: an administrator unloads it. RENEW: a reload beside the serving copy
    begins. RELOAD: a reload begins by unloading it. GONE: no worker has it any more, so a reload can go on.
    """

    WANT = "want"
    SHORT = "short"
    FITS = "fits"
    LOADED = "loaded"
    FAIL = "fail"
    KEEP = "keep"
    RELEASE = "release"
    DISMISS = "dismiss"
    RENEW = "renew"
    RELOAD = "reload"
    GONE = "gone"


class LifecycleError(Exception):
    """An event that cannot happen in a state: a fault of the server."""


_WANTED: Final = frozenset((
    LifeStage.LOADING, LifeStage.WAITING, LifeStage.SERVING, LifeStage.RENEWING, LifeStage.RELOADING, LifeStage.RELOAD_WAITING,
))  # fmt: skip
_RELOADING: Final = frozenset((LifeStage.RENEWING, LifeStage.LEAVING, LifeStage.RELOADING, LifeStage.RELOAD_WAITING))
_ANYWHERE: Final[dict[Event, LifeStage]] = {
    Event.LOADED: LifeStage.SERVING, Event.FAIL: LifeStage.FAILED, Event.RELEASE: LifeStage.RELEASED,
    Event.DISMISS: LifeStage.DISMISSED, Event.RELOAD: LifeStage.CLEARING,
}  # fmt: skip
"""The next stage after an event, unless the current stage has its own entry."""
_STAGES: Final[dict[LifeStage, dict[Event, LifeStage]]] = {
    LifeStage.IDLE: {Event.WANT: LifeStage.LOADING, Event.KEEP: LifeStage.IDLE},
    LifeStage.FAILED: {Event.WANT: LifeStage.LOADING, Event.KEEP: LifeStage.FAILED},
    # A load that ends after the unload brings neither of these back.
    LifeStage.RELEASED: {
        Event.WANT: LifeStage.LOADING, Event.LOADED: LifeStage.RELEASED, Event.FAIL: LifeStage.RELEASED, Event.KEEP: LifeStage.RELEASED,
    },
    LifeStage.DISMISSED: {
        Event.WANT: LifeStage.LOADING, Event.LOADED: LifeStage.DISMISSED, Event.FAIL: LifeStage.DISMISSED,
        Event.KEEP: LifeStage.DISMISSED, Event.RELEASE: LifeStage.DISMISSED,
    },
    LifeStage.LOADING: {Event.SHORT: LifeStage.WAITING, Event.FITS: LifeStage.LOADING, Event.KEEP: LifeStage.SERVING},
    LifeStage.WAITING: {Event.SHORT: LifeStage.WAITING, Event.FITS: LifeStage.LOADING, Event.KEEP: LifeStage.SERVING},
    LifeStage.SERVING: {
        Event.SHORT: LifeStage.RELOAD_WAITING, Event.FITS: LifeStage.SERVING, Event.KEEP: LifeStage.SERVING,
        Event.RENEW: LifeStage.RENEWING, Event.RELOAD: LifeStage.LEAVING,
    },
    # Another worker may get it meanwhile, and the reload continues.
    LifeStage.RENEWING: {
        Event.LOADED: LifeStage.RENEWING, Event.KEEP: LifeStage.SERVING, Event.RENEW: LifeStage.RENEWING,
        Event.RELOAD: LifeStage.LEAVING, Event.SHORT: LifeStage.RELOAD_WAITING, Event.FITS: LifeStage.RELOADING,
    },
    LifeStage.LEAVING: {
        Event.GONE: LifeStage.RELOADING, Event.LOADED: LifeStage.LEAVING, Event.FAIL: LifeStage.CLEARING,
        Event.KEEP: LifeStage.LEAVING, Event.RELEASE: LifeStage.LEAVING, Event.RELOAD: LifeStage.LEAVING,
    },
    LifeStage.RELOADING: {
        Event.SHORT: LifeStage.RELOAD_WAITING, Event.FITS: LifeStage.RELOADING, Event.KEEP: LifeStage.SERVING,
        Event.RELOAD: LifeStage.LEAVING,
    },
    LifeStage.RELOAD_WAITING: {
        Event.SHORT: LifeStage.RELOAD_WAITING, Event.FITS: LifeStage.RELOADING, Event.KEEP: LifeStage.SERVING,
        Event.RELOAD: LifeStage.LEAVING,
    },
    LifeStage.CLEARING: {
        Event.GONE: LifeStage.LOADING, Event.LOADED: LifeStage.CLEARING, Event.FAIL: LifeStage.CLEARING,
        Event.KEEP: LifeStage.CLEARING, Event.RELEASE: LifeStage.CLEARING,
    },
}  # fmt: skip


def loaded_slots(places: Mapping[int, Place]) -> tuple[int, ...]:
    """Return the slots of the workers whose place is LOADED, ascending."""
    return tuple(sorted(slot for slot, place in places.items() if place is Place.LOADED))


def can(stage: LifeStage, event: Event) -> bool:
    """Return whether an event can happen in a state."""
    return event in _STAGES[stage] or event in _ANYWHERE


def next_stage(stage: LifeStage, event: Event) -> LifeStage:
    """Return the state after an event. Raises LifecycleError for one that cannot happen."""
    found = _STAGES[stage].get(event) or _ANYWHERE.get(event)
    if found is None:
        raise LifecycleError(f"{event.name} in {stage.name}")
    return found
