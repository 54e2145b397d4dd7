"""Chooses the models to unload when a device's memory is short. Pure: the caller passes loaded models and free memory.

Workers measure the memory. A model's size is the one its worker reported after the load; before that, it is an estimate
from the card. Source: SIE API reference, section 17.
"""

from __future__ import annotations

import msgspec

from sie.config.generation_settings import Generation
from sie.values.card import ModelCard

_MIB = 1 << 20


class Memory(msgspec.Struct, frozen=True):
    """A device's measured memory, over all processes."""

    total_bytes: int
    available_bytes: int


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded model on one device; nbytes is its sum over all workers there."""

    model: str
    nbytes: int
    last_used_s: float
    is_pinned: bool = False


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a device's memory; max_model_bytes 0 means that only pressure_pct applies."""

    pressure_pct: float
    max_model_bytes: int = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a model takes on one device: 0 where unknown."""

    fixed_bytes: int
    """Its weights at the peak of its load, and a cache whose size a setting fixes."""
    cache_bytes: int = 0
    """The least cache of keys and values that is divided from what is free."""
    token_bytes: int = 0
    """The bytes of one token in such a cache."""

    @property
    def least_bytes(self) -> int:
        """The memory without which the model is not loaded."""
        return self.fixed_bytes + self.cache_bytes


def claim_of(card: ModelCard, device: str, dtype: str, generation: Generation) -> Claim:
    """Return the memory that a model takes on one worker, or on one member of its group.

    On a CPU, weights are built in float32 before their conversion. On a GPU they arrive converted, and `auto` is
    bfloat16. There a generating model also needs keys and values: those of `kv_cache_bytes`, or else at least
    `kv_cache_min_tokens`. A CPU's are claimed as they are used.
    """
    if card.stub is not None:
        return Claim(fixed_bytes=card.stub.memory_mb * _MIB)
    if card.tensor is not None:
        return Claim(fixed_bytes=4 * card.num_weights)  # the bytes of its file, in any format
    weights = card.num_weights * (4 if device == "cpu" or dtype == "float32" else 2) // card.tensor_parallel
    rule = card.generate
    if rule is None or device == "cpu":
        return Claim(fixed_bytes=weights)
    if generation.kv_cache_bytes:
        return Claim(fixed_bytes=weights + generation.kv_cache_bytes)
    context = min(rule.context_length, generation.max_context_tokens or rule.context_length)
    token_bytes = rule.kv_token_bytes // card.tensor_parallel
    least = token_bytes * min(context, generation.kv_cache_min_tokens)
    return Claim(fixed_bytes=weights, cache_bytes=least, token_bytes=token_bytes)


def is_under_pressure(policy: Policy, memory: Memory | None) -> bool:
    """Return whether a device uses more memory than the policy allows; False if it was not measured."""
    return memory is not None and headroom(policy, memory) < 0


def plan_evictions(policy: Policy, memory: Memory | None, tenants: list[Tenant], needed: int) -> tuple[list[str], int]:
    """Choose the least recently used unpinned models to unload, so that `needed` more bytes fit.

    Returns them, and the number of bytes still short after unloading them. memory None: it was not measured.
    """
    short = 0 if memory is None else needed - headroom(policy, memory)
    if policy.max_model_bytes:
        short = max(short, needed + sum(tenant.nbytes for tenant in tenants) - policy.max_model_bytes)
    chosen: list[str] = []
    for tenant in sorted(tenants, key=_last_used):
        if short <= 0:
            break
        if not tenant.is_pinned and tenant.nbytes:
            chosen.append(tenant.model)
            short -= tenant.nbytes
    return chosen, max(0, short)


def least_recently_used(tenants: list[Tenant]) -> str | None:
    """Return the model to unload if the shortage is unknown, or None if all are pinned."""
    loose = [tenant for tenant in tenants if not tenant.is_pinned]
    return min(loose, key=_last_used).model if loose else None


def headroom(policy: Policy, memory: Memory) -> int:
    """Return the bytes that are free below the limit of memory pressure; negative above it."""
    return memory.available_bytes - (memory.total_bytes - int(memory.total_bytes * policy.pressure_pct / 100))


def _last_used(tenant: Tenant) -> float:
    return tenant.last_used_s
