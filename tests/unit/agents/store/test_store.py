"""The database and the bytes beside it: whole or not there, deleted together, replaced when damaged."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sie.agents.store import has_store
from sie.agents.store.blobs import BlobFolder
from sie.agents.store.files import KeptFile
from sie.agents.store.keeping import content_id, keep_file, keep_upload
from sie.agents.store.sessions import Session
from sie.agents.store.skills import SkillVersion
from sie.agents.store.store import Store, StoreFile, file_limit
from sie.config.store_settings import Store as Settings
from sie.values.errors import BadRequest, InputTooLong, Unavailable

SETTINGS = Settings(max_files=3, max_key_skills=2, max_skill_versions=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path), SETTINGS)


def blobs(directory: Path) -> list[str]:
    folder = directory / "blobs"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def upload(store: Store, name: str, data: bytes, owner: str = "") -> KeptFile:
    writer = store.blobs.add(data)
    return asyncio.run(keep_upload(store, owner, writer, name, None, purpose="user_data"))


def find(store: Store, file_id: str, owner: str = "") -> KeptFile | None:
    return asyncio.run(store.read(lambda opened: opened.files.find(owner, file_id, opened.now_s())))


def version(number: int = 1, blob: str = "b", num_bytes: int = 1) -> SkillVersion:
    return SkillVersion(
        version=number, created_s=1.0, name="n", description="d", folder="n", num_bytes=num_bytes, blob=blob
    )


def test_upload_is_kept_with_its_facts_and_only_this_user_may_read_it(store: Store, tmp_path: Path) -> None:
    assert not has_store(str(tmp_path))
    file = upload(store, "../a/notes.MD", "héllo".encode())
    assert (file.name, file.format, file.mime_type, file.num_bytes, file.is_text) == (
        "notes.MD", "md", "text/markdown", 6, True,
    )  # fmt: skip
    assert find(store, file.id) == file
    path = store.blobs.find(file.blob, 6)
    assert path is not None
    assert path.read_bytes() == "héllo".encode()
    assert all(one.stat().st_mode & 0o077 == 0 for one in (path, path.parent, tmp_path / "agents.db"))
    assert has_store(str(tmp_path))


def test_text_is_told_by_its_bytes_even_where_a_character_is_cut_between_writes(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path)
    euro = "€".encode()
    for pieces, is_text in (((euro[:1], euro[1:]), True), ((euro, euro[:2]), False), ((b"\xff",), False), ((), True)):
        writer = folder.begin()
        for piece in pieces:
            writer.write(piece)
        writer.commit()
        assert writer.is_utf8 is is_text


def test_bytes_go_with_their_file(store: Store, tmp_path: Path) -> None:
    files = [upload(store, f"{number}", b"x") for number in range(5)]
    assert blobs(tmp_path) == sorted(file.blob for file in files[2:]), "the oldest went"
    asyncio.run(store.change(lambda opened: opened.files.delete("", files[4].id, opened.now_s())))
    assert blobs(tmp_path) == sorted(file.blob for file in files[2:4])


def test_replaced_file_leaves_no_bytes(store: Store, tmp_path: Path) -> None:
    first = upload(store, "a", b"1")
    asyncio.run(keep_file(store, "", first, b"22"))
    found = find(store, first.id)
    assert found is not None
    assert blobs(tmp_path) == [found.blob]
    assert found.blob != first.blob


def test_file_with_missing_or_cut_bytes_is_not_held(store: Store) -> None:
    file = upload(store, "a", b"1234")
    path = store.blobs.find(file.blob, 4)
    assert path is not None
    path.write_bytes(b"12")
    assert store.blobs.find(file.blob, 4) is None
    path.unlink()
    assert store.blobs.read(file.blob, 4, 4) is None


def test_failed_row_leaves_no_bytes(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr("sie.agents.store.files.FileRows.add", fail)
    with pytest.raises(Unavailable) as caught:
        upload(store, "a", b"1")
    assert (caught.value.code, blobs(tmp_path)) == ("STORE_UNAVAILABLE", [])


def test_change_is_whole_or_nothing(store: Store) -> None:
    def half(opened: StoreFile) -> None:
        opened.skills.add("", "skill_1", "", version())
        opened.skills.add("", "skill_1", "", version())

    with pytest.raises(Unavailable):
        asyncio.run(store.change(half))
    assert asyncio.run(store.read(lambda opened: opened.skills.of_owner(""))) == []


def test_versions_count_on_and_a_skill_goes_with_its_last(store: Store, tmp_path: Path) -> None:
    names = [store.blobs.add(b"z").commit() for _ in range(3)]

    def work(opened: StoreFile) -> list[int]:
        skills = opened.skills
        skills.add("ann", "skill_1", "T", version(blob=names[0]))
        skills.add_version("ann", "skill_1", version(blob=names[1]))
        with pytest.raises(BadRequest, match="max_skill_versions"):
            skills.add_version("ann", "skill_1", version())
        skills.choose("ann", "skill_1", 2)
        skills.delete_version("ann", "skill_1", 2)
        assert skills.add_version("bob", "skill_1", version()) is None
        third = skills.add_version("ann", "skill_1", version(blob=names[2]))
        assert third is not None
        return [third.default.version, *(one.version for one in third.versions)]

    assert asyncio.run(store.change(work)) == [3, 1, 3], "a number is never used again; a lost default is the latest"
    assert blobs(tmp_path) == sorted([names[0], names[2]])
    asyncio.run(store.change(lambda opened: opened.skills.delete_version("ann", "skill_1", 1)))
    asyncio.run(store.change(lambda opened: opened.skills.delete_version("ann", "skill_1", 3)))
    assert asyncio.run(store.read(lambda opened: opened.skills.find("ann", "skill_1"))) is None
    assert blobs(tmp_path) == []


def test_skills_of_a_key_are_bounded(store: Store) -> None:
    def add(number: int, owner: str) -> None:
        asyncio.run(store.change(lambda opened: opened.skills.add(owner, f"skill_{owner}{number}", "", version())))

    add(0, "ann")
    add(1, "ann")
    with pytest.raises(BadRequest, match="max_key_skills") as caught:
        add(2, "ann")
    assert caught.value.http_status == 422
    add(0, "bob")


def test_reaper_deletes_what_expired_and_what_nobody_names(tmp_path: Path) -> None:
    opened = StoreFile(tmp_path, SETTINGS, lambda: 1000.0)
    kept, old, new = (opened.blobs.add(b"x").commit() for _ in range(3))
    unfinished = opened.blobs.begin()
    unfinished.write(b"x")
    facts = {"name": "", "format": "", "mime_type": "", "purpose": "", "tool": "", "num_bytes": 1, "created_s": 0.0}
    opened.files.add("", KeptFile(id="f", blob=kept, expires_s=2000.0, **facts))
    opened.sessions.put("", "s", Session(messages=b"[]"), 0.0)
    long_ago = time.time() - 2 * 86_400
    for path in (tmp_path / "blobs" / old, tmp_path / "blobs" / kept, *(tmp_path / "blobs").glob("*.part")):
        os.utime(path, (long_ago, long_ago))
    opened.reap()
    unfinished.discard()
    assert blobs(tmp_path) == sorted([kept, new]), "a new one may be an upload under way"
    later = StoreFile(tmp_path, SETTINGS, lambda: 1e9)
    later.reap()
    assert blobs(tmp_path) == [new]
    assert later.sessions.use("", "s", 1.0) is None
    for one in (opened, later):
        one.file.close()


def damage(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def move_away(path: Path) -> None:
    for found in path.parent.glob("agents.db*"):
        found.rename(found.with_name(f"old-{found.name}"))


@pytest.mark.parametrize("harm", [damage, move_away])
def test_lost_database_is_replaced_for_all_processes(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    ones = [Store(str(tmp_path), SETTINGS) for _ in range(2)]
    file = upload(ones[0], "a", b"1")
    assert find(ones[1], file.id) == file
    with sqlite3.connect(tmp_path / "agents.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    if harm is damage:
        ones = [Store(str(tmp_path), SETTINGS) for _ in range(2)]  # found when a process opens it
    harm(tmp_path / "agents.db")
    assert find(ones[0], file.id) is None
    again = upload(ones[1], "b", b"2")
    assert find(ones[0], again.id) == again
    assert len(list(tmp_path.glob("agents.db.*[0-9]"))) == (1 if harm is damage else 0)
    assert file.blob in blobs(tmp_path), "its bytes stay for a day"


def test_folder_that_cannot_be_written_is_unavailable_and_names_no_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(str(tmp_path / "file" / "state"), SETTINGS)
    with pytest.raises(Unavailable) as caught:
        find(store, "f")
    assert str(tmp_path) not in caught.value.message
    with pytest.raises(Unavailable):
        asyncio.run(store.run(store.blobs.begin))


def test_files_leave_room_on_the_disk_in_which_others_can_be_deleted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_blocks=1 << 20, f_frsize=4096, f_bavail=2049)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: disk)
    file = upload(store, "a.txt", bytes(4096))
    disk.f_bavail = 2048
    with pytest.raises(OSError, match="No space left on device"):
        store.blobs.add(b"x")
    assert blobs(tmp_path) == [file.blob], "nothing is left of it"
    disk.f_blocks = disk.f_bavail = 0
    assert upload(store, "b.txt", b"x").num_bytes == 1, "a file system that does not count its blocks"


def test_id_of_a_files_content_is_its_own() -> None:
    assert content_id("a", b"b") == content_id("a", b"b")
    assert len({content_id("a", b"b"), content_id("ab", b""), content_id("", b"ab"), content_id("a", b"c")}) == 4


COLUMNS_OF_1 = {
    "dropped": "blob",
    "files": "number owner id name format mime_type num_bytes created_s expires_s purpose tool round turn is_text blob code message",
    "sessions": "owner id used_s messages files",
    "skill_versions": "skill version created_s name description folder num_bytes blob",
    "skills": "number owner id title created_s chosen last",
}
"""The columns of version 1, which release 0.1.0 reads and writes. Others need a new version, and an upgrade from this one."""


def test_the_tables_are_those_that_an_older_server_of_this_version_reads(tmp_path: Path) -> None:
    opened = StoreFile(tmp_path, SETTINGS)
    db = opened.file.db
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    names = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'").fetchall()
    found = {name: " ".join(row[1] for row in db.execute(f"PRAGMA table_info({name})")) for (name,) in names}
    opened.file.close()
    assert found == COLUMNS_OF_1


def test_smallest_setting_that_bounds_a_file_is_named() -> None:
    mib = 1 << 20
    limits = Settings(max_file_bytes=4 * mib, max_key_files_bytes=2 * mib, max_files_bytes=3 * mib)
    assert (file_limit(limits, "ann"), file_limit(limits, "")) == ("max_key_files_bytes", "max_files_bytes")
    assert file_limit(Settings(), "ann") == "max_file_bytes"


def test_file_that_is_refused_leaves_no_bytes_and_costs_no_other(tmp_path: Path) -> None:
    store = Store(str(tmp_path), Settings(max_key_files_bytes=1 << 20))
    old = upload(store, "old", b"small", "ann")
    with pytest.raises(InputTooLong, match="max_key_files_bytes"):
        upload(store, "large", bytes((1 << 20) + 1), "ann")
    assert find(store, old.id, "ann") == old
    assert blobs(tmp_path) == [old.blob]
