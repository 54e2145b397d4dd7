"""What goes when there are too many responses: never one that is being made, and never those of who hold less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sie.frontend.responses.response_store import Kept, ResponseFile, StoreLimits

NOW_S = 1e9


class Opened:
    """A file of responses, and the time."""

    def __init__(self, directory: Path, **limits: Any) -> None:
        self.now_s = NOW_S
        given = {"max_responses": 4, "max_bytes": 1 << 30, "max_age_s": 1000.0, **limits}
        self.file = ResponseFile(directory, StoreLimits(**given), lambda: self.now_s)
        self._owners: dict[str, str] = {}

    def add(self, owner: str, *names: str, status: str = "completed", num_bytes: int = 2) -> None:
        for name in names:
            self._owners[name] = owner
            self.file.add(owner, Kept(id=name, status=status, body=b"{}".ljust(num_bytes)))

    def there(self) -> list[str]:
        return [name for name, owner in self._owners.items() if self.file.get(name, owner) is not None]


@pytest.mark.parametrize("status", ["queued", "in_progress"])
@pytest.mark.parametrize("maker", ["ann", "bob"])
def test_response_under_way_stays_and_is_not_stopped(tmp_path: Path, status: str, maker: str) -> None:
    opened = Opened(tmp_path)
    opened.add(maker, "running", status=status)
    opened.add("bob", *(f"r{number}" for number in range(9)))
    assert opened.there() == ["running", "r6", "r7", "r8"], "it counts, too"
    assert opened.file.stopped(["running"]) == []
    opened.file.update("running", "completed", b"{}")
    opened.add("bob", "last")
    assert ("running" in opened.there()) == (maker == "ann")
    opened.file.close()


def test_more_under_way_than_the_limit_all_stay(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    names = [f"r{number}" for number in range(6)]
    opened.add("ann", *names, status="queued")
    opened.add("bob", "ended")
    assert opened.file.stopped(names) == []
    assert opened.there() == names
    opened.file.close()


def test_response_whose_process_is_gone_goes_like_an_ended_one(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.add("ann", "lost", status="in_progress")
    opened.file.file.db.execute("UPDATE responses SET maker = 'boot/1/1'")
    opened.add("ann", *(f"r{number}" for number in range(4)))
    assert opened.file.stopped(["lost"]) == ["lost"]
    opened.file.close()


def test_response_under_way_outlives_the_longest_age(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.add("ann", "running", status="in_progress")
    opened.add("ann", "ended")
    opened.now_s += 1001.0
    opened.add("ann", "new")
    assert opened.file.stopped(["running", "ended", "new"]) == ["ended", "new"]
    rows = opened.file.file.db.execute("SELECT id FROM responses ORDER BY number").fetchall()
    assert rows == [("running",), ("new",)]
    opened.file.close()


def test_owner_with_most_loses_its_oldest(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.add("ann", "a0")
    opened.add("bob", *(f"b{number}" for number in range(9)))
    assert opened.there() == ["a0", "b6", "b7", "b8"]
    opened.add("cat", "c0", "c1", "c2")
    assert opened.there() == ["a0", "b8", "c1", "c2"]
    opened.file.close()


def test_owner_with_most_bytes_loses_its_oldest(tmp_path: Path) -> None:
    opened = Opened(tmp_path, max_responses=64, max_bytes=3000)
    opened.add("ann", *(f"a{number}" for number in range(5)))
    opened.add("bob", *(f"b{number}" for number in range(4)), num_bytes=1000)
    assert opened.there() == ["a0", "a1", "a2", "a3", "a4", "b2", "b3"]
    opened.file.close()


def test_of_equal_owners_the_one_with_the_oldest_response_loses_it(tmp_path: Path) -> None:
    opened = Opened(tmp_path, max_responses=1)
    opened.add("zoe", "old")
    opened.add("ann", "new")
    assert opened.there() == ["new"]
    opened.file.close()
