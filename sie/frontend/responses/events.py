"""Stores the events of response streams, so that a stream can be replayed and resumed. Must not run on the event loop.

A row holds consecutive events, each with an empty line at its end. Every call blocks, and raises sqlite3.Error.
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
"""Rows in one statement. Source: SQLite's limits, 500 terms and 32,766 values."""
NewEvents = tuple[str, int, Sequence[bytes]]
"""The id of a response, the number of the first event, and the events."""


class EventRows:
    """The event rows of one open database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.num_new_bytes = 0
        """Bytes of the events that this process added since the owner last reset the count."""

    def add(self, rows: Sequence[NewEvents]) -> None:
        """Store the next events of the stored responses among these.

        It uses few statements, because after each one the thread waits until the event loop releases the GIL.
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
        """Delete the events of a response, because they are too many or some are missing."""
        self._db.execute("UPDATE responses SET stream = 'cut' WHERE id = ?", (response_id,))
        self._db.execute(
            "DELETE FROM events WHERE response = (SELECT number FROM responses WHERE id = ?)", (response_id,)
        )

    def read_after(self, response: int, after: int) -> list[bytes]:
        """Return the events of the response in row `response` that follow event number `after`."""
        rows = self._db.execute(
            "SELECT first, data FROM events WHERE response = ? AND last > ? ORDER BY first", (response, after)
        )
        events: list[bytes] = []
        for first, data in cast("Iterator[tuple[int, bytes]]", rows):
            events += [event + _END for event in data.split(_END)[:-1]][max(0, after + 1 - first) :]
        return events
