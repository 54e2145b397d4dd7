"""Reads where a request wants to run from its headers, and finds the hosts for it.

The choice is kept in a context variable: each request has a task of its own, and its operation runs in that task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from sie.cluster.gateway.fair_queue import EVERYBODY, Caller
from sie.cluster.gateway.host_directory import Directory, Host, choose_lane, matches, serving
from sie.cluster.subjects import DEFAULT_POOL, Lane
from sie.frontend.models.model_table import load_failure
from sie.ipc.messages import ModelEntry
from sie.values.errors import SieError, Unavailable

_MAX_CHARS: Final = 200
_KNOWN_S: Final = 0.05
_PROVISIONING_S: Final = 5


class Placement(NamedTuple):
    """The pool of the hosts, and the machine profile or an empty text for any."""

    pool: str
    profile: str
    lease: str = ""
    """The leased pool that has the hosts; empty for hosts that none has."""
    bundle: str = ""


AskLoad = Callable[[str, Placement], None]
Resolve = Callable[[Placement], Placement]
"""Returns where a request runs whose headers may name a leased pool."""


_placement: ContextVar[Placement | None] = ContextVar("placement", default=None)
_caller: ContextVar[Caller] = ContextVar("caller", default=EVERYBODY)


def current_caller() -> Caller:
    """Return the API key of the running task's request."""
    return _caller.get()


def read_placement(headers: Any, own_pool: str) -> Placement:
    """Return the placement that headers ask for: `X-SIE-Pool` and `X-SIE-MACHINE-PROFILE`, or `pool/profile` there.

    Source: SIE API reference, section 15.
    """
    profile = (headers.get("x-sie-machine-profile") or "").strip()[:_MAX_CHARS]
    pool = (headers.get("x-sie-pool") or "").strip()[:_MAX_CHARS]
    if "/" in profile:
        named, _, profile = profile.partition("/")
        pool = pool or named
    return Placement(pool or own_pool or DEFAULT_POOL, profile.lower())


