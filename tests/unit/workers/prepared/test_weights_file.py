"""A file of prepared weights: what was written is there, and nothing else is taken for one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from sie.workers.prepared import weights_file
from sie.workers.prepared.weights_file import DamagedFileError, WeightsFile, Writer

NO_LIMIT = 1 << 40


def _write(path: Path, max_bytes: int = NO_LIMIT) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    arrays = {name: random.integers(0, 256, size, np.uint8) for name, size in (("a", 1), ("b", 70_001), ("none", 0))}
    writer = Writer(path, max_bytes)
    try:
        for name, data in arrays.items():
            writer.add(name, data, "bytes", data.shape)
        writer.facts["answer"] = {"is_packed": True}
        writer.publish()
    finally:
        writer.close()
    return arrays


def test_arrays_and_facts_come_back_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "_WRITE_BYTES", 4096)  # several writes
    arrays = _write(tmp_path / "m.weights")
    file = WeightsFile(tmp_path / "m.weights")
    for name, data in arrays.items():
        np.testing.assert_array_equal(file.view(name), data)
        assert not data.size or file.view(name).ctypes.data % 64 == 0
        assert (file.place(name).format, file.place(name).shape) == ("bytes", data.shape)
    assert "c" not in file
    assert file.facts == {"answer": {"is_packed": True}}


def test_only_this_user_may_read_the_file_and_nobody_writes_it(tmp_path: Path) -> None:
    _write(tmp_path / "m.weights")
    assert (tmp_path / "m.weights").stat().st_mode & 0o777 == 0o400
    assert [path.name for path in tmp_path.iterdir()] == ["m.weights"]


def test_arrays_live_longer_than_the_name_and_the_object(tmp_path: Path) -> None:
    arrays = _write(tmp_path / "m.weights")
    view = WeightsFile(tmp_path / "m.weights").view("b")
    (tmp_path / "m.weights").unlink()
    np.testing.assert_array_equal(view, arrays["b"])


def test_pages_that_are_forgotten_are_read_again(tmp_path: Path) -> None:
    arrays = _write(tmp_path / "m.weights")
    file = WeightsFile(tmp_path / "m.weights")
    view = file.view("b")
    file.keep_small("b")
    assert view.sum() == arrays["b"].sum()
    file.forget_pages()
    np.testing.assert_array_equal(view, arrays["b"])


@pytest.mark.parametrize("where", ["magic", "size", "index", "last byte"])
def test_a_changed_file_is_refused(tmp_path: Path, where: str) -> None:
    path = tmp_path / "m.weights"
    _write(path)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    place = {"magic": 0, "size": 9, "index": len(data) - 20, "last byte": len(data) - 1}[where]
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError):
        WeightsFile(path)


@pytest.mark.parametrize("length", [0, 10, 200, 4096, 60_000])
def test_a_shortened_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.weights"
    _write(path)
    os.truncate(path, length)
    with pytest.raises(DamagedFileError):
        WeightsFile(path)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.weights"
    _write(path)
    path.chmod(0o666)
    with pytest.raises(DamagedFileError, match="only this user"):
        WeightsFile(path)


def test_a_pipe_is_refused_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.weights")
    with pytest.raises(DamagedFileError):
        WeightsFile(tmp_path / "m.weights")


def test_a_link_and_a_folder_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "m.weights")
    (tmp_path / "link").symlink_to("m.weights")
    with pytest.raises(OSError, match="link"):
        WeightsFile(tmp_path / "link")
    with pytest.raises(DamagedFileError):
        WeightsFile(tmp_path)


def test_more_than_the_limit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="space") as error:
        _write(tmp_path / "m.weights", max_bytes=50_000)
    assert error.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


def test_a_short_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "SPARE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="space"):
        _write(tmp_path / "m.weights")
    assert not [*tmp_path.iterdir()]


def test_the_mapping_is_shared_and_read_only(tmp_path: Path) -> None:
    _write(tmp_path / "m.weights")
    file = WeightsFile(tmp_path / "m.weights")
    file.view("b").sum()
    own = next(
        part for part in Path("/proc/self/maps").read_text().splitlines() if part.endswith(str(tmp_path / "m.weights"))
    )
    assert own.split()[1] == "r--s"
