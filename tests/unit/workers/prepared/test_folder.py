"""The folder of prepared weights: one writer at a time, and no more than the limit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sie.workers.prepared.folder import Folder, LockTimeoutError, Name, measure_folder
from sie.workers.prepared.weights_file import WeightsFile, Writer


def _name(model: str, version: str) -> Name:
    return Name(model.encode().hex().ljust(24, "0"), version.encode().hex().ljust(24, "0"))


NEW = _name("m2", "v2")


def _file(folder: Folder, name: Name, num_bytes: int, age_s: int) -> Path:
    path = folder.file_of(name)
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    old, used, new = (_file(folder, _name(f"m{i}", "v"), 100, 1000 - i) for i in range(3))
    folder.mark_used(old)
    folder.remove_surplus(_name("m2", "v"), 250)
    assert (old.exists(), used.exists(), new.exists()) == (True, False, True)


def test_the_newest_file_stays_whatever_its_size(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    new = _file(folder, NEW, 100, 0)
    folder.remove_surplus(NEW, 10)
    assert new.exists()


def test_other_versions_of_the_model_go(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    other, old, new = (
        _file(folder, _name("m1", "v1"), 1, 9),
        _file(folder, _name("m2", "v1"), 1, 0),
        _file(folder, NEW, 1, 5),
    )
    folder.remove_surplus(NEW, 1 << 20)
    assert (other.exists(), old.exists(), new.exists()) == (True, False, True)


def test_a_file_that_a_worker_maps_stays_until_it_lets_go(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    old, other = _name("m2", "v1"), _name("m1", "v1")
    for name in (old, other):
        with closing(Writer(folder.file_of(name), 1 << 20)) as writer:
            writer.add("a", np.ones(9, np.uint8), "ones", (9,))
            writer.publish()
    views = [WeightsFile(folder.file_of(name)).view("a") for name in (old, other)]
    folder.remove_surplus(NEW, 1)
    assert measure_folder(tmp_path)[0] == 2
    assert WeightsFile(folder.file_of(old)).view("a").sum() == 9, "a further worker may open it"
    del views
    gc.collect()
    folder.remove_surplus(NEW, 1)
    assert measure_folder(tmp_path)[0] == 0


def test_what_a_dead_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    left, fresh = (folder.file_of(NEW).with_name(f".{folder.file_of(NEW).name}.{end}") for end in ("abc", "def"))
    left.touch()
    fresh.touch()
    os.utime(left, (time.time() - 4000,) * 2)
    folder.remove_surplus(NEW, 1)
    assert (left.exists(), fresh.exists()) == (False, True)


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    Folder(tmp_path / "a" / "weights").make()
    assert (tmp_path / "a" / "weights").stat().st_mode & 0o777 == 0o700


def test_files_with_other_names_stay_and_do_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    kept = [tmp_path / name for name in ("mine.weights", f"{NEW.model}-old.weights", ".mine.weights.swp")]
    for path in kept:
        path.write_bytes(bytes(100))
        os.utime(path, (time.time() - 4000,) * 2)
    assert measure_folder(tmp_path) == (0, 0)
    folder.remove_surplus(NEW, 10)
    assert all(path.exists() for path in kept)


def test_a_folder_that_is_there_keeps_its_rights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o775)
    Folder(tmp_path).make()
    assert tmp_path.stat().st_mode & 0o777 == 0o775
    assert str(tmp_path) in caplog.text
    caplog.clear()
    tmp_path.chmod(0o755)
    Folder(tmp_path).make()
    assert not caplog.text


def test_a_second_writer_waits_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / f"{NEW.model}.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        with pytest.raises(LockTimeoutError), folder.lock(NEW, 0.1):
            pass
        holder.kill()
    with folder.lock(NEW, 10):
        pass


def test_the_size_of_a_folder_counts_weights_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert measure_folder(tmp_path / "none") == (0, 0)
    _file(folder, NEW, 100, 0)
    (tmp_path / "m.lock").touch()
    assert measure_folder(tmp_path) == (1, 100)
