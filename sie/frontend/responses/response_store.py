"""Stores responses in one SQLite database for all frontends. Must never show a response to another API key's name.

Every call runs on one thread of this process. A response belongs to the name of the API key that requested it; for other
keys it does not exist. A response under way names the process that runs it. If that process is gone, the response has
failed. `sie.runtime.database` opens the file, and sets it aside if it is damaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from sie.config.limits import MIB
from sie.frontend.dialects.responses.reply import StreamForm
from sie.frontend.responses.events import EVENTS_SCHEMA, EventRows
from sie.frontend.responses.pruning import Pruner
from sie.runtime.database import DatabaseFile, DatabaseThread, Schema
from sie.values.errors import Unavailable

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
_FORM: Final = Schema("responses", "responses", _SCHEMA_VERSION, _UPGRADES)
_RUNNING: Final = ("queued", "in_progress")
_RETRY_AFTER_S: Final = 5
_PRUNES_A_LIMIT: Final = 64
"""The number of responses may exceed its limit by 1/64 of it between two prunes; small limits are exact."""
_DEAD: Final = frozenset("ZX")
_T = TypeVar("_T")


class Kept(msgspec.Struct, kw_only=True):
    """A stored response. All JSON: body is its object, input its items, history the items before it."""

    id: str
    status: str
    body: bytes
    input: bytes = b"[]"
    history: bytes = b"[]"
    stream: StreamForm = ""


class Followed(msgspec.Struct, kw_only=True, frozen=True):
    """A response whose stream is read: its status, its object, and the events that its reader does not have yet.

    body may be empty while the response is under way and its reader already has an event.
    """

    status: str
    stream: StreamForm
    body: bytes
    events: list[bytes]


class StoreLimits(msgspec.Struct, frozen=True):
    """Limits on the number, size and age of stored responses."""

    max_responses: int
    max_bytes: int
    max_age_s: float


class ResponseFile:
    """The open database of one process. Every method blocks, and raises sqlite3.Error."""

    def __init__(self, directory: Path, limits: StoreLimits, now_s: Callable[[], float] = time.time) -> None:
        """Open or create the file. Raises OSError and sqlite3.Error."""
        self._limits = limits
        self._now_s = now_s
        self._num_added = 0
        self._maker = process_name(os.getpid())
        self.file = DatabaseFile(directory / "responses.db", _FORM)
        self._db = self.file.db
        self.events = EventRows(self._db)
        self._pruner = Pruner(self._db, limits.max_responses, limits.max_bytes, is_running)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def add(self, owner: str, kept: Kept) -> None:
        """Store a response. Deletes old ones when a limit is reached, but none that a process is making."""
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
            self._pruner.prune(self._now_s() - self._limits.max_age_s)
            self.events.num_new_bytes = 0
        self._num_added += 1

    def update(self, response_id: str, status: str, body: bytes) -> bool:
        """Replace the status and body of a response under way. Return False if it was cancelled or deleted meanwhile.

        Its events so far count towards the limit on bytes from now on.
        """
        done = self._db.execute(
            "UPDATE responses SET nbytes = ? + length(input) + length(history) + "
            "(SELECT coalesce(sum(length(data)), 0) FROM events WHERE response = number), status = ?, body = ? "
            "WHERE id = ? AND (status IN ('queued', 'in_progress') OR (status = 'cancelled' AND ? = 'cancelled'))",
            (len(body), status, body, response_id, status),
        )
        return done.rowcount > 0

    def follow(self, response_id: str, owner: str, after: int) -> Followed | None:
        """Return a response of this owner with its events after number `after`, or None."""
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
        # ORDER: after reading the status. Its process writes the last events first (`Responses._keep`), so none is missed.
        events = self.events.read_after(number, after)
        return Followed(status=status, stream=stream, body=body, events=events)

    def get(self, response_id: str, owner: str) -> Kept | None:
        """Return a response of this owner, or None. A response whose process is gone becomes failed."""
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

    def bodies(self, ids: Iterable[str], owner: str) -> Iterator[bytes]:
        """Yield the objects of those responses among these that are stored for this owner."""
        for response_id in ids:
            row: Any = self._db.execute(
                "SELECT body FROM responses WHERE id = ? AND owner = ? AND created_s > ?",
                (response_id, owner, self._now_s() - self._limits.max_age_s),
            ).fetchone()
            if row is not None:
                yield row[0]

    def cancel(self, response_id: str, owner: str) -> Kept | None:
        """Cancel a response if it is under way, and return it. The process that runs it learns of it from `stopped`."""
        kept = self.get(response_id, owner)
        if kept is not None and kept.status in _RUNNING:
            self._end(kept, "cancelled", None)
        return kept

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response; return False if unknown. The process that runs it learns of it from `stopped`."""
        return self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount > 0

    def stopped(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of the responses among these that were cancelled or deleted, or have ended."""
        found: list[str] = []
        for response_id in ids:
            row: Any = self._db.execute("SELECT status FROM responses WHERE id = ?", (response_id,)).fetchone()
            if row is None or row[0] not in _RUNNING:
                found.append(response_id)
        return found

    def _end(self, kept: Kept, status: str, error: dict[str, str] | None) -> None:
        """End a response under way from outside, and update kept. If its process ended it first, that state counts."""
        made = msgspec.json.decode(kept.body, type=dict[str, Any])
        body = msgspec.json.encode({**made, "status": status, "error": error})
        if self.update(kept.id, status, body):
            kept.status, kept.body = status, body
            return
        row: Any = self._db.execute("SELECT status, body FROM responses WHERE id = ?", (kept.id,)).fetchone()
        if row is not None:
            kept.status, kept.body = row


class ResponseStore:
    """Access to the file from the event loop. The first use opens the file."""

    def __init__(self, directory: str, limits: StoreLimits) -> None:
        self._limits = limits
        self._thread = DatabaseThread(
            directory, _FORM.kept, lambda: ResponseFile(Path(directory), limits), _unavailable
        )  # fmt: skip

    @property
    def is_on(self) -> bool:
        """Whether responses are stored at all."""
        return self._limits.max_responses > 0

    async def do(self, work: Callable[[ResponseFile], _T]) -> _T:
        """Run work on the file. Raises Unavailable if the file cannot be read or written now."""
        return await self._thread.do(work)


def _unavailable() -> Unavailable:
    text = "Responses cannot be kept or read now"
    return Unavailable(text, code="RESPONSES_UNAVAILABLE", retry_after_s=_RETRY_AFTER_S)


# --- processes --------------------------------------------------------------------------------------------------------


def process_name(pid: int) -> str:
    """Return a name that no other process has, on this boot or a later one; empty if no such process runs.

    A zombie counts as not running. Source: proc(5), /proc/pid/stat, fields 3 (state) and 22 (starttime);
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
    """Tell whether the process with this name still runs."""
    _, _, rest = name.partition("/")
    pid = rest.partition("/")[0]
    return pid.isdigit() and process_name(int(pid)) == name
