"""Tracks the memory of each device, and asks `evictions` which models to unload from it.

Workers on one device share its memory; all CPU workers share the host's. While a model loads or unloads on a device,
its free memory is unknown, so nothing else is decided for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.ipc.messages import CacheRoom
from sie.supervisor.cache_rooms import plan_cache_room
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.evictions import (
    Claim,
    Memory,
    Policy,
    Tenant,
    claim_of,
    is_under_pressure,
    least_recently_used,
    plan_evictions,
)
from sie.supervisor.load_placement import Place, choose_places, leading_slots, names_of
from sie.supervisor.model_registry import Record


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a load: now, later (after evictions or other loads), or never.

    slots are the workers that load it; victims are the models to unload first, each with the workers whose memory it
    is about.
    """

    slots: tuple[int, ...] = ()
    victims: dict[str, tuple[int, ...]] = {}
    must_wait: bool = False
    refusal: str = ""


class DeviceMemories:
    """The memory of all the server's devices."""

    def __init__(self, settings: Models, generation: Generation, places: Sequence[WorkerSlot]) -> None:
        """`places` are the workers' devices, by slot."""
        self._generation = generation
        self._policy = Policy(pressure_pct=settings.memory_pressure_pct, max_model_bytes=settings.max_model_bytes)
        self._dtype = settings.dtype
        self._devices = [place.device for place in places]
        self._sizes = {
            place.device: Memory(place.memory_bytes, place.memory_bytes) for place in places if place.memory_bytes
        }
        """The memory of GPUs that no worker has measured yet, as if nobody else used it. A worker measures with its first model."""
        self._memory = dict(self._sizes)

    def report(self, slot: int, memory: Memory) -> None:
        """Record a worker's measurement; a total of 0 means that it has none."""
        device = self._devices[slot]
        if memory.total_bytes:
            self._memory[device] = memory
        elif device in self._sizes:
            self._memory[device] = self._sizes[device]
        else:
            self._memory.pop(device, None)

    def forget_worker(self, slot: int) -> None:
        """Forget the measurement of a dead worker: what its models took of a GPU is free again."""
        if self._devices[slot] != "cpu":
            self.report(slot, Memory(0, 0))

    def has_place_without(self, record: Record, records: Collection[Record], away: Collection[int]) -> bool:
        """Return whether a model finds room on workers without those in the slots `away`."""
        if record.card is None or not self._slots_without(record, away):
            return False
        return not self.plan_load(record, records, away).refusal

    def _slots_without(self, record: Record, away: Collection[int]) -> list[int]:
        size = 1 if record.card is None else record.card.tensor_parallel
        slots = leading_slots(self._devices, size, record.spec.devices)
        return [slot for slot in slots if not set(away).intersection(range(slot, slot + size))]

    def plan_load(self, record: Record, records: Collection[Record], away: Collection[int] = ()) -> LoadPlan:
        """Decide which workers load a model, and whether they can do so now.

        away: the slots whose devices are set aside, which get it only if no other may.
        """
        assert record.card is not None
        others = [other for other in records if other is not record]
        spec, size = record.spec, record.card.tensor_parallel
        slots = self._slots_without(record, ())
        if refusal := _why_nowhere(self._devices, size, spec, slots):
            return LoadPlan(refusal=refusal)
        places = [self._place(record, slot, others) for slot in self._slots_without(record, away) or slots]
        if "cpu" in self._devices:  # workers share this memory, so it holds all copies or none
            return self._plan_on_cpu(record, choose_places(places, spec.replicas, is_strict=True), others)
        chosen = choose_places(places, spec.replicas, is_strict=bool(spec.devices) and not spec.replicas)
        if not spec.replicas and not spec.devices:
            chosen = self._leave_room(record, chosen, others)
        if not chosen:
            least = min(places, key=lambda place: place.short_bytes or 1 << 62)
            device = self._devices[least.slot]
            return LoadPlan(refusal=_refusal(device, self._needed(record, device), least.short_bytes))
        return LoadPlan(
            slots=tuple(place.slot for place in chosen),
            victims=_victims_at(chosen, size),
            must_wait=any(place.must_wait or place.victims for place in chosen),
        )

    def _leave_room(self, record: Record, chosen: list[Place], others: list[Record]) -> list[Place]:
        """Return the places of a model that leave room for those that have none yet: all of these are loaded once first."""
        waiting = [other for other in others if other.wanted and other.card is not None and other.is_nowhere]
        roomy: list[Place] = []
        for place in chosen:
            assert record.card is not None
            members = self._devices[place.slot : place.slot + record.card.tensor_parallel]
            needs = {device: sum(self._needed(other, device) for other in [record, *waiting]) for device in members}
            if place.is_there or not waiting or all(self._has_room(*need, others) for need in needs.items()):
                roomy.append(place)
        return roomy or chosen[:1]

    def _has_room(self, device: str, needed: int, others: list[Record]) -> bool:
        return plan_evictions(self._policy, self._memory.get(device), self._tenants(device, others), needed) == ([], 0)

    def _plan_on_cpu(self, record: Record, chosen: list[Place], others: list[Record]) -> LoadPlan:
        slots = tuple(place.slot for place in chosen)
        missing = sum(not place.is_there for place in chosen) * (record.card.tensor_parallel if record.card else 1)
        needed = self._needed(record, "cpu") * missing
        if not needed or not self._is_limited("cpu"):
            return LoadPlan(slots=slots)
        if self._is_settling("cpu", others):
            return LoadPlan(slots=slots, must_wait=True)
        victims, short = plan_evictions(self._policy, self._memory.get("cpu"), self._tenants("cpu", others), needed)
        if short:
            return LoadPlan(refusal=_refusal("cpu", needed, short))
        everywhere = tuple(range(len(self._devices)))
        return LoadPlan(slots=slots, victims=dict.fromkeys(victims, everywhere), must_wait=bool(victims))

    def _place(self, record: Record, slot: int, others: list[Record]) -> Place:
        """Return what a load would need on a worker's device, and on those of its neighbours in a group."""
        assert record.card is not None
        slots = range(slot, slot + record.card.tensor_parallel)
        members = [self._devices[member] for member in slots]
        is_there = record.place(slot).is_there
        used = max(sum(self._bytes_at(member, other) for other in others) for member in slots)
        place = Place(slot=slot, is_there=is_there, used_bytes=used)
        if is_there or members[0] == "cpu":
            return place
        victims: list[str] = []
        short, must_wait = 0, False
        for device in members:
            needed = self._needed(record, device)
            if not needed or not self._is_limited(device):
                continue
            if self._is_settling(device, others):
                must_wait = True
                continue
            tenants = self._tenants(device, others)
            own, missing = plan_evictions(self._policy, self._memory.get(device), tenants, needed)
            victims += [model for model in own if model not in victims]
            short = max(short, missing)
        return msgspec.structs.replace(place, victims=tuple(victims), short_bytes=short, must_wait=must_wait)

    def is_early(self, record: Record, records: Collection[Record]) -> bool:
        """Return whether a model of the start must wait until the sizes of the others are known, to leave memory for them.

        Only caches on GPUs are divided, and only if no setting fixes their size.
        """
        is_divided = not self._generation.kv_cache_bytes and any(device != "cpu" for device in self._devices)
        leaves_memory = is_divided and record.preload and _generates(record)
        return leaves_memory and any(other.preload and other.wanted and other.card is None for other in records)

    def cache_rooms(self, record: Record, slots: Collection[int], records: Collection[Record]) -> dict[int, CacheRoom]:
        """Return what a model's keys and values may take at each worker that is about to load it.

        A successor staged beside the serving copy leaves nothing to others: that copy's memory becomes free.
        """
        if not _generates(record):
            return dict.fromkeys(slots, CacheRoom())
        used = [sum(self._bytes_at(slot, each) for each in records) for slot in range(len(self._devices))]
        coming = [(other, self._likely_slots(other, used)) for other in records if other is not record]
        return {slot: self._cache_room(record, slot, records, coming) for slot in slots}

    def _cache_room(
        self, record: Record, slot: int, records: Collection[Record], coming: list[tuple[Record, tuple[int, ...]]]
    ) -> CacheRoom:
        """Return the least room on the devices of a worker and its group."""
        assert record.card is not None
        if self._devices[slot] == "cpu":
            return CacheRoom()
        alone = CacheRoom(pressure_pct=self._policy.pressure_pct)
        if slot in record.reports:
            return alone
        members = range(slot, slot + record.card.tensor_parallel)
        rooms = [self._room_at(record, member, records, coming) or alone for member in members]
        reserved, share = max(room.reserved_bytes for room in rooms), min(room.share for room in rooms)
        return CacheRoom(alone.pressure_pct, reserved, share)

    def _room_at(
        self, record: Record, member: int, records: Collection[Record], coming: list[tuple[Record, tuple[int, ...]]]
    ) -> CacheRoom | None:
        """Return the room on one device, or None if its memory is not known."""
        device = self._devices[member]
        memory = self._memory.get(device)
        if memory is None:
            return None
        asked = sum(
            self._needed(other, device)
            for other, _ in coming
            if _is_at(other, member) and not any(other.covers(leader, member) for leader in other.reports)
        )
        here = [
            other
            for other, leaders in coming
            if not _is_at(other, member) and any(other.covers(leader, member) for leader in leaders)
        ]
        return plan_cache_room(
            self._policy,
            Memory(memory.total_bytes, memory.available_bytes - asked),
            self._claim(record, device),
            [self._claim(other, device) for other in here if _is_firm(other)],
            [self._claim(other, device) for other in here if not _is_firm(other)],
            used_bytes=asked + sum(tenant.nbytes for tenant in self._tenants(device, records)),
            lazy_share=self._generation.kv_cache_lazy_share,
        )

    def _likely_slots(self, record: Record, used: Sequence[int]) -> tuple[int, ...]:
        """Return the workers that were chosen to load a model, or else those that probably will be."""
        if record.card is None or record.retry_at_s == float("inf"):
            return ()
        if record.wanted and record.slots is not None:
            return record.slots
        size = record.card.tensor_parallel
        slots = sorted(self._slots_without(record, ()), key=lambda slot: max(used[slot : slot + size]))
        return tuple(slots[: record.spec.replicas or None])

    def _claim(self, record: Record, device: str) -> Claim:
        assert record.card is not None
        return claim_of(record.card, device, self._dtype, self._generation)

    def _needed(self, record: Record, device: str) -> int:
        return self._claim(record, device).least_bytes

    def _is_limited(self, device: str) -> bool:
        """Return whether anything is known that limits a device's models."""
        return device in self._memory or bool(self._policy.max_model_bytes)

    def _bytes_at(self, slot: int, record: Record) -> int:
        """Return an estimate of a model's memory at a worker, if that has it or will have it."""
        leaders = [one for one in range(len(self._devices)) if record.place(one).is_there or record.is_expected(one)]
        is_here = any(record.covers(leader, slot) for leader in leaders)
        return self._needed(record, self._devices[slot]) if is_here else 0

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
        return any(
            (record.is_moving(leader) or (device != "cpu" and record.is_expected(leader)))
            and record.reaches(leader, slots)
            for record in records
            for leader in range(len(self._devices))
        )

    def _tenants(self, device: str, records: Collection[Record]) -> list[Tenant]:
        tenants: list[Tenant] = []
        for record in records:
            slots = self._slots(device)
            reports = [
                report for leader, report in record.reports.items() for slot in slots if record.covers(leader, slot)
            ]
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


