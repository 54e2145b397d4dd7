"""Keeps the rows of files. A file belongs to the name of an API key, and ends after a time or when newer ones need room.

Every call blocks, and raises sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from sie.values.errors import InputTooLong, Unavailable

FILES_SCHEMA: Final = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    format TEXT NOT NULL,
    mime_type TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created_s REAL NOT NULL,
    expires_s REAL NOT NULL,
    purpose TEXT NOT NULL,
    tool TEXT NOT NULL,
    round INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    is_text INTEGER NOT NULL,
    blob TEXT NOT NULL,
    code TEXT NOT NULL,
    message TEXT NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX file_ends ON files (expires_s);
CREATE TRIGGER file_dropped AFTER DELETE ON files WHEN OLD.blob != '' BEGIN
    INSERT INTO dropped VALUES (OLD.blob);
END;
"""
UPLOADED: Final = "user_upload"
OF_REQUEST: Final = "input_file"
OF_CLIENTS: Final = frozenset({UPLOADED, OF_REQUEST})
"""The tools that stand for clients: a file that was uploaded, and one that was part of a request."""
_RETRY_AFTER_S: Final = 5
_HELD: Final = "CASE blob WHEN '' THEN 0 ELSE num_bytes END"
"""Bytes that a file takes. A file without a body takes none: its size is only a client's claim."""
_OVER: Final = f"SELECT count(*), coalesce(sum({_HELD}), 0) FROM files"  # noqa: S608


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the store knows it. Times are in seconds since 1970."""

    id: str
    name: str
    format: str
    mime_type: str
    num_bytes: int
    created_s: float
    expires_s: float
    purpose: str
    tool: str
    """The tool that made it, or one of OF_CLIENTS."""
    round: int = 0
    turn: int = 0
    is_text: bool = False
    blob: str = ""
    """The name of its bytes; empty if the store does not hold them."""
    code: str = ""
    """The code of the error in its place, if it is a placeholder."""
    message: str = ""

    @property
    def is_placeholder(self) -> bool:
        """Whether it stands for a file that could not be made."""
        return bool(self.code)


class FileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the number, bytes and age of files: of all, and of those of one API key."""

    max_files: int
    max_bytes: int
    max_key_files: int
    max_key_bytes: int
    max_age_s: float


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which files a list shows."""

    after: str = ""
    """The id of the last file of the page before."""
    limit: int = 10_000
    descends: bool = False
    purpose: str = ""


_FIELDS: Final = KeptFile.__struct_fields__
_COLUMNS: Final = ", ".join(_FIELDS)
_PLACES: Final = ", ".join("?" * (1 + len(_FIELDS)))


class FileRows:
    """The rows of one open database."""

    def __init__(self, db: sqlite3.Connection, limits: FileLimits) -> None:
        self._db = db
        self._limits = limits

    def add(self, owner: str, file: KeptFile) -> None:
        """Store a file, in place of one with its id. The oldest files go if there are too many.

        Must run in a transaction. Raises InputTooLong (413) for a client's file that no deletion makes room for, and
        Unavailable for another, or if those who hold less would have to make room.
        """
        if file.tool in OF_CLIENTS:
            self._check_size(owner, file)
        self._db.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, file.id))
        row = (owner, *(getattr(file, field) for field in _FIELDS))
        self._db.execute(f"INSERT INTO files (owner, {_COLUMNS}) VALUES ({_PLACES})", row)  # noqa: S608
        self.drop_expired(file.created_s)
        if owner:
            self._trim(owner, self._limits.max_key_files, self._limits.max_key_bytes)
        self._trim(None, self._limits.max_files, self._limits.max_bytes)
        if self.find(owner, file.id, file.created_s) is None:
            text = "The server has no room for this file beside those of others (max_files, max_files_bytes)"
            raise Unavailable(text, code="STORE_UNAVAILABLE", retry_after_s=_RETRY_AFTER_S)

    def find(self, owner: str, file_id: str, now_s: float) -> KeptFile | None:
        """Return a file of this owner, or None."""
        sql = f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND id = ? AND expires_s > ?"  # noqa: S608
        row: Any = self._db.execute(sql, (owner, file_id, now_s)).fetchone()
        return _read(row) if row is not None else None

    def page(self, owner: str, query: FileQuery, now_s: float) -> tuple[Sequence[KeptFile], bool] | None:
        """Return one page of the files of this owner, and whether more follow. None if `after` is not one of them.

        The oldest is first, unless the query says otherwise.
        """
        row: Any = self._db.execute(
            "SELECT number FROM files WHERE owner = ? AND id = ?", (owner, query.after)
        ).fetchone()
        if row is None and query.after:
            return None
        step, order = ("<", "DESC") if query.descends else (">", "ASC")
        start = row[0] if row is not None else 1 << 62 if query.descends else 0
        sql = (
            f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND expires_s > ? AND (? = '' OR purpose = ?) "  # noqa: S608
            f"AND number {step} ? ORDER BY number {order} LIMIT ?"
        )
        args = (owner, now_s, query.purpose, query.purpose, start, query.limit + 1)
        found = [_read(one) for one in self._db.execute(sql, args)]
        return found[: query.limit], len(found) > query.limit

    def delete(self, owner: str, file_id: str, now_s: float) -> bool:
        """Delete a file of this owner; return False if unknown."""
        done = self._db.execute(
            "DELETE FROM files WHERE owner = ? AND id = ? AND expires_s > ?", (owner, file_id, now_s)
        )
        return done.rowcount > 0

    def renew(self, owner: str, ids: Iterable[str], now_s: float) -> None:
        """Let files live on as if they were made now. Expired ones stay expired."""
        ends_s = now_s + self._limits.max_age_s
        sql = "UPDATE files SET expires_s = max(expires_s, ?) WHERE owner = ? AND id = ? AND expires_s > ?"
        self._db.executemany(sql, [(ends_s, owner, file_id, now_s) for file_id in ids])

    def drop_expired(self, now_s: float) -> None:
        """Delete the rows of files whose time is over."""
        self._db.execute("DELETE FROM files WHERE expires_s <= ?", (now_s,))

    def _check_size(self, owner: str, file: KeptFile) -> None:
        limits = {"max_files_bytes": self._limits.max_bytes}
        if owner:
            limits["max_key_files_bytes"] = self._limits.max_key_bytes
        setting = min(limits, key=lambda one: limits[one])
        if file.blob and file.num_bytes > limits[setting]:
            text = f"The file has {file.num_bytes} bytes, more than {setting} ({limits[setting]}) allows for all files"
            raise InputTooLong(text, http_status=413, extras={"param": "file"})

    def _trim(self, owner: str | None, max_files: int, max_bytes: int) -> None:
        """Delete the oldest files until those of the owner, or of all, are within the limits.

        If all files are too many, an owner with the most bytes loses its oldest, so nobody can push out those of others.
        """
        while True:
            where, args = (" WHERE owner = ?", (owner,)) if owner is not None else ("", ())
            count, num_bytes = self._db.execute(_OVER + where, args).fetchone()
            if count <= max_files and num_bytes <= max_bytes:
                return
            loser = owner if owner is not None else self._largest(by_bytes=num_bytes > max_bytes)
            self._db.execute(
                "DELETE FROM files WHERE number = (SELECT min(number) FROM files WHERE owner = ?)", (loser,)
            )

    def _largest(self, *, by_bytes: bool) -> str:
        size = f"sum({_HELD})" if by_bytes else "count(*)"
        # Among owners who hold equally much, the one with the oldest file loses it, and not one that adds its first file.
        sql = f"SELECT owner FROM files GROUP BY owner ORDER BY {size} DESC, min(number) LIMIT 1"  # noqa: S608
        (owner,) = self._db.execute(sql).fetchone()
        return owner


def _read(row: Sequence[Any]) -> KeptFile:
    fields: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    fields["is_text"] = bool(fields["is_text"])
    return KeptFile(**fields)
