"""Holds a gateway's picture of the hosts, from their heartbeats. Decides which lane serves a model. Pure.

A host that has not beaten for STALE_S gets no new work. Its models stay known for FORGET_S, and requests for them wait:
while NATS restarts, every host is silent, and no client should hear that a model does not exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from sie.catalog.profiles import DEFAULT_PROFILE, entry_ids, model_of
from sie.cluster.payloads import Beat, Cards, ModelBeat
from sie.cluster.subjects import DEFAULT_POOL, Lane
from sie.ipc.messages import ModelEntry, Models
from sie.values.card import ModelState

STALE_S: Final = 2.0
FORGET_S: Final = 60.0
_ORDER: Final[tuple[ModelState, ...]] = ("loaded", "loading", "unloading", "available", "failed")
"""The state of a model that is in several states on several hosts is the first of these: one that can load it still may."""


class Host:
    """One host: its last heartbeat, its cards, and when it was heard."""

    __slots__ = ("_profiled", "beat", "cards_key", "entries", "seen_s")

    def __init__(self, beat: Beat, now_s: float) -> None:
        self.beat = beat
        self.seen_s = now_s
        self.cards_key = ""
        self.entries: dict[str, ModelEntry] = {}
        self._profiled: frozenset[str] = frozenset()

    def learn(self, cards: Cards) -> None:
        """Take in its cards."""
        self.cards_key = cards.cards_key
        self.entries = {entry.card.id: entry for entry in cards.entries}
        self._profiled = frozenset(
            name for entry in cards.entries for name in entry_ids(entry.card.id, entry.card.profiles)
        )

    @property
    def lane(self) -> Lane:
        """The lane of the host."""
        return Lane(self.beat.pool, self.beat.profile, self.beat.bundle, self.beat.lease)

    def find(self, name: str) -> ModelBeat | None:
        """Return the state of a model or of `model:profile`, or None if the host does not have it."""
        model = model_of(name)
        return self.beat.models.get(model) if name == model or name in self._profiled else None

    def serves(self, name: str) -> bool:
        """Whether the host answers requests for a model or `model:profile` now."""
        beat = self.find(name)
        return beat is not None and beat.is_served

    def states(self) -> list[tuple[str, ModelState, bool]]:
        """Return each of its models with its state, and whether it is served."""
        return [(model, beat.state, beat.is_served) for model, beat in self.beat.models.items()]

    def restores(self, name: str) -> bool:
        """Whether the host is loading a model again after the death of its worker."""
        beat = self.find(name)
        return beat is not None and beat.is_coming_back


class Directory:
    """All hosts that a gateway has heard of."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self.profiles: set[str] = set()
        """The machine profiles that hosts have had."""
        self._num_changes = 0
        """Of what hosts say of their models. Heartbeats are many, and most say what the one before said."""
        self._seen: Any = None
        """The changes and the silent hosts at the last look at all models."""
        self._shown: Any = None

    def hear(self, beat: Beat, now_s: float) -> bool:
        """Take in a heartbeat. Return whether the host's cards must be asked for."""
        host = self._hosts.get(beat.host)
        if host is None:
            host = self._hosts[beat.host] = Host(beat, now_s)
            self._num_changes += 1
        old = host.beat
        self._num_changes += (old.models, old.is_draining) != (beat.models, beat.is_draining)
        host.beat, host.seen_s = beat, now_s
        self.profiles.add(beat.profile)
        return host.cards_key != beat.cards_key

    def learn(self, host: str, cards: Cards) -> None:
        """Take in a host's cards."""
        known = self._hosts.get(host)
        if known is not None:
            known.learn(cards)
            self._num_changes += 1

    def forget_old(self, now_s: float) -> None:
        """Forget the hosts that have been silent for long."""
        for name in [name for name, host in self._hosts.items() if now_s - host.seen_s > FORGET_S]:
            del self._hosts[name]
            self._num_changes += 1

    def live(self, now_s: float) -> list[Host]:
        """Return the hosts that beat and take new work."""
        return [host for host in self._beating(now_s) if not host.beat.is_draining]

    def beating(self, now_s: float) -> list[Host]:
        """Return the hosts that beat, those that are leaving included."""
        return list(self._beating(now_s))

    def remembered(self) -> list[Host]:
        """Return the hosts that were heard lately, silent ones included, without those that have left."""
        return [host for host in self._hosts.values() if not host.beat.is_draining]

    def stale(self, now_s: float) -> set[str]:
        """Return the ids of the hosts that no longer beat."""
        return {name for name, host in self._hosts.items() if now_s - host.seen_s > STALE_S}

    def names(self, hosts: Iterable[str]) -> str:
        """Return how a log line names these hosts, without those that are forgotten: `host-1 (id), host-2 (id)`."""
        return ", ".join(f"{self._hosts[host].beat.name} ({host})" for host in sorted(hosts) if host in self._hosts)

    def left(self, hosts: Iterable[str]) -> set[str]:
        """Return those of these silent hosts that had said that they leave."""
        return {host for host in hosts if host in self._hosts and self._hosts[host].beat.is_draining}

    def statuses(self, now_s: float) -> list[tuple[Host, str]]:
        """Return each host with its status: healthy, draining, or silent. One that has left is not among them."""
        found: list[tuple[Host, str]] = []
        for host in self._hosts.values():
            is_silent = now_s - host.seen_s > STALE_S
            if not (is_silent and host.beat.is_draining):
                found.append((host, "silent" if is_silent else "draining" if host.beat.is_draining else "healthy"))
        return found

    def _beating(self, now_s: float) -> Iterable[Host]:
        return (host for host in self._hosts.values() if now_s - host.seen_s <= STALE_S)

    # --- models ---------------------------------------------------------------------------------------------------

    def models(self, now_s: float) -> Models | None:
        """Return all models as a supervisor would tell them, or None if nothing changed since the last call."""
        seen = self._num_changes, self.stale(now_s)
        if seen == self._seen:
            return None
        self._seen = seen
        merged = self._merged(now_s)
        shown = [(entry.card.id, entry.state, bool(entry.workers), entry.recovering, entry.error) for entry in merged]
        # Who waits for a model in one placement looks again when a host there changes, whatever the others say.
        shown = (
            shown,
            [(name, host.cards_key, host.lane, host.states()) for name, host in sorted(self._hosts.items())],
        )
        if shown == self._shown:
            return None
        self._shown = shown
        return Models(tuple(map(self._with_profiles, merged)), ready=True)

    def _merged(self, now_s: float) -> list[ModelEntry]:
        found: defaultdict[str, list[tuple[ModelEntry, ModelBeat, bool]]] = defaultdict(list)
        for host in self.remembered():
            is_live = now_s - host.seen_s <= STALE_S
            for model, beat in host.beat.models.items():
                entry = host.entries.get(model)
                if entry is not None:
                    found[model].append((entry, beat, is_live))
        return [_merge(found[model]) for model in sorted(found)]

    def _with_profiles(self, entry: ModelEntry) -> ModelEntry:
        """Return a model's entry with the profiles that only other hosts have: each request goes to a host with its profile."""
        profiles = entry.card.profiles
        for host in self.remembered():
            other = host.entries.get(entry.card.id)
            if other is not None and other.is_read and other.card.profiles != profiles:
                more, known = (found or {DEFAULT_PROFILE: {}} for found in (other.card.profiles, profiles))
                profiles = {**more, **known}
        return msgspec.structs.replace(entry, card=msgspec.structs.replace(entry.card, profiles=profiles))

    def lanes(
        self, name: str, now_s: float, is_wanted: Callable[[Lane], bool] = lambda _: True
    ) -> dict[Lane, list[Host]]:
        """Return the wanted lanes whose hosts serve a model or `model:profile`, each with those hosts.

        Without such hosts they are those that restore it, or else silent ones that served it.
        """
        found = serving([host for host in self.live(now_s) if is_wanted(host.lane)], name)
        if not found:
            found = [host for host in self.remembered() if is_wanted(host.lane) and host.serves(name)]
        lanes: defaultdict[Lane, list[Host]] = defaultdict(list)
        for host in found:
            lanes[host.lane].append(host)
        return dict(lanes)

    def offering(self, name: str, now_s: float) -> list[Host]:
        """Return the live hosts that could load a model or `model:profile`."""
        return [host for host in self.live(now_s) if host.find(name) is not None]


