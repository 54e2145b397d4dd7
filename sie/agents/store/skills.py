"""Keeps the rows of skills and of their versions, which count from 1. Skills stay until they are deleted.

Every call blocks, and raises sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from sie.values.errors import BadRequest

SKILLS_SCHEMA: Final = """
CREATE TABLE skills (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    created_s REAL NOT NULL,
    chosen INTEGER NOT NULL,
    last INTEGER NOT NULL
);
CREATE TABLE skill_versions (
    skill TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_s REAL NOT NULL,
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    folder TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    blob TEXT NOT NULL,
    PRIMARY KEY (skill, version)
);
CREATE TRIGGER skill_dropped AFTER DELETE ON skills BEGIN
    DELETE FROM skill_versions WHERE skill = OLD.id;
END;
CREATE TRIGGER version_dropped AFTER DELETE ON skill_versions BEGIN
    INSERT INTO dropped VALUES (OLD.blob);
END;
"""


class SkillVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a skill. Its blob is a zip archive with one folder."""

    version: int
    created_s: float
    name: str
    description: str
    folder: str
    """The folder of the archive that holds its files."""
    num_bytes: int
    """The size of the archive."""
    blob: str


class Skill(msgspec.Struct, frozen=True, kw_only=True):
    """A skill with its versions, oldest first. There is always at least one."""

    id: str
    title: str
    created_s: float
    chosen: int
    """The number of the version that counts where a request names none; 0 for the latest."""
    versions: tuple[SkillVersion, ...]

    @property
    def latest(self) -> SkillVersion:
        """The newest version."""
        return self.versions[-1]

    @property
    def default(self) -> SkillVersion:
        """The version that counts where a request names none."""
        return self.version(self.chosen) or self.latest

    def version(self, number: int) -> SkillVersion | None:
        """Return the version with this number, or None."""
        return next((one for one in self.versions if one.version == number), None)


class SkillLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the number of skills, of all and of one API key, on versions, and on the bytes of all archives."""

    max_skills: int
    max_key_skills: int
    max_versions: int
    max_bytes: int


_FIELDS: Final = SkillVersion.__struct_fields__
_COLUMNS: Final = ", ".join(_FIELDS)


class SkillRows:
    """The rows of one open database."""

    def __init__(self, db: sqlite3.Connection, limits: SkillLimits) -> None:
        self._db = db
        self._limits = limits

    def add(self, owner: str, skill_id: str, title: str, version: SkillVersion) -> None:
        """Store a new skill with its first version. Raises BadRequest if there are too many skills."""
        own = self._count("skills WHERE owner = ?", owner)
        if owner and own >= self._limits.max_key_skills:
            raise _too_many(f"API key '{owner}' has as many skills as max_key_skills ({self._limits.max_key_skills})")
        if self._count("skills") >= self._limits.max_skills:
            raise _too_many(f"The server keeps as many skills as max_skills ({self._limits.max_skills})")
        self._check_bytes(version)
        self._db.execute(
            "INSERT INTO skills (owner, id, title, created_s, chosen, last) VALUES (?, ?, ?, ?, 0, ?)",
            (owner, skill_id, title, version.created_s, version.version),
        )
        self._insert(skill_id, version)

    def add_version(self, owner: str, skill_id: str, version: SkillVersion) -> Skill | None:
        """Store the next version of a skill and return the skill; its number is chosen here. None if it is unknown."""
        skill = self.find(owner, skill_id)
        if skill is None:
            return None
        if len(skill.versions) >= self._limits.max_versions:
            raise _too_many(f"The skill has as many versions as max_skill_versions ({self._limits.max_versions})")
        self._check_bytes(version)
        row: Any = self._db.execute(
            "UPDATE skills SET last = last + 1 WHERE id = ? RETURNING last", (skill_id,)
        ).fetchone()
        self._insert(skill_id, msgspec.structs.replace(version, version=row[0]))
        return self.find(owner, skill_id)

    def find(self, owner: str, skill_id: str) -> Skill | None:
        """Return a skill of this owner, or None."""
        sql = "SELECT id, title, created_s, chosen FROM skills WHERE owner = ? AND id = ?"
        row: Any = self._db.execute(sql, (owner, skill_id)).fetchone()
        return self._read(row) if row is not None else None

    def of_owner(self, owner: str) -> list[Skill]:
        """Return the skills of this owner, oldest first."""
        sql = "SELECT id, title, created_s, chosen FROM skills WHERE owner = ? ORDER BY number"
        return [self._read(row) for row in self._db.execute(sql, (owner,)).fetchall()]

    def choose(self, owner: str, skill_id: str, version: int) -> None:
        """Make a version the one that counts where a request names none."""
        self._db.execute("UPDATE skills SET chosen = ? WHERE owner = ? AND id = ?", (version, owner, skill_id))

    def delete(self, owner: str, skill_id: str) -> bool:
        """Delete a skill of this owner with all its versions; return False if unknown."""
        return self._db.execute("DELETE FROM skills WHERE owner = ? AND id = ?", (owner, skill_id)).rowcount > 0

    def delete_version(self, owner: str, skill_id: str, version: int) -> None:
        """Delete one version of a skill of this owner. The skill goes with its last version."""
        skill = self.find(owner, skill_id)
        if skill is None or skill.version(version) is None:
            return
        if len(skill.versions) == 1:
            self.delete(owner, skill_id)
            return
        self._db.execute("DELETE FROM skill_versions WHERE skill = ? AND version = ?", (skill_id, version))

    def _insert(self, skill_id: str, version: SkillVersion) -> None:
        places = ", ".join("?" * (1 + len(_FIELDS)))
        row = (skill_id, *(getattr(version, field) for field in _FIELDS))
        self._db.execute(f"INSERT INTO skill_versions (skill, {_COLUMNS}) VALUES ({places})", row)  # noqa: S608

    def _read(self, row: Sequence[Any]) -> Skill:
        skill_id, title, created_s, chosen = row
        sql = f"SELECT {_COLUMNS} FROM skill_versions WHERE skill = ? ORDER BY version"  # noqa: S608
        found = self._db.execute(sql, (skill_id,)).fetchall()
        versions = tuple(SkillVersion(**dict(zip(_FIELDS, one, strict=True))) for one in found)
        return Skill(id=skill_id, title=title, created_s=created_s, chosen=chosen, versions=versions)

    def _count(self, what: str, *args: str) -> int:
        (count,) = self._db.execute(f"SELECT count(*) FROM {what}", args).fetchone()  # noqa: S608
        return count

    def _check_bytes(self, version: SkillVersion) -> None:
        (held,) = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM skill_versions").fetchone()
        if held + version.num_bytes > self._limits.max_bytes:
            raise _too_many(
                f"The skills of the server would take more than max_skills_bytes ({self._limits.max_bytes})"
            )


def _too_many(text: str) -> BadRequest:
    return BadRequest(f"{text}; delete one first", http_status=422)
