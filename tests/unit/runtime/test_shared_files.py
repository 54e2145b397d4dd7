"""A directory whose files belong to its group, for two users that keep the same files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sie.agents.store.store import StoreFile
from sie.config.store_settings import Store


@pytest.mark.parametrize(("mode", "wanted"), [(0o2770, 0o660), (0o700, 0o600)])
def test_what_is_kept_belongs_to_the_group_of_a_setgid_directory_only(tmp_path: Path, mode: int, wanted: int) -> None:
    directory = tmp_path / "store"
    for path in (directory, directory / "blobs"):
        path.mkdir()
        path.chmod(mode)
    store = StoreFile(directory, Store())
    store.change(lambda _: None)
    store.blobs.add(b"x").commit()
    modes = {path.name.partition(".")[2] or "blob": stat.S_IMODE(path.stat().st_mode)
             for path in directory.rglob("*") if path.is_file()}  # fmt: skip
    assert modes.pop("lock") in (wanted, 0o644), "a lock holds nothing"
    assert set(modes.values()) == {wanted}
    assert {"db", "db-wal", "db-shm", "blob"} == set(modes)
    store.file.close()