def serving(hosts: Sequence[Host], name: str) -> list[Host]:
    """Return the hosts that serve a model or `model:profile`, or else those that restore it."""
    return [host for host in hosts if host.serves(name)] or [host for host in hosts if host.restores(name)]


def _merge(found: list[tuple[ModelEntry, ModelBeat, bool]]) -> ModelEntry:
    """Return one entry for a model of several hosts, each with its beat and whether it is live."""
    live = [(entry, beat) for entry, beat, is_live in found if is_live]
    heard = live or [(entry, beat) for entry, beat, _ in found]
    state = next(state for state in _ORDER if any(beat.state == state for _, beat in heard))
    entry, beat = next((entry, beat) for entry, beat in heard if beat.state == state)
    is_served = any(beat.is_served for _, beat in live)
    was_served = any(beat.is_served or beat.is_coming_back for _, beat, _ in found)
    return msgspec.structs.replace(
        entry, state=state, workers=(0,) if is_served else (), recovering=was_served and not is_served,
        error=beat.error if state == "failed" else None,
    )  # fmt: skip


def choose_lane(lanes: dict[Lane, list[Host]], own_items: dict[Lane, int]) -> Lane:
    """Return the lane with the least work for each worker; own_items are this gateway's unanswered items by lane."""
    if len(lanes) == 1:
        return next(iter(lanes))
    return min(lanes, key=lambda lane: _load(lanes[lane], own_items.get(lane, 0)))


def _load(hosts: list[Host], num_items: int) -> float:
    queued = sum(host.beat.queued_tokens for host in hosts)
    return (queued + num_items) / max(1, sum(host.beat.num_workers for host in hosts))


def matches(lane: Lane, pool: str, profile: str, lease: str = "", bundle: str = "") -> bool:
    """Return whether a lane is of a pool, a leased pool, a machine profile or its `-spot` variant, and a bundle.

    An empty profile or bundle is any; an empty lease means hosts that no leased pool has.
    """
    if lane.pool != (pool or DEFAULT_POOL) or lane.lease != lease:
        return False
    return (not profile or lane.profile in (profile, f"{profile}-spot")) and (not bundle or lane.bundle == bundle)
