"""The rows of files: owners, lifetimes, and who loses a file when there are too many."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from sie.agents.store.files import FILES_SCHEMA, FileLimits, FileQuery, FileRows, KeptFile
from sie.values.errors import InputTooLong, Unavailable

LIMITS = FileLimits(max_files=6, max_bytes=1000, max_key_files=4, max_key_bytes=600, max_age_s=100.0)


def file(name: str, now_s: float = 0.0, num_bytes: int = 10, **fields: Any) -> KeptFile:
    given = {"purpose": "user_data", "tool": "user_upload", "blob": f"blob-{name}", **fields}
    return KeptFile(
        id=name, name=name, format="", mime_type="text/plain", num_bytes=num_bytes, created_s=now_s,
        expires_s=now_s + LIMITS.max_age_s, **given,
    )  # fmt: skip


@pytest.fixture
def db() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.executescript("CREATE TABLE dropped (blob TEXT NOT NULL);" + FILES_SCHEMA)
    return made


@pytest.fixture
def rows(db: sqlite3.Connection) -> FileRows:
    return FileRows(db, LIMITS)


def ids(rows: FileRows, owner: str, now_s: float = 1.0, **query: Any) -> list[str]:
    page = rows.page(owner, FileQuery(**query), now_s)
    assert page is not None
    return [one.id for one in page[0]]


def dropped(db: sqlite3.Connection) -> list[str]:
    return [blob for (blob,) in db.execute("SELECT blob FROM dropped")]


def test_file_belongs_to_its_owner_and_another_may_have_its_id(rows: FileRows) -> None:
    rows.add("ann", file("f", num_bytes=1))
    rows.add("bob", file("f", num_bytes=2))
    sizes = [found.num_bytes for owner in ("ann", "bob") if (found := rows.find(owner, "f", 1.0)) is not None]
    assert sizes == [1, 2]
    assert rows.find("", "f", 1.0) is None
    assert not rows.delete("eve", "f", 1.0)
    assert rows.delete("ann", "f", 1.0)
    assert (rows.find("ann", "f", 1.0), ids(rows, "bob")) == (None, ["f"])


def test_all_facts_come_back(rows: FileRows) -> None:
    given = file("f", is_text=True, round=2, turn=3, code="not_produced", message="no")
    rows.add("", given)
    assert rows.find("", "f", 1.0) == given


def test_file_ends_at_its_time_unless_it_is_renewed(db: sqlite3.Connection, rows: FileRows) -> None:
    rows.add("", file("old"))
    rows.add("", file("used"))
    rows.renew("", ["used", "unknown"], 50.0)
    assert rows.find("", "old", 99.9) is not None
    assert (rows.find("", "old", 100.0), ids(rows, "", 149.0)) == (None, ["used"])
    rows.renew("", ["old"], 120.0)
    assert rows.find("", "old", 120.0) is None, "what has expired stays so"
    rows.drop_expired(120.0)
    assert dropped(db) == ["blob-old"]


def test_pages_follow_each_other_in_both_orders(rows: FileRows) -> None:
    for number in range(5):
        rows.add("", file(f"f{number}", purpose="a" if number % 2 else "b"))
    rows.add("bob", file("hidden"))
    assert ids(rows, "", limit=2) == ["f0", "f1"]
    assert ids(rows, "", after="f1", limit=9) == ["f2", "f3", "f4"]
    assert ids(rows, "", after="f2", descends=True) == ["f1", "f0"]
    assert ids(rows, "", purpose="a") == ["f1", "f3"]
    page = rows.page("", FileQuery(limit=5), 1.0)
    assert page is not None
    assert not page[1]
    assert rows.page("", FileQuery(after="hidden"), 1.0) is None, "another key's file is no place in this list"


def test_key_over_its_own_limits_loses_its_oldest(rows: FileRows, db: sqlite3.Connection) -> None:
    for number in range(6):
        rows.add("ann", file(f"f{number}"))
    assert ids(rows, "ann") == ["f2", "f3", "f4", "f5"]
    rows.add("ann", file("large", num_bytes=595))
    assert ids(rows, "ann") == ["large"]
    assert set(dropped(db)) == {f"blob-f{number}" for number in range(6)}


def test_server_without_keys_has_no_limits_of_a_key(rows: FileRows) -> None:
    for number in range(8):
        rows.add("", file(f"f{number}"))
    assert ids(rows, "") == [f"f{number}" for number in range(2, 8)]


def test_nobody_pushes_out_the_files_of_who_holds_less(rows: FileRows) -> None:
    rows.add("small", file("mine", num_bytes=300))
    for owner in ("ann", "bob"):
        for number in range(4):
            rows.add(owner, file(f"{owner}{number}"))
    assert ids(rows, "small") == ["mine"]
    assert len(ids(rows, "ann")) + len(ids(rows, "bob")) == 5
    rows.add("ann", file("a", num_bytes=550))
    rows.add("bob", file("b", num_bytes=550))
    assert ids(rows, "small") == ["mine"]


def test_size_of_a_file_without_bytes_counts_for_nothing(rows: FileRows) -> None:
    rows.add("ann", file("mine"))
    rows.add("ann", file("claimed", num_bytes=10**15, blob=""))
    assert ids(rows, "ann") == ["mine", "claimed"]


@pytest.mark.parametrize(
    ("owner", "num_bytes", "setting"), [("ann", 601, "max_key_files_bytes"), ("", 1001, "max_files_bytes")]
)
def test_file_that_is_larger_than_all_files_may_be_is_refused_and_pushes_out_none(
    rows: FileRows, owner: str, num_bytes: int, setting: str
) -> None:
    rows.add(owner, file("mine"))
    with pytest.raises(InputTooLong, match=f"{setting} .{num_bytes - 1}") as caught:
        rows.add(owner, file("large", num_bytes=num_bytes))
    assert caught.value.http_status == 413
    assert ids(rows, owner) == ["mine"]
    rows.add(owner, file("exact", num_bytes=num_bytes - 1))
    assert ids(rows, owner) == ["exact"]


@pytest.mark.parametrize(("num_bytes", "tool"), [(550, "user_upload"), (5000, "python")])
def test_file_without_room_beside_those_of_who_hold_less_is_refused(rows: FileRows, num_bytes: int, tool: str) -> None:
    rows.add("ann", file("a", num_bytes=400))
    rows.add("bob", file("b", num_bytes=300))
    with pytest.raises(Unavailable, match="max_files_bytes") as caught:
        rows.add("" if tool == "python" else "cat", file("c", num_bytes=num_bytes, tool=tool))
    assert (caught.value.code, caught.value.http_status) == ("STORE_UNAVAILABLE", 503)
    assert (ids(rows, "ann"), ids(rows, "bob")) == (["a"], ["b"])


@pytest.mark.parametrize(("first", "second"), [("ann", "zoe"), ("zoe", "ann")])
def test_of_owners_who_hold_as_much_the_one_with_the_oldest_file_loses_it(
    rows: FileRows, first: str, second: str
) -> None:
    rows.add(first, file("old", num_bytes=550))
    rows.add(second, file("new", num_bytes=550))
    assert (ids(rows, first), ids(rows, second)) == ([], ["new"])
