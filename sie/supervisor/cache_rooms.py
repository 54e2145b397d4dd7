"""Divides a GPU's free memory among the caches of models that generate, before the first of them loads. Pure.

A cache cannot shrink, so a model leaves memory to those that are to load after it (docs/decisions/094).
"""

from __future__ import annotations

from collections.abc import Collection

from sie.ipc.messages import CacheRoom
from sie.supervisor.evictions import Claim, Memory, Policy, headroom


def plan_cache_room(
    policy: Policy,
    memory: Memory,
    own: Claim,
    wanted: Collection[Claim],
    lazy: Collection[Claim],
    *,
    used_bytes: int,
    lazy_share: float,
) -> CacheRoom:
    """Return what a generating model's keys and values may take on a device, so that others find memory there later.

    used_bytes are those of the models there. wanted are the models that will be loaded there next, lazy those that a
    request may load; one that does not fit beside those before it is left out. Caches of wanted models get the same number of
    tokens. So do lazy models, but all these together get at most lazy_share of what is free beside the wanted ones.
    """
    free = headroom(policy, memory)
    allowed = min(free, policy.max_model_bytes - used_bytes) if policy.max_model_bytes else free
    left = allowed - own.least_bytes
    firm = _that_fit(wanted, left)
    left = max(0, left - _least_of(firm))
    bound = int(left * lazy_share)
    loose = _that_fit(lazy, bound)
    divided = own.token_bytes + sum(claim.token_bytes for claim in firm)
    reserved = sum(claim.fixed_bytes for claim in firm) + _lazy_bytes(loose, divided, left, bound)
    share = own.token_bytes / divided if own.token_bytes else 1.0
    return CacheRoom(policy.pressure_pct, free - allowed + reserved, share)


def _that_fit(claims: Collection[Claim], free: int) -> list[Claim]:
    """Return the claims that find memory one after another."""
    found: list[Claim] = []
    for claim in claims:
        if claim.least_bytes <= free:
            found.append(claim)
            free -= claim.least_bytes
    return found


def _least_of(claims: Collection[Claim]) -> int:
    return sum(claim.least_bytes for claim in claims)


def _lazy_bytes(lazy: Collection[Claim], divided: int, free: int, bound: int) -> int:
    """Return the memory for lazy models with as many tokens as caches of `divided` bytes a token then get, within the bound."""
    fixed, tokens = sum(claim.fixed_bytes for claim in lazy), sum(claim.token_bytes for claim in lazy)
    equal = fixed + (free - fixed) * tokens // (divided + tokens) if tokens else fixed
    return min(bound, max(equal, _least_of(lazy)))
