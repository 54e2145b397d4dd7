"""Decides which loaded models go when a device's memory is short. Pure: it is handed what is loaded, and what is free.

Memory is measured by the workers; what a model takes is what its worker said once it was loaded, and before that an
estimate from its card. Source: SIE API reference, section 17.
"""

from __future__ import annotations

import msgspec

from sie.values.card import ModelCard

_MIB = 1 << 20


class Memory(msgspec.Struct, frozen=True):
    """A device's memory as measured, all processes counted."""

    total_bytes: int
    available_bytes: int


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded model on one device; nbytes over all its workers there."""

    model: str
    nbytes: int
    last_used_s: float
    is_pinned: bool = False


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How full a device may get; max_model_bytes 0: as full as pressure_pct allows."""

    pressure_pct: float
    max_model_bytes: int = 0


def needed_bytes(card: ModelCard, device: str, dtype: str) -> int:
    """Return what loading a model takes on one worker at the peak; 0 when the card does not tell.

    On a CPU weights are built in float32 before they are converted; on a GPU they arrive converted, and `auto` is
    bfloat16 there.
    """
    if card.stub is not None:
        return card.stub.memory_mb * _MIB
    if card.tensor is not None:
        return 4 * card.num_weights  # its file's bytes, in whatever format they are
    return card.num_weights * (4 if device == "cpu" or dtype == "float32" else 2)


def is_under_pressure(policy: Policy, memory: Memory | None) -> bool:
    """Tell whether more of a device's memory is in use than may be; False when it was not measured."""
    return memory is not None and _headroom(policy, memory) < 0


def plan_evictions(policy: Policy, memory: Memory | None, tenants: list[Tenant], needed: int) -> tuple[list[str], int]:
    """Choose the models that have to go before needed more bytes fit: the least recently used that are not pinned.

    Returns them, and how many bytes are still short without them all. memory None: it was not measured.
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
    """Return the model to unload when it is not known how much is short, or None when all are pinned."""
    loose = [tenant for tenant in tenants if not tenant.is_pinned]
    return min(loose, key=_last_used).model if loose else None


def _headroom(policy: Policy, memory: Memory) -> int:
    return memory.available_bytes - (memory.total_bytes - int(memory.total_bytes * policy.pressure_pct / 100))


def _last_used(tenant: Tenant) -> float:
    return tenant.last_used_s
