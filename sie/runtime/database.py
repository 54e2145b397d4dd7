"""Opens an SQLite database that several processes share, and replaces one that is damaged.

A file with another schema, or one found to be damaged at any time, is set aside and a new one begins. Other processes,
and those whose file an operator moved away, then open the new one. The folder must be on a local disk and belong to one
server. All calls of a process run on one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from sie.runtime.logs import get_logger
from sie.runtime.shared_files import share
from sie.values.errors import Unavailable

_log = get_logger(__name__)
_BUSY_TIMEOUT_S: Final = 5.0
_WARN_AGAIN_S: Final = 60.0
_MAX_ASIDE: Final = 3
"""Files set aside that are kept: a bad disk must not fill up with them."""
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY: Final = 0xFF
"""The bits of an extended error code of SQLite that are the primary code."""
_SUFFIXES: Final = ("-wal", "-shm", "")
_T = TypeVar("_T")


class Schema(NamedTuple):
    """The tables of a database, by version, and the word for their contents."""

    kept: str
    """The things that it keeps, in plural, for log lines."""
    table: str
    """A table that a database with this schema has."""
    version: int
    upgrades: Mapping[int, str]
    """The statements that upgrade a file of an earlier version, or an empty file (0), to this version."""


class DatabaseFile:
    """One open database. Every method blocks; a cursor of `db` commits each statement by itself."""

    def __init__(self, path: Path, schema: Schema) -> None:
        """Open or create the file, readable by this user only unless its folder is shared. Raises OSError and sqlite3.Error."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._schema = path, schema
        with _locked(path):
            self.db = _open(path, schema)
            self._identity = _identity(path)

    @property
    def is_moved(self) -> bool:
        """Whether the file is no longer the one that processes open now."""
        return _identity(self._path) != self._identity

    def set_aside(self, reason: Exception) -> None:
        """Set the file aside unless it has been; close this object then."""
        with _locked(self._path):
            if not self.is_moved:
                _set_aside(self._path, self._schema, reason)

    def close(self) -> None:
        """Close the file."""
        self.db.close()


class OnFile(Protocol):
    """An object that works on a `DatabaseFile`."""

    @property
    def file(self) -> DatabaseFile:
        """Its file."""
        ...


_OnFileT = TypeVar("_OnFileT", bound=OnFile)


class DatabaseThread(Generic[_OnFileT]):
    """Access to a database from the event loop, through one thread. The first use opens the file."""

    def __init__(self, directory: str, kept: str, open_file: Callable[[], _OnFileT],
                 refuse: Callable[[], Unavailable]) -> None:  # fmt: skip
        """Take the folder and the things kept, for log lines. refuse makes the error for clients if the file fails."""
        self._directory = directory
        self._kept = kept
        self._open_file = open_file
        self._refuse = refuse
        self._thread = ThreadPoolExecutor(1, kept.partition(" ")[0].rstrip(","))
        self._opened: _OnFileT | None = None
        self._warned, self._warned_s = "", 0.0

    async def do(self, work: Callable[[_OnFileT], _T]) -> _T:
        """Run work on the file. Raises Unavailable if the file cannot be read or written now."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)

    def _do(self, work: Callable[[_OnFileT], _T]) -> _T:
        try:
            try:
                return work(self._open())
            except sqlite3.DatabaseError as error:
                code: int = getattr(error, "sqlite_errorcode", 0)  # Python's own errors have none
                if self._opened is None or code & _PRIMARY not in _DAMAGED:
                    raise
                self._opened.file.set_aside(error)
            return work(self._open())
        except (sqlite3.Error, OSError) as error:
            self.warn(str(error))
            raise self._refuse() from None

    def warn(self, reason: str) -> None:
        """Log why the disk fails, if that was not said in the last minute."""
        now_s = time.monotonic()
        if reason != self._warned or now_s - self._warned_s > _WARN_AGAIN_S:  # a full disk fails every request
            self._warned, self._warned_s = reason, now_s
            _log.warning("%s cannot be kept in %s: %s", self._kept, self._directory, reason)

    def _open(self) -> _OnFileT:
        """Return the open file. Opens it again if another process, or an operator, has moved it."""
        if self._opened is not None and self._opened.file.is_moved:
            # SQLite leaves the new file's log alone: it looks whether its own was moved, too.
            self._opened.file.close()
            self._opened = None
        if self._opened is None:
            self._opened = self._open_file()
        return self._opened


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Lock out other processes while the database is opened: only one may create it or set it aside."""
    with path.with_suffix(".lock").open("a") as lock:
        share(Path(lock.name))
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open(path: Path, schema: Schema) -> sqlite3.Connection:
    try:
        return _connect(path, schema)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise  # no access or a full disk: the file itself is not damaged
        _set_aside(path, schema, error)
        return _connect(path, schema)


def _set_aside(path: Path, schema: Schema, reason: Exception) -> None:
    aside = path.with_name(f"{path.name}.{time.time_ns()}")
    _log.error(
        "%s cannot be used (%s): it is set aside as %s, and a new one begun. %s that were kept in it are not found "
        "any more; `sqlite3 %s .recover` may still read them",
        path, reason, aside.name, schema.kept.capitalize(), aside,
    )  # fmt: skip
    # ORDER: the log first. A new file beside the log of the old one would be made of both.
    for suffix in _SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    numbers = {
        found.name.removeprefix(f"{path.name}.").partition("-")[0] for found in path.parent.glob(f"{path.name}.*")
    }
    for number in sorted(filter(str.isdigit, numbers))[:-_MAX_ASIDE]:
        for suffix in _SUFFIXES:
            path.with_name(f"{path.name}.{number}{suffix}").unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _connect(path: Path, schema: Schema) -> sqlite3.Connection:
    """Open the database, with our schema. Raises sqlite3.DatabaseError if the file is not such a database."""
    path.touch(mode=0o600)
    share(path)  # SQLite gives its log the same mode
    db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        if (upgrade := schema.upgrades.get(version)) is not None:
            db.executescript(f"BEGIN; {upgrade} PRAGMA user_version = {schema.version}; COMMIT;")
        elif version != schema.version:
            raise sqlite3.DatabaseError(f"its schema is version {version}, not {schema.version}")
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (schema.table,)).fetchone() is None:
            raise sqlite3.DatabaseError(f"it has no table of {schema.table}")
    except BaseException:
        db.close()
        raise
    return db
