"""Owns the file of responses that can be asked for later: one SQLite database in the state directory, for all frontends.

Every call runs on one thread of this process. A response belongs to the name of the API key that asked for it; for any
other it does not exist. One that is still being made names the process that makes it: when that is gone, so is the work,
and the response has failed. A file that is damaged, or of another schema, is set aside and a new one begun. A state
directory belongs to one server, on a local disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from sie.config.limits import MIB
from sie.frontend.dialects.responses.reply import StreamForm
from sie.frontend.responses.events import EVENTS_SCHEMA, EventRows
from sie.runtime.logs import get_logger
from sie.values.errors import Unavailable

_log = get_logger(__name__)
_SCHEMA_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    created_s REAL NOT NULL,
    status TEXT NOT NULL,
    maker TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    body BLOB NOT NULL,
    input BLOB NOT NULL,
    history BLOB NOT NULL
);
CREATE INDEX ages ON responses (created_s);
CREATE INDEX sizes ON responses (number, nbytes);
"""
_UPGRADES: Final = {0: _SCHEMA + EVENTS_SCHEMA, 1: EVENTS_SCHEMA}
"""What makes a file of an earlier version, or an empty one, of this version."""
_RUNNING: Final = ("queued", "in_progress")
_BUSY_TIMEOUT_S: Final = 5.0
_RETRY_AFTER_S: Final = 5
_PRUNES_A_LIMIT: Final = 64
"""The limit on the number of responses is held up to this part of it; on small limits, exactly."""
_DEAD: Final = frozenset("ZX")
_T = TypeVar("_T")


class Kept(msgspec.Struct, kw_only=True):
    """A response as it is kept. body is its object; input its items, and history those before it: all JSON."""

    id: str
    status: str
    body: bytes
    input: bytes = b"[]"
    history: bytes = b"[]"
    stream: StreamForm = ""


class Followed(msgspec.Struct, kw_only=True, frozen=True):
    """A response whose stream is read: how it is, its object, and the events behind those that its reader has.

    body may be empty while the response is being made: who reads on behind an event has seen it.
    """

    status: str
    stream: StreamForm
    body: bytes
    events: list[bytes]


class StoreLimits(msgspec.Struct, frozen=True):
    """How much is kept, and for how long."""

    max_responses: int
    max_bytes: int
    max_age_s: float


