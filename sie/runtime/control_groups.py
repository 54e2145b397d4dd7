"""Limits programs by control groups of their own, where the service manager has delegated a group to this process.

Elsewhere there are none: the root of a host's groups, and groups that others use too, are left alone. Source: cgroups(7),
systemd's "Control Group APIs and Delegation".
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

_ROOT: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")
_NEEDED: Final = frozenset({"memory", "pids"})
_OWN: Final = "main"
_NAME: Final = "sandbox-{}"


class GroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all processes of one group together."""

    memory_bytes: int
    processes: int


class Group:
    """The group of one program."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wrap(self, command: list[str]) -> list[str]:
        """Return a command line that joins the group before it becomes the command, so that every child is in it."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._path / "cgroup.procs"), *command]

    def has_run_out_of_memory(self) -> bool:
        """Return whether the kernel has killed the group over its memory."""
        with contextlib.suppress(OSError):
            lines = (self._path / "memory.events").read_text().splitlines()
            return any(name == "oom_kill" and count != "0" for name, count in (line.split() for line in lines))
        return False

    def end(self) -> None:
        """Kill all processes of the group."""
        with contextlib.suppress(OSError):  # before Linux 5.14; its processes are killed one by one, too
            (self._path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove the group; return False while a process of it has not ended."""
        try:
            self._path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class DelegatedGroup:
    """A group whose whole tree belongs to this process, which has moved into a leaf of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._ended = [Group(left) for left in path.glob(_NAME.format("*"))]  # of a process that was killed
        for group in self._ended:
            group.end()

    def make(self, limits: GroupLimits) -> Group:
        """Make the group of one program. Raises OSError."""
        self._ended = [group for group in self._ended if not group.remove()]
        self._count += 1
        path = self._path / _NAME.format(f"{os.getpid()}-{self._count}")
        path.mkdir()
        (path / "memory.max").write_text(str(limits.memory_bytes))
        (path / "pids.max").write_text(str(limits.processes))
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1"), ("cpu.idle", "1")):
            with contextlib.suppress(OSError):  # a kernel without swap, or older than the file
                (path / name).write_text(value)
        return Group(path)

    def give_up(self, group: Group) -> None:
        """Kill what is in a group, and remove it when it is empty."""
        group.end()
        if not group.remove():
            self._ended.append(group)


def find_delegated(root: Path = _ROOT, own: Path = _SELF, uid: int | None = None) -> Path | None:
    """Return the group that was delegated to this process, or None. Changes nothing.

    uid: the user to whom the group must belong; None is this process's. The groups of root's processes belong to root
    whether they were delegated or not.
    """
    uid = os.geteuid() if uid is None else uid
    try:
        lines = own.read_text().splitlines()
        name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        path = root / name
        if not name or ".." in path.parts or uid == 0 or (path / "cgroup.subtree_control").stat().st_uid != uid:
            return None
        held = set((path / "cgroup.controllers").read_text().split())
    except OSError:
        return None
    return path if held >= _NEEDED else None


def take_delegated(path: Path | None) -> DelegatedGroup | None:
    """Move this process into a leaf of the group, so that others can be limited. None if that is not possible."""
    if path is None:
        return None
    leaf, pid = path / _OWN, str(os.getpid())
    try:
        wanted = sorted({*_NEEDED, "cpu"} & set((path / "cgroup.controllers").read_text().split()))
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(pid)
        (path / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    except OSError:  # others are in the group, such as the server that this process belongs to
        with contextlib.suppress(OSError):
            (path / "cgroup.procs").write_text(pid)
            leaf.rmdir()
        return None
    return DelegatedGroup(path)
