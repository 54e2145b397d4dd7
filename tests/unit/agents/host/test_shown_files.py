"""What a call's files cost the store is bounded by their length, whatever they take on the sandbox's disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sie.agents.host import sessions, workdir
from sie.agents.host.sessions import Session
from sie.agents.host.shown_files import FileReader, ShownFile
from sie.agents.store.blobs import BlobFolder

PLACE = ("run", 0, 0)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    (tmp_path / "home" / "work").mkdir(parents=True)
    return Session("me", "s", tmp_path / "home")


def reader(tmp_path: Path, max_call_bytes: int) -> FileReader:
    return FileReader(
        BlobFolder(tmp_path / "blobs"), 10, max_file_bytes=1 << 20, max_call_bytes=max_call_bytes, max_files=100
    )


def make(session: Session, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        with (session.work / f"f{number}").open("wb") as file:
            file.truncate(size)


def kept(shown: ShownFile) -> int | str:
    """Return the bytes of a file's blob, which is committed, or the code of its placeholder."""
    if shown.writer is None:
        return shown.file.code or ""
    shown.writer.commit()
    return shown.writer.num_bytes


def test_sparse_files_are_copied_up_to_the_bytes_of_one_call(tmp_path: Path, session: Session) -> None:
    make(session, 4000, 9000, 4000, 2000, 1)
    shown = reader(tmp_path, 10_000).show_news(session, PLACE, "python", [])
    assert [kept(one) for one in shown] == [4000, "too_large", 4000, 2000, "too_large"]


def test_a_file_is_kept_before_the_next_one_is_read(tmp_path: Path, session: Session) -> None:
    make(session, 100, 100)
    for one in reader(tmp_path, 1000).show_news(session, PLACE, "python", []):
        assert len(list((tmp_path / "blobs").glob("*.part"))) == 1
        kept(one)


def test_a_file_that_grows_while_it_is_copied_costs_no_more_than_it_may(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(session, 100)

    def as_it_was(fd: int) -> os.stat_result:
        about = os.stat(fd)
        with (session.work / "f0").open("r+b") as file:
            file.truncate(5000)
        return about

    monkeypatch.setattr(workdir.os, "fstat", as_it_was)
    (one,) = reader(tmp_path, 1000).show(session, PLACE, "python", ["f0"])
    assert kept(one) == 1000


def test_a_session_of_many_runs_remembers_the_latest_files_only(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_KNOWN", 20)
    monkeypatch.setattr(sessions, "_MAX_RUNS", 4)
    make(session, 1, 1)
    ids: list[str] = []
    for run in range(50):
        shown = reader(tmp_path, 1000).show(session, (f"run{run}", run % 3, 0), "python", ["f0", "gone", "f1"])
        for one in shown:
            ids.append(one.file.id)
            if one.writer is not None:
                one.writer.discard()
    assert ids[-3:] == ["file_run49_r1_0", "file_run49_r1_1", "file_run49_r1_2"]
    assert len(set(ids)) == 150
    found = [one for one in ids if not one.endswith("_1")]
    assert list(session.ids) == found[-20:], "the latest files are found by their ids"
    assert len(session._num_shown) == 4


def test_each_round_counts_its_files_from_0(tmp_path: Path, session: Session) -> None:
    make(session, 1)
    ids = [
        one.file.id
        for number in (0, 0, 1)
        for one in reader(tmp_path, 1000).show(session, ("run", number, 0), "python", ["gone"])
    ]
    assert ids == ["file_run_r0_0", "file_run_r0_1", "file_run_r1_0"]
