"""Opens the database of files, skills and sessions, and deletes the bytes of what it no longer names.

The database names the owner of everything: the name of an API key. For other keys a thing does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from sie.agents.store import DATABASE
from sie.agents.store.blobs import BlobFolder
from sie.agents.store.files import FILES_SCHEMA, FileLimits, FileRows, KeptFile
from sie.agents.store.sessions import SESSIONS_SCHEMA, SessionLimits, SessionRows
from sie.agents.store.skills import SKILLS_SCHEMA, SkillLimits, SkillRows
from sie.config.store_settings import Store as StoreSettings
from sie.runtime.database import DatabaseFile, DatabaseThread, Schema
from sie.values.errors import Unavailable

_DROPPED: Final = "CREATE TABLE dropped (blob TEXT NOT NULL);\n"
_SCHEMA: Final = Schema("files, skills and sessions", "files", 1, {
    0: _DROPPED + FILES_SCHEMA + SKILLS_SCHEMA + SESSIONS_SCHEMA,
})  # fmt: skip
_RETRY_AFTER_S: Final = 5
_REAP_S: Final = 120.0
"""The longest time that something expired stays on the disk."""
_T = TypeVar("_T")


class StoreFile:
    """The open database of one process, and the folder of blobs. Every method blocks, and raises sqlite3.Error."""

    def __init__(self, directory: Path, settings: StoreSettings, now_s: Callable[[], float] = time.time) -> None:
        """Open or create both below directory. Raises OSError and sqlite3.Error."""
        self.file = DatabaseFile(directory / DATABASE, _SCHEMA)
        self.blobs = BlobFolder(directory / "blobs")
        self.now_s = now_s
        self._db = self.file.db
        self.files = FileRows(self._db, file_limits(settings))
        self.skills = SkillRows(self._db, SkillLimits(
            max_skills=settings.max_skills, max_key_skills=settings.max_key_skills,
            max_versions=settings.max_skill_versions, max_bytes=settings.max_skills_bytes,
        ))  # fmt: skip
        self.sessions = SessionRows(self._db, SessionLimits(
            max_sessions=settings.max_sessions, max_key_sessions=settings.max_key_sessions,
            max_idle_s=settings.session_idle_s,
        ))  # fmt: skip

    def find_held(self, owner: str, file_id: str) -> KeptFile | None:
        """Return a file of this owner if the store holds its bytes, or None."""
        file = self.files.find(owner, file_id, self.now_s())
        return file if file is not None and self.blobs.find(file.blob, file.num_bytes) is not None else None

    def change(self, work: Callable[[StoreFile], _T]) -> _T:
        """Run work in a transaction, then delete the blobs that no row names any more.

        If work raises an error, nothing is changed.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            found = work(self)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._delete_dropped()
        return found

    def _delete_dropped(self) -> None:
        """Delete the blobs whose rows are gone."""
        names = [name for (name,) in self._db.execute("SELECT blob FROM dropped").fetchall()]
        self.blobs.remove(names)
        # ORDER: after the blobs. If this process ends between the two, a later one deletes the blobs again.
        self._db.executemany("DELETE FROM dropped WHERE blob = ?", [(name,) for name in names])

    def reap(self) -> None:
        """Delete what has expired, and what processes that ended left unfinished."""
        now_s = self.now_s()
        self.change(lambda one: (one.files.drop_expired(now_s), one.sessions.drop_idle(now_s)))
        rows = self._db.execute("SELECT blob FROM files UNION SELECT blob FROM skill_versions").fetchall()
        self.blobs.sweep(frozenset(name for (name,) in rows))


class Store:
    """Access to the database and the blobs from the event loop. The first use opens the database."""

    def __init__(self, directory: str, settings: StoreSettings) -> None:
        self.settings = settings
        self.now_s = time.time
        self.blobs = BlobFolder(Path(directory) / "blobs")
        self._rows = DatabaseThread(
            directory, _SCHEMA.kept, lambda: StoreFile(Path(directory), settings), unavailable
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(2, "blobs")

    async def read(self, work: Callable[[StoreFile], _T]) -> _T:
        """Run work on the database, which must not change it. Raises Unavailable."""
        return await self._rows.do(work)

    async def change(self, work: Callable[[StoreFile], _T]) -> _T:
        """Run work as one transaction, then delete the blobs that no row names any more. Raises Unavailable."""
        return await self._rows.do(lambda opened: opened.change(work))

    async def run_reaper(self) -> None:
        """Delete expired files and sessions every two minutes, until this is cancelled."""
        while True:
            with contextlib.suppress(Unavailable):  # already logged
                await self._rows.do(StoreFile.reap)
            await asyncio.sleep(_REAP_S)

    async def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run work(*args) on a thread for blobs. Raises Unavailable if the disk fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        except OSError as error:
            self._rows.warn(str(error))
            raise unavailable() from None


def file_limits(settings: StoreSettings) -> FileLimits:
    """Return the limits on files."""
    return FileLimits(
        max_files=settings.max_files, max_bytes=settings.max_files_bytes, max_key_files=settings.max_key_files,
        max_key_bytes=settings.max_key_files_bytes, max_age_s=settings.max_file_age_s,
    )  # fmt: skip


def file_limit(settings: StoreSettings, owner: str) -> str:
    """Return the name of the setting that bounds a file of this owner: the smallest of those that all its files obey."""
    names = ["max_file_bytes", "max_files_bytes", *(["max_key_files_bytes"] if owner else [])]
    return min(names, key=lambda name: getattr(settings, name))


def unavailable() -> Unavailable:
    """Return the error for a disk that cannot be read or written."""
    text = "Files, skills and sessions cannot be kept or read now"
    return Unavailable(text, code="STORE_UNAVAILABLE", retry_after_s=_RETRY_AFTER_S)
