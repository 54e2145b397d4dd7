"""Reading a directory in which a stranger makes names, while they change."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from sie.agents.host.workdir import look, measure, read_text
from tests.process.harness import WAIT_S

SECRET = b"secret"


def test_what_is_shown_and_what_is_counted(tmp_path: Path) -> None:
    for name in ("a", "dir/b", ".hidden", "node_modules/c", "dir/__pycache__/d", "bad\nname"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 5000)
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    assert set(look(tmp_path, 100)) == {"a", "dir/b"}
    usage = measure(tmp_path, 100)
    assert (usage.num_files, usage.num_bytes) == (11, 6 * 8192 + 3 * 4096), usage
    assert measure(tmp_path, 3).num_files == 4


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "up/secret", "absolute", "dir/../../secret", "pipe", "dir",
                                  "a\0b", "", "missing"])  # fmt: skip
def test_only_ordinary_files_within_are_read(tmp_path: Path, name: str) -> None:
    work = tmp_path / "work"
    (work / "dir").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(SECRET)
    (work / "up").symlink_to("..")
    (work / "absolute").symlink_to(tmp_path / "secret")
    (work / "a").write_bytes(b"a")
    os.mkfifo(work / "pipe")
    with pytest.raises(OSError):
        read_text(work, name, 0, 100)


def test_a_file_that_is_swapped_for_a_link_never_gives_what_the_link_names(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "dir").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(SECRET)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for name, target in (("file", tmp_path / "secret"), ("dir", tmp_path / "other")):
                (work / "next").symlink_to(target)
                (work / "next").rename(work / name) if name == "file" else (work / "next").unlink()
            (work / "plain").write_bytes(b"plain")
            (work / "plain").rename(work / "file")

    thread = threading.Thread(target=swap)
    thread.start()
    seen: set[bytes] = set()
    num_reads, ends_s = 0, time.monotonic() + WAIT_S
    try:
        # Until both were seen: a busy machine may leave the other thread without a core for a while.
        while num_reads < 3000 or (len(seen) < 2 and time.monotonic() < ends_s):
            num_reads += 1
            try:
                seen.add(read_text(work, "file", 0, 100)[0].encode())
            except OSError:
                seen.add(b"refused")
            look(work, 100)
    finally:
        is_over.set()
        thread.join()
    assert SECRET not in seen
    assert seen == {b"plain", b"refused"}, "the race was not run"


def test_a_part_of_a_long_file_is_read_without_keeping_what_is_before_it(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(64 << 20)  # a hole, not bytes on the disk
        file.seek(0, os.SEEK_END)
        file.write("äöü€".encode() + b"\xff")
    start = (64 << 20) + 1
    tracemalloc.start()
    try:
        text, passed, about = read_text(tmp_path, "long", start, start + 100)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (text, passed, about.st_size) == ("öü€\ufffd", start + 4, (64 << 20) + 10)


def test_a_directory_too_deep_to_open_is_a_problem(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        there = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = there
    os.close(here)
    assert "cannot be read" in measure(tmp_path, 1000).problem
    assert look(tmp_path, 1000) == {}
