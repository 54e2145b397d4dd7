"""Finds a process's control groups, in either version. Source: cgroups(7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

SYSFS: Final = Path("/sys/fs/cgroup")


class CgroupPath(NamedTuple):
    """A group of a process, and the root of its hierarchy. is_unified: of version 2, which has one hierarchy for all."""

    path: Path
    root: Path
    is_unified: bool

    def with_parents(self) -> Iterator[Path]:
        """Yield the group, its parent, and so on up to the root."""
        for directory in (self.path, *self.path.parents):
            yield directory
            if directory == self.root:
                return


def cgroup_paths(
    controller: str, pid: int | None = None, *, proc: Path = Path("/proc"), sysfs: Path = SYSFS
) -> Iterator[CgroupPath]:
    """Yield the groups of a process, else of this one, that the controller may act on; none where that cannot be read."""
    for line in read_lines(proc / str(pid or "self") / "cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        is_unified = hierarchy == "0"
        if is_unified or controller in controllers.split(","):
            root = sysfs if is_unified else sysfs / controller
            yield CgroupPath(root / path.lstrip("/"), root, is_unified)


def read_lines(path: Path) -> list[str]:
    """Return the file's lines, or an empty list when it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
