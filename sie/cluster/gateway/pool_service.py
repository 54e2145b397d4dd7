"""Serves `/v1/pools` of a gateway, gives pools their hosts, and keeps their pinned models loaded.

Every gateway does this, and each change is a compare and set on one document, so none leads. Source of the wire form: SIE
API reference, section 15.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from sie.catalog.profiles import model_of
from sie.cluster.connection import Connection
from sie.cluster.gateway.host_directory import Directory, Host
from sie.cluster.gateway.requested_placement import Placement
from sie.cluster.pools import Candidate, Pool, Pools, decoder, make_pool, plan_pools, state_of
from sie.cluster.shared_document import SharedDocument
from sie.cluster.subjects import DEFAULT_POOL
from sie.config.cluster_settings import Cluster
from sie.frontend.remote import ClusterAnswer
from sie.runtime.logs import get_logger
from sie.values.errors import BadRequest, Forbidden, NotFound, SieError
from sie.values.host_pool import PoolBody

_log = get_logger(__name__)
_KEY: Final = "pools"
RELEASE_S: Final = 10.0
"""A host that was silent for this long leaves its pool, and another takes its place."""

AskLoad = Callable[[Host, str], None]
"""Asks a host to load a model."""


class PoolService:
    """The leased pools as one gateway sees them."""

    def __init__(
        self, connection: Connection, directory: Directory, settings: Cluster, knows: Callable[[str], bool],
        ask_load: AskLoad,
    ) -> None:  # fmt: skip
        """Set up without connecting. `knows` tells whether a model exists in the cluster."""
        self._connection = connection
        self._directory = directory
        self._settings = settings
        self._knows = knows
        self._ask_load = ask_load
        self._document = SharedDocument(connection, _KEY, decoder, Pools(), lambda _: None)
        self.follow = self._document.follow
        self.read_soon = self._document.read_soon

    def pools(self) -> list[Pool]:
        """Return the leased pools, expired ones included."""
        return list(self._document.value.pools.values())

    def in_force(self) -> list[Pool]:
        """Return the leased pools whose lease has not ended."""
        return [pool for pool in self.pools() if not pool.is_expired(self._now_ns())]

    def _now_ns(self) -> int:
        return self._connection.clock.to_server(time.monotonic_ns())

    # --- routing --------------------------------------------------------------------------------------------------

    def resolve(self, named: Placement) -> Placement:
        """Return where a request runs whose headers name a leased pool; any other placement as it is."""
        pool = self._document.value.pools.get(named.pool.lower())
        if pool is None or pool.is_expired(self._now_ns()):
            return named
        return Placement(pool.queue_pool, named.profile, pool.name if pool.reserves else "", pool.bundle)

    def is_leased(self, name: str) -> bool:
        """Whether a leased pool with this name exists now."""
        pool = self._document.value.pools.get(name)
        return pool is not None and not pool.is_expired(self._now_ns())

    # --- hosts of pools -------------------------------------------------------------------------------------------

    async def reconcile(self, *, forgets: bool) -> None:
        """Give pools the hosts they should have, and have their pinned models loaded."""
        if not self._document.value.pools or not self._connection.clock.is_set:
            return
        hosts = self._candidates()
        try:
            await self._document.change(lambda known: plan_pools(known, hosts, self._now_ns(), forgets=forgets))
        except SieError as error:
            _log.debug("the pools cannot be brought up to date: %s", error.message)
        self._load_pinned()

    def _candidates(self) -> list[Candidate]:
        now_s = time.monotonic()
        live = {host.beat.host for host in self._directory.live(now_s)}
        return [
            Candidate(
                host.beat.host, *host.lane[:3], is_live=host.beat.host in live,
                models=frozenset(name for name in host.beat.models if host.serves(name)),
            )
            for host in self._directory.remembered() if now_s - host.seen_s <= RELEASE_S
        ]  # fmt: skip

    def _load_pinned(self) -> None:
        for pool in self.pools():
            if pool.pinned_models and not pool.is_expired(self._now_ns()):
                hosts = self._hosts_of(pool)
                for model in map(model_of, pool.pinned_models):
                    if pool.reserves or not any(host.serves(model) for host in hosts):
                        self._load(model, hosts if pool.reserves else hosts[:1])

    def _load(self, model: str, hosts: Iterable[Host]) -> None:
        for host in hosts:
            beat = host.beat.models.get(model)
            if beat is not None and beat.state == "available":
                self._ask_load(host, model)

    def _hosts_of(self, pool: Pool) -> list[Host]:
        """Return the live hosts on which a pool's requests run."""
        live = self._directory.live(time.monotonic())
        if pool.reserves:
            return [host for host in live if host.beat.host in pool.hosts]
        return [host for host in live if not host.lane.lease and pool.takes(Candidate("", *host.lane[:3]))]

    # --- the API --------------------------------------------------------------------------------------------------

    async def put(self, body: bytes) -> ClusterAnswer:
        """Create a pool, or update one and renew its lease. Raises SieErrors."""
        asked = _decode(body)
        name = asked.name.lower()
        self._check(asked, name)
        was_there = self.is_leased(name)

        def edit(known: Pools) -> Pools:
            old = known.pools.get(name)
            now_ns = self._now_ns()
            old = None if old is not None and old.is_expired(now_ns) else old
            others = [pool for pool in known.pools.values() if pool.name != name and not pool.is_expired(now_ns)]
            if old is None and len(others) >= self._settings.max_pools:
                raise BadRequest(f"The cluster has max_pools ({self._settings.max_pools}) pools")
            pool = make_pool(asked, old, self._settings.pool_ttl_s, now_ns)
            _check_caps(pool)
            return plan_pools(known.with_pool(pool), self._candidates(), now_ns, forgets=False)

        pools = await self._document.change(edit)
        return ClusterAnswer(200 if was_there else 201, self._shown(pools.pools[name]))

    def _check(self, asked: PoolBody, name: str) -> None:
        if self._is_of_hosts(name):
            raise Forbidden(
                f"Pool '{name}' belongs to the hosts that were started with it (--pool), so it has no lease"
            )
        for model in asked.pinned_models or ():
            if not self._knows(model):
                raise BadRequest(f"Field '$.pinned_models' names model '{model}', which no host of the cluster has")

    def _is_of_hosts(self, name: str) -> bool:
        return name == DEFAULT_POOL or any(host.beat.pool == name for host in self._directory.remembered())

    async def renew(self, name: str) -> ClusterAnswer:
        """Renew a pool's lease. Raises NotFound."""
        name = name.lower()
        if self._is_of_hosts(name):
            return ClusterAnswer(200, {"message": f"Pool '{name}' has no lease"})

        def edit(known: Pools) -> Pools:
            pool = self._found(known, name)
            return known.with_pool(msgspec.structs.replace(pool, renewed_ns=self._now_ns()))

        await self._document.change(edit)
        return ClusterAnswer(200, {"message": f"Pool '{name}' is renewed"})

    async def delete(self, name: str) -> ClusterAnswer:
        """Delete a pool; its hosts work for their queue pool again. Raises NotFound and Forbidden."""
        name = name.lower()
        if self._is_of_hosts(name):
            raise Forbidden(f"Pool '{name}' belongs to the hosts that were started with it, and cannot be deleted")
        await self._document.change(lambda known: known.without(self._found(known, name).name))
        return ClusterAnswer(200, {"message": f"Pool '{name}' is deleted"})

    def _found(self, known: Pools, name: str) -> Pool:
        pool = known.pools.get(name)
        if pool is None or pool.is_expired(self._now_ns()):
            raise _not_found(name)
        return pool

    def show(self, name: str) -> ClusterAnswer:
        """Describe a pool. For a minute after the end of its lease it is shown as expired. Raises NotFound."""
        name = name.lower()
        pool = self._document.value.pools.get(name)
        if pool is not None:
            return ClusterAnswer(200, self._shown(pool))
        if self._is_of_hosts(name):
            return ClusterAnswer(200, self._shown_of_hosts(name))
        raise _not_found(name)

    def list(self) -> ClusterAnswer:
        """Describe all pools: those of the hosts, and the leased ones."""
        names = sorted({DEFAULT_POOL, *(host.beat.pool for host in self._directory.remembered())})
        shown = [self._shown_of_hosts(name) for name in names]
        shown += [self._shown(pool) for pool in sorted(self.pools(), key=lambda pool: pool.name)]
        return ClusterAnswer(200, {"pools": shown})

    def _shown_of_hosts(self, name: str) -> dict[str, Any]:
        now_s = time.monotonic()
        hosts = [host for host in self._directory.live(now_s) if host.beat.pool == name and not host.lane.lease]
        pool = Pool(name, name, {}, {}, "", 0, 0, [], 0, 0)
        return _pool_body(pool, "active" if hosts else "pending", hosts)

    def _shown(self, pool: Pool) -> dict[str, Any]:
        return _pool_body(pool, state_of(pool, self._candidates(), self._now_ns()), self._hosts_of(pool))


