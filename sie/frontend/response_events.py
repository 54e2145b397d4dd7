"""Owns the events of streams in the file of responses, by which a stream can be read again and gone on with.

A row holds events that stand one behind another, each ending in an empty line. Every call blocks, and raises sqlite3.Error.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from typing import Final, cast

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


class EventRows:
    """The rows of one open database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.num_new_bytes = 0
        """Of the events that this process added since somebody last set it to 0."""

    def add(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        """Keep the next events of a response, if it is kept itself; first is the number of the first of them."""
        data = b"".join(events)
        self.num_new_bytes += len(data)
        with self._at_once():
            added = self._db.execute(
                "INSERT INTO events SELECT number, ?, ?, ? FROM responses WHERE id = ?",
                (first, first + len(events) - 1, data, response_id),
            )
            if added.rowcount > 0:
                self._db.execute("UPDATE responses SET nbytes = nbytes + ? WHERE id = ?", (len(data), response_id))

    def cut(self, response_id: str) -> None:
        """Forget the events of a response: they are too many, or some are missing."""
        with self._at_once():
            self._db.execute(
                "UPDATE responses SET stream = 'cut', nbytes = nbytes - "
                "(SELECT coalesce(sum(length(data)), 0) FROM events WHERE response = number) WHERE id = ?",
                (response_id,),
            )
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

    @contextlib.contextmanager
    def _at_once(self) -> Generator[None]:
        """Have other processes see all that is written meanwhile, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield
