"""Decides how many unanswered items of a lane and model this gateway may have published, and how many in a message. Pure.

All gateways together publish twice the items that the hosts have room for: those that run, and as many again. So no host
waits for a gateway. The gateways divide it by the weights of the API keys whose items wait there. A message is for
one host, so it has at most a quarter of a host's room: half a step.
"""

from __future__ import annotations

import math
from typing import Final

from sie.cluster.gateway.host_directory import STALE_S, Directory
from sie.cluster.payloads import GatewayBeat
from sie.cluster.subjects import Lane, work_subject

_AHEAD: Final = 2
_PARTS: Final = 4
_MAX_TOGETHER: Final = 16
_LEAST: Final = 4
"""Items that a gateway may always publish, so that a request starts at once where nothing waits."""


class Windows:
    """The windows of one gateway process. The clock is passed in, in seconds."""

    def __init__(self, directory: Directory, gateway: str) -> None:
        self._directory = directory
        self._gateway = gateway
        self._others: dict[str, tuple[float, dict[str, int]]] = {}
        self._known: dict[tuple[Lane, str], tuple[int, int]] = {}
        self.own: dict[str, int] = {}
        """The weights of the keys whose items wait here, by subject of work, as this gateway's last heartbeat told them."""
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
        return self._look(lane, model)[0]

    def together(self, lane: Lane, model: str) -> int:
        """Return how many items of a lane and model a message may have."""
        return self._look(lane, model)[1]

    def _look(self, lane: Lane, model: str) -> tuple[int, int]:
        known = self._known.get((lane, model))
        if known is None:
            known = self._known[lane, model] = self._measure(lane, model)
        return known

    def _measure(self, lane: Lane, model: str) -> tuple[int, int]:
        hosts = self._directory.lanes(model, self._now_s, lane.__eq__).get(lane, [])
        credit = sum(max(0, host.beat.credit) for host in hosts)
        subject = work_subject(lane, model)
        own = max(1, self.own.get(subject, 0))
        others = sum(max(0, backlog.get(subject, 0)) for _, backlog in self._others.values())
        together = min(_MAX_TOGETHER, credit // (_PARTS * max(1, len(hosts))))
        return max(_LEAST, math.ceil(_AHEAD * credit * own / (own + others))), max(1, together)
