"""Owns the events of streams in the file of responses, by which a stream can be read again and gone on with.

A row holds events that stand one behind another, each ending in an empty line. Every call blocks, and raises sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

EVENTS_SCHEMA: Final = """
ALTER TABLE responses ADD COLUMN stream TEXT NOT NULL DEFAULT '';
CREATE TABLE events (
    response INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (response, first)
);
CREATE TRIGGER forgotten AFTER DELETE ON responses BEGIN DELETE FROM events WHERE response = OLD.number; END;
"""
_END: Final = b"\n\n"
_ROW: Final = "SELECT number, ?, ?, ? FROM responses WHERE id = ?"
_MAX_ROWS: Final = 100
"""In a statement. Source: SQLite's limits; 500 terms and 32,766 values."""
NewEvents = tuple[str, int, Sequence[bytes]]
"""Id of a response, number of the first of its events, the events."""


class EventRows:
    """The rows of one open database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.num_new_bytes = 0
        """Of the events that this process added since somebody last set it to 0."""

    def add(self, rows: Sequence[NewEvents]) -> None:
        """Keep the next events of some responses, as far as these are kept themselves.

        In few statements: after each of them a thread waits until the event loop lets go of the interpreter.
        """
        for start in range(0, len(rows), _MAX_ROWS):
            some = rows[start : start + _MAX_ROWS]
            values: list[Any] = []
            for response_id, first, events in some:
                data = b"".join(events)
                self.num_new_bytes += len(data)
                values += [first, first + len(events) - 1, data, response_id]
            self._db.execute("INSERT INTO events " + " UNION ALL ".join([_ROW] * len(some)), values)

    def cut(self, response_id: str) -> None:
        """Forget the events of a response: they are too many, or some are missing."""
        self._db.execute("UPDATE responses SET stream = 'cut' WHERE id = ?", (response_id,))
        self._db.execute(
            "DELETE FROM events WHERE response = (SELECT number FROM responses WHERE id = ?)", (response_id,)
        )

    def behind(self, response: int, after: int) -> list[bytes]:
        """Return the events of the response in this row that come behind the one with the number after."""
        rows = self._db.execute(
            "SELECT first, data FROM events WHERE response = ? AND last > ? ORDER BY first", (response, after)
        )
        events: list[bytes] = []
        for first, data in cast("Iterator[tuple[int, bytes]]", rows):
            events += [event + _END for event in data.split(_END)[:-1]][max(0, after + 1 - first) :]
        return events
