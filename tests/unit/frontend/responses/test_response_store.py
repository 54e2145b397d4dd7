"""The file of responses: owners, lifetimes, the process that makes one, and damaged files."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie.frontend.responses import response_store
from sie.frontend.responses.response_store import (
    Kept,
    ResponseFile,
    ResponseStore,
    StoreLimits,
    is_running,
    process_name,
)
from sie.values.errors import Unavailable

LIMITS = StoreLimits(max_responses=100, max_bytes=1 << 30, max_age_s=1000.0)


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def kept(name: str, status: str = "completed", **fields: bytes) -> Kept:
    body = json.dumps({"id": name, "status": status, "error": None}).encode()
    return Kept(id=name, status=status, **{"body": body, **fields})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> Iterator[ResponseFile]:
    opened = ResponseFile(tmp_path, LIMITS, clock)
    yield opened
    opened.close()


def test_response_belongs_to_its_owner(file: ResponseFile) -> None:
    file.add("ann", kept("r", input=b"[1]", history=b"[0]"))
    found = file.get("r", "ann")
    assert found is not None
    assert (found.status, found.input, found.history) == ("completed", b"[1]", b"[0]")
    for other in ("bob", ""):
        assert file.get("r", other) is None
        assert file.cancel("r", other) is None
        assert not file.delete("r", other)
    assert file.delete("r", "ann")
    assert file.get("r", "ann") is None


def test_another_process_s_handle_sees_it(file: ResponseFile, tmp_path: Path) -> None:
    other = ResponseFile(tmp_path, LIMITS, Clock())
    file.add("", kept("r", "in_progress"))
    cancelled = other.cancel("r", "")
    assert cancelled is not None
    assert json.loads(cancelled.body)["status"] == cancelled.status == "cancelled"
    assert file.stopped(["r"]) == ["r"]
    assert not file.update("r", "completed", b"{}"), "what was cancelled stays so"
    assert file.update("r", "cancelled", b'{"part":1}'), "but its maker may say how far it came"
    again = other.cancel("r", "")
    assert again is not None
    assert (again.status, again.body) == ("cancelled", b'{"part":1}')
    other.close()


def test_cancel_leaves_an_ended_response_unchanged(file: ResponseFile) -> None:
    file.add("", kept("r", "in_progress"))
    assert file.stopped(["r"]) == []
    assert file.update("r", "completed", b'{"x":1}')
    found = file.cancel("r", "")
    assert found is not None
    assert (found.status, found.body) == ("completed", b'{"x":1}')
    file.delete("r", "")
    assert file.stopped(["r"]) == ["r"]


def test_work_of_a_process_that_is_gone_has_failed(file: ResponseFile, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sie.frontend.responses.response_store import *;"
        f"ResponseFile(Path({str(tmp_path)!r}), StoreLimits(9, 1 << 30, 1e12), lambda: 1e9)"
        ".add('', Kept(id='r', status='in_progress', body=b'{\"status\":\"in_progress\"}'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    file.add("", kept("mine", "queued"))
    for _ in range(2):
        found = file.get("r", "")
        assert found is not None
        body = json.loads(found.body)
        assert (found.status, body["status"], body["error"]["code"]) == ("failed", "failed", "server_error")
    mine = file.get("mine", "")
    assert mine is not None
    assert mine.status == "queued"


def test_process_name_is_of_one_process() -> None:
    own = process_name(os.getpid())
    assert is_running(own)
    assert own != process_name(os.getppid())
    assert not is_running(own + "0")
    assert not is_running("")
    assert process_name(2**22 + 1) == ""


def test_process_that_only_waits_to_be_reaped_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    name = process_name(child.pid)
    assert is_running(name)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(name)
    child.wait(60)


@pytest.mark.parametrize("max_responses", [1, 3])
def test_oldest_go_first(tmp_path: Path, clock: Clock, max_responses: int) -> None:
    file = ResponseFile(tmp_path, StoreLimits(max_responses, 1 << 30, 1e6), clock)
    for number in range(6):
        file.add("", kept(f"r{number}"))
    there = [number for number in range(6) if file.get(f"r{number}", "") is not None]
    assert there == list(range(6))[-max_responses:]
    file.close()


def test_bytes_are_limited(tmp_path: Path, clock: Clock) -> None:
    file = ResponseFile(tmp_path, StoreLimits(10, 3000, 1e6), clock)
    for number in range(5):
        file.add("", kept(f"r{number}", input=b"x" * 1000))
    assert [file.get(f"r{number}", "") is not None for number in range(5)] == [False, False, False, True, True]
    file.close()


def test_age_is_limited(file: ResponseFile, clock: Clock) -> None:
    file.add("", kept("r"))
    clock.now_s += LIMITS.max_age_s - 1
    assert file.get("r", "") is not None
    clock.now_s += 2
    assert file.get("r", "") is None


def test_responses_outlive_the_process(tmp_path: Path, clock: Clock) -> None:
    first = ResponseFile(tmp_path, LIMITS, clock)
    first.add("", kept("r"))
    first.close()
    second = ResponseFile(tmp_path, LIMITS, clock)
    assert second.get("r", "") is not None
    assert (tmp_path / "responses.db").stat().st_mode & 0o077 == 0
    second.close()


def break_bytes(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def break_version(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


def break_schema(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {response_store._SCHEMA_VERSION}")
    db.close()


@pytest.mark.parametrize("damage", [break_bytes, break_version, break_schema])
def test_file_that_cannot_be_used_is_set_aside(tmp_path: Path, clock: Clock, damage) -> None:
    path = tmp_path / "responses.db"
    damage(path)
    before = path.read_bytes()
    file = ResponseFile(tmp_path, LIMITS, clock)
    file.add("", kept("r"))
    assert file.get("r", "") is not None
    (aside,) = tmp_path.glob("responses.db.*")
    assert len(aside.read_bytes()) == len(before)
    file.close()


def break_pages(path: Path) -> None:
    """Overwrite all pages but the first; a real disk loses some."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(4096)
        file.write(b"\x5a" * (size - 4096))