def _victims_at(places: list[Place], size: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for place in places:
        for model in place.victims:
            found[model] = (*found.get(model, ()), *range(place.slot, place.slot + size))
    return found


def _why_nowhere(devices: list[str], size: int, spec: ModelSpec, slots: list[int]) -> str:
    """Return why no worker may load a model, or an empty text."""
    names = names_of(devices)
    unknown = [name for name in spec.devices if name not in names]
    if unknown:
        return f"devices: this server has no {unknown[0]}, only {', '.join(names)}"
    if not slots:
        return f"tensor_parallel is {size}, but there are not {size} workers one after another in {', '.join(names)}"
    if len(slots) < spec.replicas:
        return f"replicas is {spec.replicas}, but only {len(slots)} places may load it"
    return ""


def _generates(record: Record) -> bool:
    return record.card is not None and record.card.generate is not None


def _is_firm(record: Record) -> bool:
    """Return whether a model will be loaded without another request."""
    return record.wanted or (record.preload and not record.is_excused)


def _is_at(record: Record, slot: int) -> bool:
    """Return whether a worker's device holds a model, or a part of it, or will soon."""
    return any(record.covers(leader, slot) and place.is_there for leader, place in record.places.items())


def _refusal(device: str, needed: int, short: int) -> str:
    caches = "" if device == "cpu" else ", or a lower kv_cache_share or kv_cache_bytes of the generating models there"
    return (
        f"needs about {needed >> 20} MiB on {device}, {-(-short >> 20)} MiB more than unloading others would free "
        f"(memory_pressure_pct, max_model_bytes{caches})"
    )
