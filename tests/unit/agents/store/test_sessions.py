"""The rows of sessions: owners, idle time, and which one goes first."""

from __future__ import annotations

import sqlite3

import pytest

from sie.agents.store.sessions import SESSIONS_SCHEMA, Session, SessionLimits, SessionRows


@pytest.fixture
def rows() -> SessionRows:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SESSIONS_SCHEMA)
    return SessionRows(db, SessionLimits(max_sessions=5, max_key_sessions=3, max_idle_s=100.0))


def put(rows: SessionRows, owner: str, name: str, now_s: float) -> None:
    rows.put(owner, name, Session(messages=name.encode(), files=("a", "b")), now_s)


def there(rows: SessionRows, owner: str, names: str, now_s: float) -> str:
    return "".join(name for name in names if rows.use(owner, name, now_s) is not None)


def test_session_belongs_to_its_owner(rows: SessionRows) -> None:
    put(rows, "ann", "s", 0)
    rows.put("bob", "s", Session(messages=b"bob"), 0)
    assert rows.use("ann", "s", 1) == Session(messages=b"s", files=("a", "b"))
    assert rows.use("eve", "s", 1) is None
    rows.delete("bob", "s")
    rows.delete("eve", "s")
    assert (there(rows, "ann", "s", 1), there(rows, "bob", "s", 1)) == ("s", "")


def test_use_renews_and_rest_ends(rows: SessionRows) -> None:
    put(rows, "", "a", 0)
    put(rows, "", "b", 0)
    assert there(rows, "", "a", 60) == "a"
    assert there(rows, "", "ab", 120) == "a"
    rows.drop_idle(300)
    assert there(rows, "", "ab", 120) == ""


def test_least_recently_used_goes_first(rows: SessionRows) -> None:
    for place, name in enumerate("abcde"):
        put(rows, "", name, place)
    assert there(rows, "", "a", 10) == "a"
    put(rows, "", "f", 11)
    assert there(rows, "", "abcdef", 12) == "acdef"


def test_key_is_bounded_and_a_flood_takes_nothing_from_others(rows: SessionRows) -> None:
    put(rows, "small", "s", 0)
    for place, name in enumerate("abcd"):
        put(rows, "ann", name, 1 + place)
        put(rows, "bob", name, 1 + place)
    assert there(rows, "small", "s", 9) == "s"
    assert len(there(rows, "ann", "abcd", 9) + there(rows, "bob", "abcd", 9)) == 4
    assert there(rows, "bob", "d", 9) == "d", "the newest stays"


@pytest.mark.parametrize("last", ["aaa", "zzz"])
def test_first_session_of_a_key_is_kept_where_every_other_key_has_one(rows: SessionRows, last: str) -> None:
    for number, owner in enumerate([*"bcdef", last]):
        put(rows, owner, "s", number)
    assert [there(rows, owner, "s", 9) for owner in (*"bcdef", last)] == ["", "s", "s", "s", "s", "s"]
