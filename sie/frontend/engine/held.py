"""Holds the requests that wait for a worker, grouped by model and adapter, and keeps their sums up to date."""

from __future__ import annotations

from collections.abc import Iterator

from sie.frontend.engine.worker_link import ShmPending


class HeldRequests:
    """The requests of one frontend that no worker has: their worker died, or restarts."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], dict[int, ShmPending]] = {}
        self.num_tokens = 0
        """Tokens of all held requests."""
        self.stream_bytes = 0
        """Bytes of the extents of held requests to generate."""

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __iter__(self) -> Iterator[ShmPending]:
        """Iterate over a copy: requests may come and go meanwhile."""
        return iter([pending for group in self._groups.values() for pending in group.values()])

    def groups(self) -> list[list[ShmPending]]:
        """Return the requests of each model and adapter, in the order in which they came."""
        return [list(group.values()) for group in self._groups.values()]

    def add(self, pending: ShmPending) -> None:
        """Add a request that is not held yet."""
        self._groups.setdefault((pending.model, pending.adapter), {})[pending.request_id] = pending
        self._count(pending, 1)

    def remove(self, pending: ShmPending) -> bool:
        """Remove a request. Return False if it was not held."""
        key = pending.model, pending.adapter
        group = self._groups.get(key)
        if group is None or group.pop(pending.request_id, None) is None:
            return False
        if not group:
            del self._groups[key]
        self._count(pending, -1)
        return True

    def _count(self, pending: ShmPending, sign: int) -> None:
        self.num_tokens += sign * pending.num_tokens
        if pending.stream is not None:
            self.stream_bytes += sign * pending.lease.nbytes
