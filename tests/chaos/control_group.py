"""A control group of a test's own, of either version, in which a server starts and meets a limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
    "freezer": ("cgroup.freeze", "freezer.state"),
}
_FREEZES: Final = (("0", "1"), ("THAWED", "FROZEN"))
"""What to write to let processes run, and to freeze them, by version."""
_USAGES: Final = {"memory": ("memory.current", "memory.usage_in_bytes"), "pids": ("pids.current", "pids.current")}


class ControlGroup:
    """One group of one controller (`memory`, `pids` or `freezer`)."""

    def __init__(self, path: Path, controller: str) -> None:
        self._path = path
        self._version = 0 if (path / _LIMITS[controller][0]).exists() else 1
        self._controller = controller
        self.prefix = ("sh", "-c", f'echo $$ > {path}/cgroup.procs && exec "$0" "$@"')
        """A command that becomes the one behind it, inside the group."""

    def limit(self, value: int | None) -> None:
        """Allow so much; None for all there is."""
        text = str(value) if value is not None else "max" if self._limit_file().name.endswith("max") else "-1"
        self._limit_file().write_text(text)

    def add(self, pid: int) -> None:
        """Move a process into the group."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def freeze(self, *, is_frozen: bool) -> None:
        """Freeze the group's processes, or let them run on."""
        self._limit_file().write_text(_FREEZES[self._version][is_frozen])

    def usage(self) -> int:
        """Return how much is in use."""
        return int((self._path / _USAGES[self._controller][self._version]).read_text())

    def _limit_file(self) -> Path:
        return self._path / _LIMITS[self._controller][self._version]


@contextlib.contextmanager
def control_group(controller: str) -> Iterator[ControlGroup]:
    """Yield a new group, removed at the end; skip the test, with the reason, where none can be made."""
    path = _home(controller) / f"chaos-{os.getpid()}-{controller}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no {controller} control group can be made here: {error.strerror}")
    try:
        if not any((path / name).exists() for name in _LIMITS[controller]):
            pytest.skip(f"the {controller} controller is not enabled for {path.parent}")
        yield ControlGroup(path, controller)
    finally:
        _remove(path)


def _home(controller: str) -> Path:
    """Return the group that this process is in."""
    found = _ROOT
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _ROOT / controllers / path.lstrip("/")
        if not controllers:
            found = _ROOT / path.lstrip("/")
    return found


def _remove(path: Path) -> None:
    """Remove a group; its last process may still be on its way out."""
    deadline_s = time.monotonic() + 5.0
    while True:
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return
