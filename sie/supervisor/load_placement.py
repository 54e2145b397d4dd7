"""Chooses the workers that load a model. Pure: the caller passes devices, and what each place has room for.

A place is a worker, or, for a model whose weights are divided, a worker and its neighbours, of which the first leads.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a load at a place would need. slot is that of the worker that leads."""

    slot: int
    is_there: bool
    """Whether the model is there, or will soon be."""
    used_bytes: int
    """An estimate of the models there, on its fullest device."""
    victims: tuple[str, ...] = ()
    """The models to unload first."""
    short_bytes: int = 0
    """The bytes that are still missing after that."""
    must_wait: bool = False
    """Whether something loads or unloads there, so that its memory is not known."""


def names_of(devices: Sequence[str]) -> list[str]:
    """Return each worker's name in a model's `devices`: a GPU's own, or `cpu:N` with the worker's number."""
    return [f"cpu:{slot}" if device == "cpu" else device for slot, device in enumerate(devices)]


def leading_slots(devices: Sequence[str], size: int, named: Sequence[str]) -> list[int]:
    """Return the first slot of each group of `size` adjacent workers. Groups do not overlap.

    If any devices are named, a group has only workers on those.
    """
    allowed = [not named or name in named for name in names_of(devices)]
    slots: list[int] = []
    slot = 0
    while slot + size <= len(devices):
        if all(allowed[slot : slot + size]):
            slots.append(slot)
            slot += size
        else:
            slot += 1
    return slots


def choose_places(places: Sequence[Place], replicas: int, *, is_strict: bool) -> list[Place]:
    """Return the places that get a model, or have it; empty if none has room for it.

    Those that have it come first, then those with room, the emptiest first, then those that must unload the fewest
    models. replicas 0: all. With is_strict, all of these are necessary. Otherwise one copy is enough: it is packed where it
    fits, and other models are unloaded for one copy only, or for as many as `replicas` says.
    """
    ranked = sorted(places, key=_rank)
    if is_strict:
        chosen = ranked[: replicas or None]
        return [] if any(place.short_bytes for place in chosen) else chosen
    possible = [place for place in ranked if not place.short_bytes]
    if replicas:
        return possible[:replicas]
    return [place for place in possible if place.is_there or not place.victims] or possible[:1]


def _rank(place: Place) -> tuple[bool, bool, int, int, int]:
    return (not place.is_there, place.short_bytes > 0, len(place.victims), place.used_bytes, place.slot)