class ResponseFile:
    """The database of one process, opened. Every method blocks, and raises sqlite3.Error."""

    def __init__(self, directory: Path, limits: StoreLimits, now_s: Callable[[], float] = time.time) -> None:
        """Open the file, or begin it. Raises OSError and sqlite3.Error where that cannot be."""
        self._limits = limits
        self._now_s = now_s
        self._num_added = 0
        self._maker = process_name(os.getpid())
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(directory / "responses.lock"):
            self._db = _open(directory / "responses.db")
        self.events = EventRows(self._db)

    def close(self) -> None:
        """Let the file go."""
        self._db.close()

    def add(self, owner: str, kept: Kept) -> None:
        """Keep a response; the oldest go when there is no room."""
        nbytes = len(kept.body) + len(kept.input) + len(kept.history)
        maker = self._maker if kept.status in _RUNNING else ""
        row = (
            kept.id,
            owner,
            self._now_s(),
            kept.status,
            maker,
            nbytes,
            kept.body,
            kept.input,
            kept.history,
            kept.stream,
        )
        columns = "id, owner, created_s, status, maker, nbytes, body, input, history, stream"
        self._db.execute(f"INSERT INTO responses ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)  # noqa: S608
        is_due = self._num_added % max(1, self._limits.max_responses // _PRUNES_A_LIMIT) == 0
        if is_due or nbytes + self.events.num_new_bytes > MIB:
            self._prune()
            self.events.num_new_bytes = 0
        self._num_added += 1

    def update(self, response_id: str, status: str, body: bytes, num_event_bytes: int = 0) -> bool:
        """Replace what a response that is being made has come to; False when it was cancelled or deleted meanwhile.

        num_event_bytes: what its events take from now on, beside what was said of them before.
        """
        done = self._db.execute(
            "UPDATE responses SET nbytes = nbytes - length(body) + ?, status = ?, body = ? "
            "WHERE id = ? AND (status IN ('queued', 'in_progress') OR (status = 'cancelled' AND ? = 'cancelled'))",
            (len(body) + num_event_bytes, status, body, response_id, status),
        )
        return done.rowcount > 0

    def follow(self, response_id: str, owner: str, after: int) -> Followed | None:
        """Return a response of this owner's with the events that it has behind the one with number after."""
        row: Any = self._db.execute(
            "SELECT number, status, maker, stream FROM responses WHERE id = ? AND owner = ? AND created_s > ?",
            (response_id, owner, self._now_s() - self._limits.max_age_s),
        ).fetchone()
        if row is None:
            return None
        number, status, maker, stream = cast("tuple[int, str, str, StreamForm]", row)
        body = b""
        if status not in _RUNNING or (not stream and after < 0) or not is_running(maker):
            kept = self.get(response_id, owner)
            if kept is None:
                return None
            status, body = kept.status, kept.body
        # ORDER: behind the status: what its maker wrote before it ended is all there now.
        events = self.events.behind(number, after)
        return Followed(status=status, stream=stream, body=body, events=events)

    def get(self, response_id: str, owner: str) -> Kept | None:
        """Return a response of this owner's, if there is one."""
        row: Any = self._db.execute(
            "SELECT status, maker, body, input, history FROM responses WHERE id = ? AND owner = ? AND created_s > ?",
            (response_id, owner, self._now_s() - self._limits.max_age_s),
        ).fetchone()
        if row is None:
            return None
        status, maker, body, items, history = cast("tuple[str, str, bytes, bytes, bytes]", row)
        kept = Kept(id=response_id, status=status, body=body, input=items, history=history)
        if status in _RUNNING and not is_running(maker):
            self._end(
                kept, "failed", {"code": "server_error", "message": "The server stopped before the response ended"}
            )
        return kept

    def cancel(self, response_id: str, owner: str) -> Kept | None:
        """Return a response, cancelled if it was being made; whoever makes it finds out by `stopped`."""
        kept = self.get(response_id, owner)
        if kept is not None and kept.status in _RUNNING:
            self._end(kept, "cancelled", None)
        return kept

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget a response; False when there is none. Whoever makes it finds out by `stopped`."""
        return self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount > 0

    def stopped(self, ids: Sequence[str]) -> list[str]:
        """Return which of these responses nobody wants any more: they were cancelled, or deleted."""
        found: list[str] = []
        for response_id in ids:
            row: Any = self._db.execute("SELECT status FROM responses WHERE id = ?", (response_id,)).fetchone()
            if row is None or row[0] not in _RUNNING:
                found.append(response_id)
        return found

    def _end(self, kept: Kept, status: str, error: dict[str, str] | None) -> None:
        """End a response that is being made, from outside, and show it so. Its maker may have been faster."""
        made = msgspec.json.decode(kept.body, type=dict[str, Any])
        body = msgspec.json.encode({**made, "status": status, "error": error})
        if self.update(kept.id, status, body):
            kept.status, kept.body = status, body
            return
        row: Any = self._db.execute("SELECT status, body FROM responses WHERE id = ?", (kept.id,)).fetchone()
        if row is not None:
            kept.status, kept.body = row

    def _prune(self) -> None:
        """Forget what is too old, and the oldest of what is too much."""
        limits = self._limits
        self._db.execute("DELETE FROM responses WHERE created_s <= ?", (self._now_s() - limits.max_age_s,))
        nbytes = 0
        rows = self._db.execute("SELECT number, nbytes FROM responses ORDER BY number DESC")
        for count, (number, size) in enumerate(cast("Iterator[tuple[int, int]]", rows), 1):
            nbytes += size
            if count > limits.max_responses or nbytes > limits.max_bytes:
                rows.close()
                self._db.execute("DELETE FROM responses WHERE number <= ?", (number,))
                return


class ResponseStore:
    """The file, off the event loop; opened by the first use."""

    def __init__(self, directory: str, limits: StoreLimits) -> None:
        self._directory = Path(directory)
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "responses")
        self._file: ResponseFile | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._limits.max_responses > 0

    async def do(self, work: Callable[[ResponseFile], _T]) -> _T:
        """Do work on the file. Raises Unavailable when it cannot be read or written now."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)

    def _do(self, work: Callable[[ResponseFile], _T]) -> _T:
        try:
            if self._file is None:
                self._file = ResponseFile(self._directory, self._limits)
            return work(self._file)
        except (sqlite3.Error, OSError) as error:
            _log.warning("responses cannot be kept in %s: %s", self._directory, error)
            text = "Responses cannot be kept or read now"
            raise Unavailable(text, code="RESPONSES_UNAVAILABLE", retry_after_s=_RETRY_AFTER_S) from None


# --- the file ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(path: Path) -> Generator[None]:
    """Keep other processes from opening the database meanwhile: only one may begin it, or set it aside."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open(path: Path) -> sqlite3.Connection:
    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise  # no access, no room: nothing is wrong with the file
        aside = path.with_name(f"{path.name}.{time.time_ns()}")
        _log.warning("%s cannot be used (%s): set aside as %s, and a new one begun", path, error, aside.name)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
        return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    """Return an open database of our schema. Raises sqlite3.DatabaseError for a file that is none."""
    path.touch(mode=0o600)
    db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        if (upgrade := _UPGRADES.get(version)) is not None:
            db.executescript(f"BEGIN; {upgrade} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
        elif version != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its schema is version {version}, not {_SCHEMA_VERSION}")
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'responses'").fetchone() is None:
            raise sqlite3.DatabaseError("it has no table of responses")
    except BaseException:
        db.close()
        raise
    return db


# --- processes --------------------------------------------------------------------------------------------------------


def process_name(pid: int) -> str:
    """Return what no other process is called, on this boot or a later one; empty when no such process runs.

    One that only waits to be reaped does not. Source: proc(5), /proc/pid/stat, fields 3 (state) and 22 (starttime);
    random(4), boot_id.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in _DEAD else f"{boot}/{pid}/{rest[18]}"


def is_running(name: str) -> bool:
    """Return whether the process that is called so still runs."""
    _, _, rest = name.partition("/")
    pid = rest.partition("/")[0]
    return pid.isdigit() and process_name(int(pid)) == name
