"""Shares the limits of API keys over all gateways: each leases for a second what its requests need.

The rest of a key's limits is one small document in NATS, changed by compare and set. So gateways together never admit
more requests than one would. Tokens are known when they are spent; a gateway tells of them each second, or after a
hundredth of the rate. While NATS is away, each gateway counts by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from typing import Final

import msgspec

from sie.cluster.connection import Connection, reason_of
from sie.cluster.payloads import VERSION
from sie.cluster.shared_document import SharedDocument
from sie.frontend.access.key_use import KeyHolder, Lease
from sie.frontend.access.rates import TokenBucket
from sie.runtime.logs import get_logger
from sie.values.errors import SieError

_log = get_logger(__name__)
_LEASE_NS: Final = 1_000_000_000
_HELD_NS: Final = 3_000_000_000
"""After this time without a renewal, the requests under way of a gateway count no more: it is gone."""
_PAUSE_NS: Final = 50_000_000
"""How long a gateway does not ask again when there was no more."""
_SHORTEST_S: Final = 0.05
_WAIT_S: Final = 1.0
_TOKEN_SHARE: Final = 100


class KeyUse(msgspec.Struct, array_like=True, frozen=True):
    """The part of one key's limits that all gateways have leased; times in ns on the clock of the NATS server.

    requests_ns and tokens_ns are the times at which the buckets of both rates were or will be empty. running has, by
    gateway process, the requests that it may have under way, and until when. written_ns is the time of the change,
    so every change is written, and a gateway whose copy is old learns of it.
    """

    version: int = VERSION
    requests_ns: int = 0
    tokens_ns: int = 0
    running: dict[str, tuple[int, int]] = {}
    written_ns: int = 0

    def seen_at(self, now_ns: int) -> KeyUse:
        """Return the use as seen at now_ns. If the clock has stepped back since it was written, all its times move back, too.

        Otherwise the key would owe for the length of the step.
        """
        ahead_ns = self.written_ns - now_ns
        if ahead_ns <= 0:
            return self
        running = {name: (count, ends_ns - ahead_ns) for name, (count, ends_ns) in self.running.items()}
        return KeyUse(VERSION, self.requests_ns - ahead_ns, self.tokens_ns - ahead_ns, running, now_ns)


_decoder: Final = msgspec.msgpack.Decoder(KeyUse)


class _Share:
    """One key in one gateway process: its lease, and the document behind it."""

    def __init__(self, connection: Connection, name: str, now_ns: int) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        self.document = SharedDocument(connection, f"limits.{digest}", _decoder, KeyUse(), lambda _: None)
        self.lock = asyncio.Lock()
        self.lease = Lease()
        self.num_arrived = 0
        self.asked_ns = self.pause_ns = now_ns


class KeyLeases:
    """The leases of one gateway process."""

    def __init__(self, connection: Connection, gateway: str) -> None:
        self._connection = connection
        self._gateway = gateway
        self._shares: dict[KeyHolder, _Share] = {}

    async def lease(self, holder: KeyHolder | None) -> None:
        """Lease a share of the key's limits for its next request, unless there is one. The lease then decides on the request."""
        if holder is None or not holder.is_limited:
            return
        now_ns = time.monotonic_ns()
        if not self._is_shared:
            holder.end_lease(now_ns)
            return
        share = self._shares.get(holder)
        if share is None:
            share = self._shares[holder] = _Share(self._connection, holder.key.name, now_ns)
        share.num_arrived += 1
        if share.lock.locked() or _is_due(holder, share, now_ns):
            async with share.lock:
                now_ns = time.monotonic_ns()
                if not self._is_shared:  # any more
                    holder.end_lease(now_ns)
                elif _is_due(holder, share, now_ns):
                    await self._exchange(holder, share, is_asked=True)

    @property
    def _is_shared(self) -> bool:
        """Whether the documents can be reached; otherwise each gateway counts by itself."""
        return self._connection.is_connected and self._connection.clock.is_set

    async def tick(self) -> None:
        """Give unused shares back, and report the requests that still run. Called each second."""
        for holder, share in list(self._shares.items()):
            if time.monotonic_ns() < share.lease.ends_ns or share.lock.locked():
                continue
            lease = share.lease
            if lease.num_requests or lease.max_running or lease.num_tokens:
                async with share.lock:
                    await self._exchange(holder, share, is_asked=False)
            elif self._shares.get(holder) is share:  # another tick may have ended it while this one waited
                holder.end_lease(time.monotonic_ns())
                del self._shares[holder]

    async def _exchange(self, holder: KeyHolder, share: _Share, *, is_asked: bool) -> None:
        """Report the use of a share, and lease it anew. ORDER: the lease is empty meanwhile, so others wait for the lock."""
        now_ns, lease = time.monotonic_ns(), share.lease
        elapsed_s = max(_SHORTEST_S, (now_ns - share.asked_ns) / 1e9)
        wanted = max(1, math.ceil(share.num_arrived / elapsed_s)) if is_asked else 0
        left, spent = lease.num_requests, lease.num_tokens
        lease.num_requests = lease.num_tokens = lease.max_running = 0
        share.asked_ns, share.num_arrived = now_ns, 0
        lease.ends_ns = now_ns + _LEASE_NS
        granted = free = 0

        def edit(known: KeyUse) -> KeyUse:
            nonlocal granted, free
            server_ns = self._connection.clock.to_server(time.monotonic_ns())
            known = known.seen_at(server_ns)
            requests_ns, granted, free = _take(
                holder.key.requests_per_minute, known.requests_ns, left, wanted, server_ns
            )
            tokens_ns, *_ = _take(holder.key.tokens_per_minute, known.tokens_ns, -spent, 0, server_ns)
            running = self._running(holder, known, server_ns, is_asked=is_asked)
            return KeyUse(VERSION, requests_ns, tokens_ns, running, server_ns)

        try:
            use = await asyncio.wait_for(share.document.change(edit), _WAIT_S)
        except (SieError, TimeoutError) as error:  # the rest of the share is lost: it may be given back already
            _log.debug("key %s is counted by this gateway alone: %s", holder.key.name, reason_of(error))
            lease.num_tokens += spent
            now_ns = time.monotonic_ns()  # those who waited meanwhile must not ask one after another
            share.pause_ns = now_ns + _LEASE_NS
            holder.end_lease(now_ns)
            return
        lease.num_requests, (lease.max_running, _) = granted, use.running.get(self._gateway, (0, 0))
        holder.lease = lease
        to_local = self._connection.clock.to_local
        if holder.bucket is not None:
            holder.bucket.empty_ns = to_local(use.requests_ns)
            holder.bucket.spend(-granted, now_ns)  # the headers count what this process may still use
        if holder.token_bucket is not None:
            holder.token_bucket.empty_ns = to_local(use.tokens_ns)
            holder.token_bucket.spend(lease.num_tokens, now_ns)
        has_more = granted >= wanted or granted < free
        can_run = lease.max_running > holder.num_running or holder.key.max_concurrent is None
        if is_asked and not (has_more and can_run):
            share.pause_ns = now_ns + _PAUSE_NS

    def _running(self, holder: KeyHolder, known: KeyUse, now_ns: int, *, is_asked: bool) -> dict[str, tuple[int, int]]:
        """Return how many requests each gateway may have under way. Ours gets some more than it has now, if they are free."""
        others = {
            name: held for name, held in known.running.items() if name != self._gateway and held[1] > now_ns
        }  # fmt: skip
        limit = holder.key.max_concurrent
        if limit is None:
            return {}
        free = max(0, limit - sum(held for held, _ in others.values()) - holder.num_running)
        more = min(free, max(1, holder.num_running // 4)) if is_asked else 0
        own = holder.num_running + more
        return {**others, self._gateway: (own, now_ns + _HELD_NS)} if own else others


def _is_due(holder: KeyHolder, share: _Share, now_ns: int) -> bool:
    """Return whether the lease does not cover the next request."""
    key, lease = holder.key, share.lease
    if now_ns < share.pause_ns:
        return False
    return (
        now_ns >= lease.ends_ns
        or (key.requests_per_minute is not None and not lease.num_requests)
        or (key.max_concurrent is not None and holder.num_running >= lease.max_running)
        or (key.tokens_per_minute is not None and lease.num_tokens > key.tokens_per_minute // _TOKEN_SHARE)
    )


def _take(per_minute: int | None, empty_ns: int, left: int, wanted: int, now_ns: int) -> tuple[int, int, int]:
    """Give the rest of a share back to its rate, then take up to `wanted`, but only half of what is free.

    Returns the time at which the rate's bucket is empty, the amount taken, and the amount that was there. A negative left
    is a debt, which is taken in any case. per_minute None: the rate has no limit.
    """
    if per_minute is None:
        return 0, wanted, wanted
    bucket = TokenBucket(per_minute, now_ns)
    bucket.empty_ns = max(bucket.empty_ns, empty_ns)
    bucket.spend(-left, now_ns)
    free = bucket.remaining(now_ns)
    taken = min(wanted, free, max(1, free // 2))
    bucket.spend(taken, now_ns)
    return bucket.empty_ns, taken, free
