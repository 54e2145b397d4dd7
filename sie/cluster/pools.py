"""Decides which hosts a leased pool has. Pure: takes the pools and the hosts that were heard, and returns the pools.

A pool is created over HTTP (`/v1/pools`) on top of a queue pool, which is the `--pool` of its hosts. Its hosts work for
nobody else, and a host is in one such pool at most. Times are on the clock of the NATS server, in nanoseconds since 1970.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from sie.cluster.payloads import VERSION
from sie.cluster.subjects import DEFAULT_POOL
from sie.values.host_pool import PoolBody

GONE_S: Final = 60.0
"""How long a pool whose lease has ended is still shown, as expired."""


class Pool(msgspec.Struct, array_like=True, frozen=True):
    """One leased pool, and the ids of its hosts."""

    name: str
    queue_pool: str
    gpus: dict[str, int]
    gpu_caps: dict[str, int]
    bundle: str
    ttl_s: int
    minimum_worker_count: int
    pinned_models: list[str]
    created_ns: int
    renewed_ns: int
    hosts: list[str] = []

    @property
    def reserves(self) -> bool:
        """Whether the pool has hosts of its own; otherwise it shares those of its queue pool that no pool has."""
        return bool(self.gpus or self.gpu_caps)

    def is_expired(self, now_ns: int) -> bool:
        """Whether the lease has ended."""
        return now_ns > self.renewed_ns + self.ttl_s * 1_000_000_000

    def most(self, profile: str) -> int:
        """Return the most hosts of a machine profile that the pool may have."""
        return self.gpu_caps.get(profile, self.gpus.get(profile, 0))

    def takes(self, host: Candidate) -> bool:
        """Whether a host fits the pool."""
        return host.pool == self.queue_pool and (not self.bundle or host.bundle == self.bundle)


class Pools(msgspec.Struct, array_like=True, frozen=True):
    """All leased pools of a cluster, by name."""

    version: int = VERSION
    pools: dict[str, Pool] = {}

    def of_host(self, host: str, now_ns: int) -> str:
        """Return the name of the pool that a host works for, or an empty text."""
        return next((p.name for p in self.pools.values() if host in p.hosts and not p.is_expired(now_ns)), "")

    def with_pool(self, pool: Pool) -> Pools:
        """Return the pools with one put in or replaced."""
        return Pools(pools={**self.pools, pool.name: pool})

    def without(self, name: str) -> Pools:
        """Return the pools without one."""
        return Pools(pools={known: pool for known, pool in self.pools.items() if known != name})


class Candidate(NamedTuple):
    """A host that was heard lately; it gets into a pool only if it is live."""

    id: str
    pool: str
    profile: str
    bundle: str
    is_live: bool = True
    models: frozenset[str] = frozenset()
    """The models that it serves."""


decoder: Final = msgspec.msgpack.Decoder(Pools)


def make_pool(body: PoolBody, old: Pool | None, default_ttl_s: int, now_ns: int) -> Pool:
    """Return the pool that a client describes; a field that is left out keeps its value, or has its default."""
    base = old or Pool(body.name.lower(), DEFAULT_POOL, {}, {}, "", default_ttl_s, 0, [], now_ns, now_ns)
    given = {
        "queue_pool": body.queue_pool, "bundle": body.bundle, "ttl_s": body.ttl_seconds,
        "gpus": _by_profile(body.gpus), "gpu_caps": _by_profile(body.gpu_caps),
        "minimum_worker_count": body.minimum_worker_count, "pinned_models": body.pinned_models,
    }  # fmt: skip
    return msgspec.structs.replace(
        base, renewed_ns=now_ns, **{name: value for name, value in given.items() if value is not None}
    )


def _by_profile(counts: dict[str, int] | None) -> dict[str, int] | None:
    return None if counts is None else {profile.lower(): count for profile, count in counts.items() if count}


def plan_pools(known: Pools, hosts: Sequence[Candidate], now_ns: int, *, forgets: bool) -> Pools:
    """Return the pools with the hosts they should have, the older pools first.

    Pools that expired long ago are left out. Hosts that are not among `hosts` are taken from their pool if forgets: a
    gateway that has just begun to listen has not heard them all.
    """
    by_id = {host.id: host for host in hosts}
    kept = sorted((p for p in known.pools.values() if not _is_gone(p, now_ns)), key=lambda p: (p.created_ns, p.name))
    held: dict[str, list[str]] = {}
    used: set[str] = set()
    for pool in kept:
        held[pool.name] = [host for host in _stay(pool, by_id, now_ns, forgets=forgets) if host not in used]
        used.update(held[pool.name])
    planned: dict[str, Pool] = {}
    for pool in kept:
        chosen = held[pool.name]
        if not pool.is_expired(now_ns):
            chosen = chosen + _join(pool, chosen, by_id, used)
            used.update(chosen)
        planned[pool.name] = msgspec.structs.replace(pool, hosts=chosen)
    return Pools(pools=planned)


def _is_gone(pool: Pool, now_ns: int) -> bool:
    return now_ns > pool.renewed_ns + (pool.ttl_s + GONE_S) * 1e9


def _stay(pool: Pool, by_id: dict[str, Candidate], now_ns: int, *, forgets: bool) -> Iterable[str]:
    """Yield the hosts that a pool keeps."""
    if pool.is_expired(now_ns):
        return
    left = {profile: pool.most(profile) for profile in {*pool.gpus, *pool.gpu_caps}}
    for name in pool.hosts:
        host = by_id.get(name)
        if host is None:
            if not forgets:
                yield name
        elif pool.takes(host) and left.get(host.profile, 0) > 0:
            left[host.profile] -= 1
            yield name


def _join(pool: Pool, chosen: Sequence[str], by_id: dict[str, Candidate], used: set[str]) -> list[str]:
    """Return the free hosts that a pool gets; those that serve its pinned models come first."""
    has = Counter(by_id[name].profile for name in chosen if name in by_id)
    silent = sum(name not in by_id for name in chosen)  # of a profile that this process does not know
    pinned = frozenset(pool.pinned_models)
    free = sorted(
        (host for host in by_id.values() if host.is_live and host.id not in used and pool.takes(host)),
        key=lambda host: (-len(pinned & host.models), host.id),
    )
    joined: list[str] = []
    for host in free:
        if has[host.profile] + silent < pool.most(host.profile):
            has[host.profile] += 1
            joined.append(host.id)
    return joined


def state_of(pool: Pool, hosts: Sequence[Candidate], now_ns: int) -> str:
    """Return pending, active or expired. Without a reservation a pool is active where it could run something."""
    if pool.is_expired(now_ns):
        return "expired"
    live = [host for host in hosts if host.is_live]
    if not pool.reserves:
        return "active" if any(pool.takes(host) for host in live) else "pending"
    has = Counter(host.profile for host in live if host.id in pool.hosts)
    is_enough = all(has[profile] >= count for profile, count in pool.gpus.items())
    return "active" if is_enough and has else "pending"