def move_away(path: Path) -> None:
    for found in path.parent.glob("responses.db*"):
        found.rename(found.with_name(f"old-{found.name}"))


@pytest.mark.parametrize("harm", [break_pages, move_away])
def test_file_that_is_damaged_or_moved_in_use_is_replaced_for_all_processes(tmp_path: Path, harm) -> None:
    ones = [ResponseStore(str(tmp_path), LIMITS) for _ in range(2)]

    def ask(one: ResponseStore, work):
        return asyncio.run(one.do(work))

    body = b'"%s"' % (b"x" * 20_000)
    for number in range(20):
        ask(ones[number % 2], lambda file, number=number: file.add("", kept(f"r{number}", body=body)))
    with sqlite3.connect(tmp_path / "responses.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    harm(tmp_path / "responses.db")
    assert ask(ones[0], lambda file: file.get("r3", "")) is None
    for number, one in enumerate(ones):
        ask(one, lambda file, number=number: file.add("", kept(f"new{number}")))
    for one in (*ones, ResponseStore(str(tmp_path), LIMITS)):
        assert ask(one, lambda file: [file.get(name, "") is not None for name in ("r3", "new0", "new1")]) == [
            False, True, True,
        ]  # fmt: skip
    assert len(list(tmp_path.glob("responses.db.*[0-9]"))) == (1 if harm is break_pages else 0)


def test_few_of_the_files_set_aside_are_kept(tmp_path: Path) -> None:
    for _ in range(6):
        break_bytes(tmp_path / "responses.db")
        ResponseFile(tmp_path, LIMITS).close()
    assert len(list(tmp_path.glob("responses.db.*"))) == 3


def test_file_of_the_version_before_is_upgraded_and_one_of_a_later_version_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    first = sqlite3.connect(path)
    first.executescript(f"BEGIN; {response_store._SCHEMA} PRAGMA user_version = 1; COMMIT;")
    first.execute("INSERT INTO responses VALUES (1, 'r', '', 1e12, 'completed', '', 2, '{}', '[]', '[]')")
    first.commit()
    first.close()
    file = ResponseFile(tmp_path, LIMITS)
    assert file.get("r", "") is not None
    file.close()
    break_version(path)
    file = ResponseFile(tmp_path, LIMITS)
    assert file.get("r", "") is None
    file.close()
    [aside] = tmp_path.glob("responses.db.*")
    with sqlite3.connect(aside) as db:
        assert db.execute("SELECT id FROM responses").fetchall() == [("r",)]
    db.close()


FILE_OF_0_1_0 = """
BEGIN;
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created_s REAL NOT NULL,
    status TEXT NOT NULL, maker TEXT NOT NULL, nbytes INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL,
    history BLOB NOT NULL
);
CREATE INDEX ages ON responses (created_s);
CREATE INDEX sizes ON responses (number, nbytes);
ALTER TABLE responses ADD COLUMN stream TEXT NOT NULL DEFAULT '';
CREATE TABLE events (
    response INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (response, first)
);
CREATE TRIGGER forgotten AFTER DELETE ON responses BEGIN DELETE FROM events WHERE response = OLD.number; END;
PRAGMA user_version = 2;
COMMIT;
"""
"""What release 0.1.0 makes. A release that changes the tables needs a new version, and this text stays as it is."""
INSERT_OF_0_1_0 = (
    "INSERT INTO responses (id, owner, created_s, status, maker, nbytes, body, input, history, stream) "
    "VALUES (?, 'ann', 1e9, 'completed', '', 2, '{}', '[]', '[]', 'typed')"
)
EVENT_OF_0_1_0 = "INSERT INTO events SELECT number, 0, 1, ? FROM responses WHERE id = ?"


def write_as_0_1_0(path: Path, name: str) -> list[str]:
    """Keep a response as release 0.1.0 does, and return the ids of all."""
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (2,), "an older server would set the file aside"
    db.execute(INSERT_OF_0_1_0, (name,))
    db.execute(EVENT_OF_0_1_0, (b"one\n\ntwo\n\n", name))
    db.commit()
    ids = [row[0] for row in db.execute("SELECT id FROM responses ORDER BY number")]
    db.close()
    return ids


def test_an_older_server_s_file_is_used_and_may_go_back_to_it(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "responses.db"
    db = sqlite3.connect(path)
    db.executescript(FILE_OF_0_1_0)
    db.close()
    write_as_0_1_0(path, "old")
    new = ResponseFile(tmp_path, LIMITS, clock)
    found = new.follow("old", "ann", -1)
    assert found is not None
    assert (found.status, found.events) == ("completed", [b"one\n\n", b"two\n\n"])
    new.add("ann", kept("new"))
    new.close()
    assert write_as_0_1_0(path, "back") == ["old", "new", "back"]
    again = ResponseFile(tmp_path, LIMITS, clock)
    assert all(again.get(name, "ann") is not None for name in ("old", "new", "back"))
    assert again.delete("old", "ann")
    again.close()
    db = sqlite3.connect(path)
    assert db.execute("SELECT count(*) FROM events").fetchone() == (1,), "events go with their response"
    db.close()
    assert not list(tmp_path.glob("responses.db.*"))


def test_directory_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    kept = ResponseStore(str(blocked / "state"), LIMITS)
    with pytest.raises(Unavailable) as caught:
        asyncio.run(kept.do(lambda file: file.get("r", "")))
    assert str(tmp_path) not in caught.value.message