class Places:
    """Finds hosts for the request of the running task."""

    def __init__(
        self, directory: Directory, own_pool: str, by_lane: Counter[Lane], resolve: Resolve = lambda named: named,
        is_deaf: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """own_pool is the pool of requests that name none; by_lane counts this gateway's items.

        is_deaf tells whether this gateway hears nobody now, so that the silence of hosts says nothing about them.
        """
        self._resolve = resolve
        self._is_deaf = is_deaf
        self.ask_load: AskLoad = lambda _model, _placement: None
        """Has a host of a placement load a model that a request wants there."""
        self.retry_after_s = 5
        """When a client should come back for a model that is loading."""
        self._directory = directory
        self._own_pool = own_pool
        self._by_lane = by_lane
        self._lanes: dict[tuple[str, Placement], dict[Lane, list[Host]]] = {}
        self._staffed: set[Placement] = set()
        """The placements that have a host."""
        self._known_until_s = 0.0

    def enter(self, headers: Any, caller: Caller) -> None:
        """Read the placement of a request for its task, and keep its API key.

        Raises Unavailable PROVISIONING if no host is there for it.
        """
        placement = self._resolve(read_placement(headers, self._own_pool))
        _placement.set(placement)
        _caller.set(caller)
        self._forget_old(time.monotonic())
        if placement not in self._staffed:
            if not any(matches(host.lane, *placement) for host in self._known()):
                raise _provisioning(placement)
            self._staffed.add(placement)

    def _heard(self) -> list[Host]:
        """Return the live hosts, or those that were heard lately while nobody can be heard: NATS may be starting again."""
        return self._directory.remembered() if self._is_deaf() else self._directory.live(time.monotonic())

    def _known(self) -> list[Host]:
        """Return the live hosts, or where none is those that were heard lately."""
        return self._heard() or self._directory.remembered()

    def current(self) -> Placement:
        """Return the placement of the running task's request."""
        return _placement.get() or self.own

    @property
    def own(self) -> Placement:
        """The placement of a request that names none."""
        return Placement(self._own_pool or DEFAULT_POOL, "")

    def check_serving(self, entry: ModelEntry) -> None:
        """Raise a SieError unless a host serves a model for the running task's request. Has one load it, if it can."""
        model = entry.card.id
        if entry.card.kind == "generator":
            self.hosts(model)
        elif not self._lanes_of(model, self.current()):
            raise self._not_served(model, self.current())

    def choose(self, model: str) -> tuple[Lane, Placement]:
        """Return the lane for a model, and the placement that the request wants. Raises SieErrors."""
        placement = self.current()
        lane = self.find_lane(model, placement)
        if lane is None:
            raise self._not_served(model, placement)
        return lane, placement

    def find_lane(self, model: str, placement: Placement) -> Lane | None:
        """Return the lane that serves a model for a placement, or None."""
        lanes = self._lanes_of(model, placement)
        return choose_lane(lanes, self._by_lane) if lanes else None

    def _lanes_of(self, model: str, placement: Placement) -> dict[Lane, list[Host]]:
        """Return the lanes that serve a model for a placement."""
        now_s = time.monotonic()
        self._forget_old(now_s)
        found = self._lanes.get((model, placement))
        if found is None:
            found = self._directory.lanes(model, now_s, lambda lane: matches(lane, *placement))
            if found:  # a model that is not served now may be served a moment later
                self._lanes[model, placement] = found
        return found

    def _forget_old(self, now_s: float) -> None:
        """Clear the cached look-ups when they are too old. The cache spares each request a look-up of its own."""
        if now_s >= self._known_until_s:
            self._lanes.clear()
            self._staffed.clear()
            self._known_until_s = now_s + _KNOWN_S

    def hosts(self, model: str) -> list[Host]:
        """Return the live hosts that serve a model for the running task's request, or restore it. Raises SieErrors.

        While nobody is heard they are those that were heard lately, and the request waits.
        """
        placement = self.current()
        found = serving([host for host in self._heard() if matches(host.lane, *placement)], model)
        if not found:
            raise self._not_served(model, placement)
        return found

    def candidates(self, model: str, placement: Placement) -> list[Host]:
        """Return the hosts of a placement that could load a model."""
        return [host for host in self._offering(model) if matches(host.lane, *placement)]

    def _offering(self, model: str) -> list[Host]:
        return [host for host in self._heard() if host.find(model) is not None]

    def load_failure(self, model: str, placement: Placement) -> SieError | None:
        """Return the error for a model whose load has failed on all hosts of a placement that have it; None for any other."""
        beats = [host.find(model) for host in self.candidates(model, placement)]
        errors = [
            beat.error for beat in beats if beat is not None and beat.state == "failed" and beat.error is not None
        ]
        return load_failure(model, errors[0]) if errors and len(errors) == len(beats) else None

    def _not_served(self, model: str, placement: Placement) -> SieError:
        """Return the error for a model that no host of a placement serves now. Has one load it, if it can."""
        if self.candidates(model, placement):
            self.ask_load(model, placement)
            if (failure := self.load_failure(model, placement)) is not None:
                return failure
            text = f"Model '{model}' is loading; retry in {self.retry_after_s} s"
            return Unavailable(text, code="MODEL_LOADING", retry_after_s=self.retry_after_s)
        others = sorted({host.lane for host in self._offering(model)})
        if others and any(matches(host.lane, *placement) for host in self._known()):
            bundles = sorted({lane.bundle for lane in others})
            return SieError(
                f"Model '{model}' is not in the bundles of pool '{placement.lease or placement.pool}'; bundles with it: {bundles}",
                code="DEPENDENCY_CONFLICT", http_status=409, extras={"compatible_bundles": bundles},
            )  # fmt: skip
        return _provisioning(placement)


def _provisioning(placement: Placement) -> SieError:
    where = f"pool '{placement.lease or placement.pool}'" + (
        f" with machine profile '{placement.profile}'" if placement.profile else ""
    )
    text = f"No host of {where} is there yet; retry in {_PROVISIONING_S} s"
    return Unavailable(text, code="PROVISIONING", retry_after_s=_PROVISIONING_S)
