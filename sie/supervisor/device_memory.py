"""Tracks the memory of each device, and asks `evictions` which models to unload from it.

Workers on one device share its memory; all CPU workers share the host's. While a model loads or unloads on a device,
its free memory is unknown, so nothing else is decided for it.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.supervisor.evictions import (
    Memory,
    Policy,
    Tenant,
    is_under_pressure,
    least_recently_used,
    needed_bytes,
    plan_evictions,
)
from sie.supervisor.model_registry import Record


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a load: now, later (after evictions or other loads), or never."""

    victims: tuple[str, ...] = ()
    must_wait: bool = False
    refusal: str = ""


class DeviceMemories:
    """The memory of all the server's devices."""

    def __init__(self, settings: Models, generation: Generation, devices: list[str]) -> None:
        """`devices` are the workers' devices, by slot."""
        self._generation = generation
        self._policy = Policy(pressure_pct=settings.memory_pressure_pct, max_model_bytes=settings.max_model_bytes)
        self._dtype = settings.dtype
        self._devices = devices
        self._memory: dict[str, Memory] = {}

    def report(self, slot: int, memory: Memory) -> None:
        """Record a worker's measurement; a total of 0 means that it has none."""
        if memory.total_bytes:
            self._memory[self._devices[slot]] = memory
        else:
            self._memory.pop(self._devices[slot], None)

    def plan_load(self, record: Record, records: Collection[Record]) -> LoadPlan:
        """Decide whether a model fits onto every device that does not have it yet."""
        assert record.card is not None
        others = [other for other in records if other is not record]
        victims: list[str] = []
        must_wait = False
        for device in sorted(set(self._devices)):
            num_missing = sum(not record.place(slot).is_there for slot in self._slots(device))
            needed = needed_bytes(record.card, device, self._dtype, self._generation) * num_missing
            if not needed or (device not in self._memory and not self._policy.max_model_bytes):
                continue
            if self._is_settling(device, others):
                must_wait = True
                continue
            tenants = self._tenants(device, others)
            chosen, short = plan_evictions(self._policy, self._memory.get(device), tenants, needed)
            if short:
                return LoadPlan(refusal=_refusal(device, needed, short))
            victims += [model for model in chosen if model not in victims]
        return LoadPlan(victims=tuple(victims), must_wait=must_wait or bool(victims))

    def pressure_victim(self, slot: int, records: Collection[Record]) -> str | None:
        """Return the model to unload because a worker's device is over its limit, or None.

        A GPU's only model stays: its next request would load it again, into the same memory.
        """
        device = self._devices[slot]
        if not is_under_pressure(self._policy, self._memory.get(device)) or self._is_settling(device, records):
            return None
        tenants = self._tenants(device, records)
        return None if device != "cpu" and len(tenants) == 1 else least_recently_used(tenants)

    def shortage_victim(self, slot: int, model: str, records: Collection[Record]) -> str | None:
        """Return the model to unload because a step of `model` found no memory on a worker's device, or None."""
        device = self._devices[slot]
        if self._is_settling(device, records):
            return None
        return least_recently_used([one for one in self._tenants(device, records) if one.model != model])

    def _slots(self, device: str) -> list[int]:
        return [slot for slot, name in enumerate(self._devices) if name == device]

    def _is_settling(self, device: str, records: Collection[Record]) -> bool:
        slots = self._slots(device)
        return any(record.is_moving(slot) for record in records for slot in slots)

    def _tenants(self, device: str, records: Collection[Record]) -> list[Tenant]:
        tenants: list[Tenant] = []
        for record in records:
            reports = [record.reports[slot] for slot in self._slots(device) if slot in record.reports]
            loaded = [report.memory_bytes for report in reports if not (device != "cpu" and report.device == "cpu")]
            if loaded:
                tenants.append(
                    Tenant(
                        model=record.spec.id,
                        nbytes=sum(loaded),
                        last_used_s=record.last_used_s,
                        is_pinned=record.is_pinned,
                    )
                )
        return tenants


def _refusal(device: str, needed: int, short: int) -> str:
    return (
        f"needs about {needed >> 20} MiB on {device}, {-(-short >> 20)} MiB more than unloading others would free "
        "(memory_pressure_pct, max_model_bytes)"
    )
