"""The stored events of streams: kept in order, read from any number on, limited, and deleted with their response."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie.frontend.responses import response_store
from sie.frontend.responses.response_store import Kept, ResponseFile, StoreLimits

LIMITS = StoreLimits(max_responses=100, max_bytes=1 << 30, max_age_s=1000.0)
EVENTS = [f'event: e{number}\ndata: {{"sequence_number":{number}}}\n\n'.encode() for number in range(7)]


def kept(name: str, status: str = "in_progress") -> Kept:
    body = json.dumps({"id": name, "status": status, "error": None}).encode()
    return Kept(id=name, status=status, body=body, stream="kept")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ResponseFile]:
    opened = ResponseFile(tmp_path, LIMITS, lambda: 1e9)
    yield opened
    opened.close()


def test_events_are_read_from_any_number_on(file: ResponseFile, tmp_path: Path) -> None:
    file.add("ann", kept("r"))
    file.events.add([("r", 0, EVENTS[:2])])
    file.events.add([("r", 2, EVENTS[2:6])])
    file.events.add([("r", 6, EVENTS[6:])])
    other = ResponseFile(tmp_path, LIMITS, lambda: 1e9)
    for after in range(-1, 9):
        found = other.follow("r", "ann", after)
        assert found is not None
        assert (found.status, found.stream, found.events) == ("in_progress", "kept", EVENTS[after + 1 :])
    assert other.follow("r", "bob", -1) is None
    assert other.follow("none", "ann", -1) is None
    other.close()


def test_object_comes_with_the_end(file: ResponseFile) -> None:
    file.add("", kept("r"))
    assert file.update("r", "completed", b'{"status":"completed"}')
    found = file.follow("r", "", -1)
    assert found is not None
    assert (found.status, found.body, found.events) == ("completed", b'{"status":"completed"}', [])


def test_events_go_with_their_response(file: ResponseFile, tmp_path: Path) -> None:
    for name in ("a", "b"):
        file.add("", kept(name))
        file.events.add([(name, 0, EVENTS)])
    file.events.add([("none", 0, EVENTS)])
    file.delete("a", "")
    db = sqlite3.connect(tmp_path / "responses.db")
    assert db.execute("SELECT count(*) FROM events").fetchone() == (1,)
    db.close()
    found = file.follow("b", "", 4)
    assert found is not None
    assert found.events == EVENTS[5:]


def test_stream_that_is_cut_has_no_events(file: ResponseFile) -> None:
    file.add("", kept("r"))
    file.events.add([("r", 0, EVENTS)])
    for _ in range(2):
        file.events.cut("r")
        found = file.follow("r", "", -1)
        assert found is not None
        assert (found.stream, found.events) == ("cut", [])


def test_many_responses_are_added_to_in_one_go(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path, StoreLimits(max_responses=1000, max_bytes=1 << 30, max_age_s=1e6), lambda: 1e9)
    for number in range(250):
        file.add("", kept(f"r{number}"))
    file.events.add([(f"r{number}", 0, EVENTS[:1]) for number in range(-5, 250)])
    file.events.add([])
    for number in (0, 99, 100, 249):
        found = file.follow(f"r{number}", "", -1)
        assert found is not None
        assert found.events == EVENTS[:1]
    file.close()


def test_bytes_of_events_count_against_the_limit(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path, StoreLimits(max_responses=1000, max_bytes=3 << 20, max_age_s=1e6), lambda: 1e9)
    event = b"data: " + bytes(1 << 20).replace(b"\0", b"x") + b"\n\n"
    for number in range(6):
        file.add("", kept(f"r{number}"))
        file.events.add([(f"r{number}", 0, [event])])
        for status in ("in_progress", "completed"):
            assert file.update(f"r{number}", status, b"{}")
    file.add("", kept("last"))
    there = [number for number in range(6) if file.follow(f"r{number}", "", -1) is not None]
    assert there == [4, 5]
    file.close()


def test_file_of_the_previous_version_is_still_used(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "responses.db")
    db.executescript(f"{response_store._SCHEMA} PRAGMA user_version = 1;")
    columns = "id, owner, created_s, status, maker, nbytes, body, input, history"
    db.execute(f"INSERT INTO responses ({columns}) VALUES ('old', '', 1e9, 'completed', '', 9, '{{}}', '[]', '[]')")
    db.commit()
    db.close()
    for _ in range(2):
        file = ResponseFile(tmp_path, LIMITS, lambda: 1e9)
        found = file.follow("old", "", -1)
        assert found is not None
        assert (found.status, found.stream, found.events) == ("completed", "", [])
        file.close()
    assert [path.name for path in tmp_path.glob("responses.db.*")] == []
