"""Deletes stored responses that are too old or too many. Must never delete one that a live process is making.

The deletion of a response stops its work, whoever requested it. Every call blocks, and raises sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final

_IS_UNDER_WAY: Final = "status IN ('queued', 'in_progress')"


class Pruner:
    """The pruning of one open database. is_running tells whether the process with a name still runs."""

    def __init__(
        self, db: sqlite3.Connection, max_responses: int, max_bytes: int, is_running: Callable[[str], bool]
    ) -> None:
        self._db = db
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._is_running = is_running

    def prune(self, oldest_s: float) -> None:
        """Delete responses that were created until oldest_s, and the oldest ones over the limits.

        Those under way count, too. An owner with most loses its oldest, so nobody can push out those of others.
        """
        (first_s,) = self._db.execute("SELECT min(created_s) FROM responses").fetchone()
        if first_s is None or (first_s > oldest_s and not self._is_over(*self._totals())):
            return
        has_ended, makers = self._ended()
        self._db.execute(f"DELETE FROM responses WHERE created_s <= ? AND {has_ended}", (oldest_s, *makers))  # noqa: S608
        if self._is_over(*self._totals()):
            self._shrink(has_ended, makers)

    def _totals(self) -> tuple[int, int]:
        return self._db.execute("SELECT count(*), coalesce(sum(nbytes), 0) FROM responses").fetchone()

    def _is_over(self, count: int, nbytes: int) -> bool:
        return count > self._max_responses or nbytes > self._max_bytes

    def _ended(self) -> tuple[str, list[str]]:
        """Return the condition for responses that nobody makes any more, and its values."""
        rows = self._db.execute(f"SELECT DISTINCT maker FROM responses WHERE {_IS_UNDER_WAY}")  # noqa: S608
        makers = [name for (name,) in rows.fetchall() if self._is_running(name)]
        return f"NOT ({_IS_UNDER_WAY} AND maker IN ({', '.join('?' * len(makers))}))", makers

    def _shrink(self, has_ended: str, makers: list[str]) -> None:
        for owner, last in self._choose(has_ended, makers).items():
            self._db.execute(
                f"DELETE FROM responses WHERE owner = ? AND number <= ? AND {has_ended}",  # noqa: S608
                (owner, last, *makers),
            )

    def _choose(self, has_ended: str, makers: list[str]) -> dict[str, int]:
        """Return the number of the last response that goes, by its owner."""
        # ORDER BY: of owners who hold as much, the one with the oldest response loses it.
        sql = "SELECT owner, count(*), sum(nbytes) FROM responses GROUP BY owner ORDER BY min(number)"
        held = {owner: [count, nbytes] for owner, count, nbytes in self._db.execute(sql).fetchall()}
        total = [sum(share[unit] for share in held.values()) for unit in (0, 1)]
        sql = f"SELECT number, nbytes FROM responses WHERE owner = ? AND {has_ended} ORDER BY number"  # noqa: S608
        ended: dict[str, sqlite3.Cursor] = {}
        losers: dict[str, int] = {}
        while held and self._is_over(*total):
            unit = 1 if total[1] > self._max_bytes else 0
            owner = max(held, key=lambda one, unit=unit: held[one][unit])
            if owner not in ended:
                ended[owner] = self._db.execute(sql, (owner, *makers))
            row = ended[owner].fetchone()
            if row is None:  # all that it still has is under way
                del held[owner]
                continue
            losers[owner], nbytes = row
            for share in (held[owner], total):
                share[0] -= 1
                share[1] -= nbytes
        for cursor in ended.values():  # an open one would keep the database from being changed
            cursor.close()
        return losers