def _pool_body(pool: Pool, state: str, hosts: list[Host]) -> dict[str, Any]:
    has_lease = bool(pool.created_ns)
    return {
        "name": pool.name, "state": state, "gpus": pool.gpus, "worker_count": len(hosts),
        "spec": {
            "name": pool.name, "queue_pool": pool.queue_pool, "bundle": pool.bundle or None, "gpus": pool.gpus,
            "gpu_caps": pool.gpu_caps, "ttl_seconds": pool.ttl_s if has_lease else None,
            "minimum_worker_count": pool.minimum_worker_count, "pinned_models": pool.pinned_models,
        },
        "status": {
            "state": state,
            "assigned_workers": [
                {"name": host.beat.name, "url": host.beat.url, "gpu": host.beat.profile} for host in hosts
            ],
            "created_at": pool.created_ns / 1e9 if has_lease else None,
            "last_renewed": pool.renewed_ns / 1e9 if has_lease else None,
        },
    }  # fmt: skip


def _decode(body: bytes) -> PoolBody:
    try:
        return msgspec.json.decode(body, type=PoolBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body does not describe a pool: {error}") from None


def _check_caps(pool: Pool) -> None:
    for profile, cap in pool.gpu_caps.items():
        if cap < pool.gpus.get(profile, 0):
            raise BadRequest(
                f"Field '$.gpu_caps' allows {cap} hosts of '{profile}', but 'gpus' needs {pool.gpus[profile]}"
            )


def _not_found(name: str) -> NotFound:
    return NotFound(f"Pool '{name}' was not found", code="POOL_NOT_FOUND")
