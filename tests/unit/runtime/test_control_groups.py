"""Groups of sandboxes, over a tree of files that stands for the kernel's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sie.agents.host.sandboxed import Bounds, Sandboxed
from sie.runtime.control_groups import DelegatedGroup, GroupLimits, find_delegated, take_delegated
from sie.runtime.sandbox import Program, Sandbox, make_home

LIMITS = GroupLimits(memory_bytes=1 << 20, processes=9)
NAME = f"sandbox-{os.getpid()}-1"
USER = os.geteuid() or 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A delegated group `unit`."""
    group = tmp_path / "system.slice" / "unit"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (group / "cgroup.subtree_control").touch()
    os.chown(group / "cgroup.subtree_control", USER, -1)
    (tmp_path / "self").write_text("4:memory:/other\n0::/system.slice/unit\n")
    return tmp_path


def found(root: Path, uid: int = USER) -> Path | None:
    return find_delegated(root, root / "self", uid)


def test_a_delegated_group_is_found_and_taken(root: Path) -> None:
    group = root / "system.slice" / "unit"
    assert found(root) == group
    assert take_delegated(found(root)) is not None
    assert (group / "main" / "cgroup.procs").read_text() == str(os.getpid())
    assert (group / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("self", "0::/\n"),
        ("self", "4:memory:/system.slice/unit\n"),
        ("self", "0::/../unit\n"),
        ("self", "0::/system.slice/gone\n"),
        ("self", ""),
        ("system.slice/unit/cgroup.controllers", "cpu hugetlb\n"),
        ("system.slice/unit/cgroup.controllers", ""),
    ],
)
def test_other_groups_are_left_alone(root: Path, file: str, text: str) -> None:
    (root / file).write_text(text)
    assert found(root) is None


def test_a_group_of_another_user_or_of_root_is_left_alone(root: Path) -> None:
    assert found(root, USER + 1) is None
    assert found(root, 0) is None
    assert find_delegated(root, root / "missing", USER) is None


def test_a_group_that_others_use_is_left_as_it_was(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, write = root / "system.slice" / "unit", Path.write_text

    def refuse(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control":
            raise OSError(16, "Device or resource busy")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    assert take_delegated(group) is None
    assert (group / "cgroup.procs").read_text() == str(os.getpid()), "this process is back"


def test_a_sandbox_joins_its_group_with_its_limits_and_says_why_it_ended(root: Path) -> None:
    groups = DelegatedGroup(root)
    bounds = Bounds(memory_bytes=1 << 20, processes=7, disk_bytes=1 << 30, files=99, output_bytes=1 << 20,
                    shown_chars=99, groups=groups)  # fmt: skip
    sandbox, made = Sandbox(mode="off"), root / NAME
    make_home(root / "home", sandbox)

    async def run() -> Sandboxed:
        box = Sandboxed(sandbox, root / "home", bounds)
        code = f"cp {made}/cgroup.procs joined; echo 'oom_kill 1' > {made}/memory.events"
        box.start(Program(command=("/bin/sh", "-c", code)))
        assert (made / "memory.max").read_text() == str(1 << 20)
        assert (made / "pids.max").read_text() == "9"
        assert (made / "cpu.idle").read_text() == "1"
        await asyncio.wait_for(box.ended, 30)
        assert (root / "home/work/joined").read_text().strip() == str(box.pid)
        return box

    assert "sandbox_memory_bytes" in asyncio.run(run()).reason
    assert (made / "cgroup.kill").read_text() == "1"


def test_a_group_is_removed_when_it_is_empty(root: Path) -> None:
    groups = DelegatedGroup(root)
    groups.give_up(groups.make(LIMITS))
    assert (root / NAME).exists(), "a process of it still ends"
    for file in (root / NAME).iterdir():
        file.unlink()
    groups.make(LIMITS)
    assert not (root / NAME).exists()


def test_groups_of_a_killed_process_are_ended(root: Path) -> None:
    (root / "sandbox-7-1").mkdir()
    groups = DelegatedGroup(root)
    assert (root / "sandbox-7-1" / "cgroup.kill").read_text() == "1"
    (root / "sandbox-7-1" / "cgroup.kill").unlink()
    groups.make(LIMITS)
    assert not (root / "sandbox-7-1").exists()
