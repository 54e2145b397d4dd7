"""Chooses the models to unload when a device's memory is short. Pure: the caller passes loaded models and free memory.

Workers measure the memory. A model's size is the one its worker reported after the load; before that, it is an estimate
from the card. Source: SIE API reference, section 17.
"""

from __future__ import annotations

import msgspec

from sie.config.generation_settings import Generation
from sie.values.card import ModelCard

_MIB = 1 << 20
_LEAST_CONTEXT_TOKENS = 8192
"""A generating model is loaded where a sequence of this length fits, or one of its whole context if that is shorter."""


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


def needed_bytes(card: ModelCard, device: str, dtype: str, generation: Generation) -> int:
    """Return the peak memory of loading a model on one worker, or on one member of its group; 0 if unknown.

    On a CPU, weights are built in float32 before their conversion. On a GPU they arrive converted, and `auto` is
    bfloat16. There a generating model also needs keys and values: those of `kv_cache_bytes`, or else of one sequence. A
    CPU's are claimed as they are used.
    """
    if card.stub is not None:
        return card.stub.memory_mb * _MIB
    if card.tensor is not None:
        return 4 * card.num_weights  # the bytes of its file, in any format
    weights = card.num_weights * (4 if device == "cpu" or dtype == "float32" else 2)
    return (weights + (0 if device == "cpu" else _cache_bytes(card, generation))) // card.tensor_parallel


def _cache_bytes(card: ModelCard, generation: Generation) -> int:
    """Return the least memory for a generating model's keys and values on a GPU; 0 for other models."""
    rule = card.generate
    if rule is None:
        return 0
    context = min(rule.context_length, generation.max_context_tokens or rule.context_length, _LEAST_CONTEXT_TOKENS)
    return generation.kv_cache_bytes * card.tensor_parallel or rule.kv_token_bytes * context


def is_under_pressure(policy: Policy, memory: Memory | None) -> bool:
    """Return whether a device uses more memory than the policy allows; False if it was not measured."""
    return memory is not None and _headroom(policy, memory) < 0


def plan_evictions(policy: Policy, memory: Memory | None, tenants: list[Tenant], needed: int) -> tuple[list[str], int]:
    """Choose the least recently used unpinned models to unload, so that `needed` more bytes fit.

    Returns them, and the number of bytes still short after unloading them. memory None: it was not measured.
    """
    short = 0 if memory is None else needed - _headroom(policy, memory)
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


def _headroom(policy: Policy, memory: Memory) -> int:
    return memory.available_bytes - (memory.total_bytes - int(memory.total_bytes * policy.pressure_pct / 100))


def _last_used(tenant: Tenant) -> float:
    return tenant.last_used_s
