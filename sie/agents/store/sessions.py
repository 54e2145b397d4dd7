"""Keeps the rows of sessions: conversations that requests continue by their id. The least recently used go first.

Every call blocks, and raises sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

import msgspec

SESSIONS_SCHEMA: Final = """
CREATE TABLE sessions (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    used_s REAL NOT NULL,
    messages BLOB NOT NULL,
    files TEXT NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX session_ends ON sessions (used_s);
"""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A stored conversation."""

    messages: bytes
    """A JSON list of messages, in the form of the chat API."""
    files: tuple[str, ...] = ()
    """The ids of the files that the conversation named."""


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the number of sessions, of all and of one API key, and on the time that one may rest."""

    max_sessions: int
    max_key_sessions: int
    max_idle_s: float


class SessionRows:
    """The rows of one open database."""

    def __init__(self, db: sqlite3.Connection, limits: SessionLimits) -> None:
        self._db = db
        self._limits = limits

    def put(self, owner: str, session_id: str, session: Session, now_s: float) -> None:
        """Store a session, in place of one with its id. The least recently used ones go if there are too many."""
        row = (owner, session_id, now_s, session.messages, " ".join(session.files))
        self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)", row)
        self.drop_idle(now_s)
        if owner:
            self._trim(owner, self._limits.max_key_sessions)
        self._trim(None, self._limits.max_sessions)

    def use(self, owner: str, session_id: str, now_s: float) -> Session | None:
        """Return a session of this owner and note that it was used now, or return None."""
        row: Any = self._db.execute(
            "UPDATE sessions SET used_s = ? WHERE owner = ? AND id = ? AND used_s > ? RETURNING messages, files",
            (now_s, owner, session_id, now_s - self._limits.max_idle_s),
        ).fetchone()
        return Session(messages=row[0], files=tuple(row[1].split())) if row is not None else None

    def delete(self, owner: str, session_id: str) -> None:
        """Delete a session of this owner, if there is one."""
        self._db.execute("DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, session_id))

    def drop_idle(self, now_s: float) -> None:
        """Delete the sessions that rested for too long."""
        self._db.execute("DELETE FROM sessions WHERE used_s <= ?", (now_s - self._limits.max_idle_s,))

    def _trim(self, owner: str | None, max_sessions: int) -> None:
        """Delete the least recently used sessions of the owner, or of the owner with most, while there are too many."""
        while True:
            where, args = (" WHERE owner = ?", (owner,)) if owner is not None else ("", ())
            (count,) = self._db.execute(f"SELECT count(*) FROM sessions{where}", args).fetchone()  # noqa: S608
            if count <= max_sessions:
                return
            loser = owner if owner is not None else self._largest()
            self._db.execute(
                "DELETE FROM sessions WHERE rowid = (SELECT rowid FROM sessions WHERE owner = ? ORDER BY used_s LIMIT 1)",
                (loser,),
            )

    def _largest(self) -> str:
        # Among owners with equally many, the one with the oldest session loses it, and not one that stores its first.
        sql = "SELECT owner FROM sessions GROUP BY owner ORDER BY count(*) DESC, min(used_s) LIMIT 1"
        (owner,) = self._db.execute(sql).fetchone()
        return owner
