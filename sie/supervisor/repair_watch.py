"""Notices that the files of a model whose load failed for good have changed. Must never read their contents.

A look may hang with a file system, so each one runs on a thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from sie.supervisor.model_registry import ModelRegistry, Record
from sie.values.errors import WireError

_LOOK_S: Final = 2.0
_MAX_FILES: Final = 1000


class _Facts(NamedTuple):
    """Facts about one file. changed_ns: since 1970, when its bytes, its name or its rights changed last."""

    path: str
    errno: int
    inode: int = 0
    nbytes: int = 0
    changed_ns: int = 0
    can_read: bool = False


Stamp = tuple[_Facts, ...]


class _Seen(NamedTuple):
    """What was seen of a model's files. first is empty if they had changed before the first look after the failure."""

    error: WireError
    first: Stamp
    last: Stamp


class RepairWatch:
    """Watches the files of all models of one server that are not tried again. on_repaired gets each one once."""

    def __init__(self, registry: ModelRegistry, on_repaired: Callable[[Record], None]) -> None:
        self._registry = registry
        self._on_repaired = on_repaired
        self._seen: dict[str, _Seen] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look at all files once. A change counts when the next look finds no further one: before, a copy may be half done."""
        refused = {record.spec.id: record for record in self._registry.refused_for_good()}
        self._seen = {name: seen for name, seen in self._seen.items() if name in refused}
        for name, record in refused.items():
            error, seen = record.error, self._seen.get(name)
            stamp = await asyncio.to_thread(stamp_of, record.spec.directory or "")
            if error is None or record.error is not error:  # it was tried again meanwhile
                continue
            if seen is None or seen.error is not error:
                failed_s = time.time() - (time.monotonic() - record.failed_s)
                seen = _Seen(error, () if _is_newer(stamp, failed_s) else stamp, stamp)
            elif stamp == seen.last != seen.first:
                self._on_repaired(record)
            self._seen[name] = seen._replace(last=stamp)


def stamp_of(path: str) -> Stamp:
    """Return a value that changes with the files at or beneath a path, and with the right to read them."""
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in sorted(names))  # noqa: PTH118
    return tuple(map(_facts, (path, *islice(below, _MAX_FILES))))


def _facts(path: str) -> _Facts:
    try:
        found = os.stat(path)  # noqa: PTH116
        return _Facts(path, 0, found.st_ino, found.st_size, found.st_ctime_ns, os.access(path, os.R_OK))
    except OSError as error:
        return _Facts(path, error.errno or 0)


def _is_newer(stamp: Stamp, since_s: float) -> bool:
    return any(facts.changed_ns > since_s * 1e9 for facts in stamp)
