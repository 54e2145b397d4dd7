"""Shows a kept skill to a model: its text in the prompt, and its files in a folder. Reads archives that `bundles` wrote."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = "skills"
"""The folder of the working directory that has a folder for each skill."""
_MAX_ENTRIES: Final = 80
_MAX_DEPTH: Final = 4
_HEAD: Final = (
    "These skills are in the working directory. A skill is a folder with instructions and files for one kind of task. "
    "Before you begin a task that a skill describes, read its SKILL.md, and follow it."
)


class ShownSkill(NamedTuple):
    """A skill as a model reads about it. paths are those of its files, below its folder."""

    folder: str
    name: str
    description: str
    paths: Sequence[str]


def describe_skills(skills: Sequence[ShownSkill]) -> str:
    """Return the text that tells a model about its skills, with at most 80 files of each, four folders deep."""
    return "\n\n".join([_HEAD, *map(_entry, skills)])


def _entry(skill: ShownSkill) -> str:
    near = [path for path in sorted(skill.paths) if path.count("/") < _MAX_DEPTH]
    lines = [
        f"[{skill.name}] {skill.description}",
        *(f"{FOLDER}/{skill.folder}/{path}" for path in near[:_MAX_ENTRIES]),
    ]
    hidden = len(skill.paths) - len(near[:_MAX_ENTRIES])
    return "\n".join([*lines, *([f"[and {hidden} more files]"] if hidden else [])])


def list_skill(archive: Path) -> list[str]:
    """Return the paths of the files of a skill, below its folder. Raises OSError and zipfile.BadZipFile."""
    with _opened(archive) as opened:
        return [name.partition("/")[2] for name in opened.namelist()]


def measure_skill(archive: Path) -> tuple[int, int]:
    """Return the bytes of a skill's files, and the number of its files and folders. Raises OSError."""
    try:
        with _opened(archive) as opened:
            infos = opened.infolist()
    except zipfile.BadZipFile as error:
        raise OSError(0, str(error)) from None
    folders = {parent for info in infos for parent in Path(info.filename).parents}
    return sum(info.file_size for info in infos), len(infos) + len(folders)


def unpack_skill(archive: Path, target: Path) -> None:
    """Write the files of a skill below target, which is made, for everyone to read. Raises OSError."""
    target.mkdir(mode=0o755)
    try:
        with _opened(archive) as opened:
            for info in opened.infolist():
                path = target / info.filename.partition("/")[2]
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                path.write_bytes(opened.read(info))
                path.chmod(0o644)
        for folder, _folders, _files in os.walk(target):
            Path(folder).chmod(0o755)
    except zipfile.BadZipFile as error:
        raise OSError(0, str(error)) from None


@contextmanager
def _opened(archive: Path) -> Generator[zipfile.ZipFile]:
    """Open an archive. Raises BadZipFile for whatever else `zipfile` and zlib raise about a damaged one, and OSError."""
    try:
        with zipfile.ZipFile(archive) as opened:
            yield opened
    except OSError:
        raise
    except Exception as error:  # zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, ...
        raise zipfile.BadZipFile(f"its archive is damaged: {error}") from None
