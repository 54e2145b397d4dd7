"""Divides the usable cores between workers: whole cores with all of their threads, those of a GPU near that GPU.

Two workers on the threads of one core would halve each other's speed, and a core of another socket reaches a GPU and its
memory over a slower link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_CPUS = Path("/sys/devices/system/cpu")


class CorePlace(NamedTuple):
    """Where a logical core is. Those with equal places are threads of one core."""

    node: int
    package: int
    core: int


def read_places(cores: Sequence[int], root: Path = _CPUS) -> dict[int, CorePlace]:
    """Return the places of logical cores; empty if the kernel does not tell all of them.

    Source: Documentation/admin-guide/cputopology.rst, and the `node*` links of the NUMA nodes.
    """
    places: dict[int, CorePlace] = {}
    for core in cores:
        try:
            folder = root / f"cpu{core}"
            numbers = (int((folder / "topology" / name).read_text()) for name in ("physical_package_id", "core_id"))
            nodes = (path.name.removeprefix("node") for path in folder.glob("node[0-9]*"))
            places[core] = CorePlace(min(map(int, nodes), default=0), *numbers)
        except (OSError, ValueError):
            return {}
    return places


def share_cores(
    cores: Sequence[int], num_workers: int, places: Mapping[int, CorePlace] | None = None
) -> list[tuple[int, ...]]:
    """Split cores into num_workers nearly equal shares of neighbours, none of which divides a core between workers.

    With fewer cores than workers, the threads of a core are divided, and with too few of these, workers share them.
    """
    if num_workers <= 1:
        return [tuple(cores)]
    whole = _whole_cores(cores, places or {})
    if len(whole) < num_workers:
        whole = [(core,) for one in whole for core in one]
    if len(whole) < num_workers:
        return [whole[i % len(whole)] for i in range(num_workers)]
    bounds = [-(-i * len(whole) // num_workers) for i in range(num_workers + 1)]
    return [tuple(sorted(core for one in whole[start:end] for core in one)) for start, end in pairwise(bounds)]


def share_near(
    cores: Sequence[int], near: Sequence[frozenset[int]], places: Mapping[int, CorePlace]
) -> list[tuple[int, ...]]:
    """Return a share of cores for each GPU, from those that are near it.

    GPUs with the same cores near them divide these as `share_cores` does. If a GPU has no usable core near it, or not all
    of them are known, all cores are divided.
    """
    usable = [frozenset(cores) & one for one in near]
    if not all(usable):
        return share_cores(cores, len(near), places)
    shares: list[tuple[int, ...]] = [()] * len(near)
    for group in dict.fromkeys(usable):
        members = [number for number, own in enumerate(usable) if own == group]
        for number, share in zip(members, share_cores(sorted(group), len(members), places), strict=True):
            shares[number] = share
    return shares


def _whole_cores(cores: Sequence[int], places: Mapping[int, CorePlace]) -> list[tuple[int, ...]]:
    """Return the threads of each core, neighbours beside each other; each thread alone if a place is unknown."""
    if any(core not in places for core in cores):
        return [(core,) for core in cores]
    whole: dict[CorePlace, list[int]] = {}
    for core in sorted(cores, key=lambda core: (places[core], core)):
        whole.setdefault(places[core], []).append(core)
    return [tuple(threads) for threads in whole.values()]
