"""A skill as a model sees it: in its prompt, and as a folder."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from sie.agents.store.bundles import BundleLimits, Part, pack_folder
from sie.agents.store.skill_folders import ShownSkill, describe_skills, list_skill, measure_skill, unpack_skill

FRONT = b"---\nname: My skill\ndescription: does things\n---\n"


def archive(directory: Path, size: int = 1) -> Path:
    parts = [Part("s/SKILL.md", io.BytesIO(FRONT)), Part("s/scripts/deep/run.py", io.BytesIO(b"1" * size))]
    target = io.BytesIO()
    pack_folder(parts, target, BundleLimits(100_000, 10))
    path = directory / "blob"
    path.write_bytes(target.getvalue())
    return path


def test_a_kept_skill_is_unpacked_for_everyone_to_read(tmp_path: Path) -> None:
    path = archive(tmp_path)
    assert list_skill(path) == ["SKILL.md", "scripts/deep/run.py"]
    before = os.umask(0o077)
    try:
        unpack_skill(path, tmp_path / "skill")
    finally:
        os.umask(before)
    assert (tmp_path / "skill/SKILL.md").read_bytes() == FRONT
    assert (tmp_path / "skill/scripts/deep/run.py").read_bytes() == b"1"
    for folder in ("", "scripts", "scripts/deep"):
        assert (tmp_path / "skill" / folder).stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "skill/SKILL.md").stat().st_mode & 0o777 == 0o644


def test_a_damaged_archive_is_an_error_of_the_disk(tmp_path: Path) -> None:
    path = archive(tmp_path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(zipfile.BadZipFile):
        list_skill(path)
    with pytest.raises(OSError, match="damaged"):
        unpack_skill(path, tmp_path / "skill")


def test_every_damaged_byte_of_an_archive_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """A run ended with 500 for a block of zlib's that cannot be, or a file that seems to be encrypted."""
    path = archive(tmp_path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for flipped in (0x01, 0xFF):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flipped]) + whole[place + 1 :])
            with contextlib.suppress(OSError):
                unpack_skill(path, tmp_path / f"{place}-{flipped}")
            with contextlib.suppress(OSError):
                measure_skill(path)
            with contextlib.suppress(OSError, zipfile.BadZipFile):
                list_skill(path)


def test_a_model_reads_names_descriptions_and_some_of_the_files() -> None:
    many = ["SKILL.md", "a/b/c/d/e", *(f"f{number:03}" for number in range(100))]
    text = describe_skills(
        [ShownSkill("one", "One", "does one", many), ShownSkill("two", "Two", "does two", ["SKILL.md"])]
    )
    assert "read its SKILL.md" in text
    assert "[One] does one\nskills/one/SKILL.md\nskills/one/f000\n" in text
    assert "a/b/c/d/e" not in text
    assert "skills/one/f078\n[and 22 more files]" in text
    assert text.endswith("[Two] does two\nskills/two/SKILL.md")
