"""Decides how many unanswered items of a lane and model this gateway may have published. Pure.

All gateways together publish twice the items that the hosts have room for: what they run, and as much again, so that no
host waits for a gateway. The gateways divide it by the weights of the API keys whose items wait there.
"""

from __future__ import annotations

import math
from typing import Final

from sie.catalog.profiles import model_of
from sie.cluster.gateway.directory import STALE_S, Directory
from sie.cluster.payloads import GatewayBeat
from sie.cluster.subjects import Lane, work_subject

_AHEAD: Final = 2
_LEAST: Final = 4
"""What a gateway may publish whatever the others do, so that a request starts at once where nothing waits."""


class Windows:
    """The windows of one gateway process. The clock is passed in, in seconds."""

    def __init__(self, directory: Directory, gateway: str) -> None:
        self._directory = directory
        self._gateway = gateway
        self._others: dict[str, tuple[float, dict[str, int]]] = {}
        self._known: dict[tuple[Lane, str], int] = {}
        self.own: dict[str, int] = {}
        """What the last heartbeat of this gateway told: the weights of the keys whose items wait here, by subject of work."""
        self._now_s = 0.0

    def hear(self, beat: GatewayBeat, now_s: float) -> None:
        """Take in the heartbeat of a gateway."""
        if beat.gateway != self._gateway:
            self._others[beat.gateway] = now_s, beat.backlog

    def renew(self, now_s: float) -> None:
        """Look again at hosts and gateways; called each tick."""
        self._now_s = now_s
        self._others = {name: known for name, known in self._others.items() if now_s - known[0] <= STALE_S}
        self._known.clear()

    def limit(self, lane: Lane, model: str) -> int:
        """Return the window of a lane and model."""
        known = self._known.get((lane, model))
        if known is None:
            known = self._known[lane, model] = self._limit(lane, model)
        return known

    def _limit(self, lane: Lane, model: str) -> int:
        hosts = self._directory.lanes(model_of(model), self._now_s).get(lane, [])
        credit = sum(max(0, host.beat.credit) for host in hosts)
        subject = work_subject(lane, model)
        own = max(1, self.own.get(subject, 0))
        others = sum(max(0, backlog.get(subject, 0)) for _, backlog in self._others.values())
        return max(_LEAST, math.ceil(_AHEAD * credit * own / (own + others)))
