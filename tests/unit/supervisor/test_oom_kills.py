from __future__ import annotations

from pathlib import Path

import pytest

from sie.supervisor.oom_kills import OomKills, count_oom_kills


class Kernel:
    """A counter of kills, at 4 when the server starts."""

    count = 4

    def __call__(self) -> int:
        return self.count


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def kills(kernel: Kernel) -> OomKills:
    return OomKills(kernel)


def ticked(kills: OomKills, start_s: float, end_s: float) -> None:
    for tenths in range(int(start_s * 10), int(end_s * 10)):
        kills.tick(tenths / 10)


def test_kills_before_the_start_explain_no_death(kills):
    ticked(kills, 100, 130)
    assert not kills.explain_death()


def test_each_kill_explains_one_death(kernel, kills):
    ticked(kills, 100, 130)
    kernel.count += 2
    assert [kills.explain_death() for _ in range(3)] == [True, True, False]


def test_a_kill_some_seconds_ago_explains_a_death_that_took_so_long_to_be_seen(kernel, kills):
    ticked(kills, 100, 130)
    kernel.count += 1
    ticked(kills, 130, 137)
    assert kills.explain_death()


def test_a_kill_of_a_minute_ago_explains_no_death(kernel, kills):
    """Something else on the host was killed; a worker that is killed from outside later has nothing to do with it."""
    ticked(kills, 100, 130)
    kernel.count += 1
    ticked(kills, 130, 190)
    assert not kills.explain_death()


def test_the_kernels_counter_can_be_read_here():
    assert count_oom_kills() >= 0


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/", {}, 9),  # the group of all has no counter
        ("0::/", {"memory.events": "low 0\noom 3\noom_kill 2\n"}, 2),  # a container's own group
        ("0::/a/b", {"a/b/memory.events": "oom_kill 2\n", "a/memory.events": "oom_kill 5\n"}, 2),
        ("0::/a", {"a/memory.events.local": "oom_kill 1\n", "a/memory.events": "oom_kill 2\n"}, 1),  # not of sandboxes
        ("4:cpu,memory:/a\n0::/", {"memory/a/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        (
            "4:memory:/docker/x",
            {"memory/memory.oom_control": "oom_kill 3\n"},
            3,
        ),  # as a container without a view of its own
        ("4:memory:/a", {"memory/a/memory.oom_control": "under_oom 0\n"}, 9),  # before Linux 4.17
        ("", {}, 9),
    ],
)
def test_kills_in_the_own_group_count_where_it_has_a_counter(
    tmp_path: Path, groups: str, files: dict[str, str], count: int
) -> None:
    proc, sysfs = tmp_path / "proc", tmp_path / "sysfs"
    for path, text in {
        **{sysfs / name: text for name, text in files.items()},
        proc / "self" / "cgroup": groups,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 9\n")
    assert count_oom_kills(proc=proc, sysfs=sysfs) == count


def test_a_kernel_that_counts_nothing_is_taken_at_its_word(tmp_path: Path) -> None:
    assert count_oom_kills(proc=tmp_path, sysfs=tmp_path) == 0
