"""Keeps work items that are not tried again in a pool's dead-letter stream, with their inputs: nothing else has them."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.cluster.connection import Connection
from sie.cluster.payloads import VERSION, DeadLetter, Work, encode
from sie.cluster.subjects import Lane, dead_subject
from sie.runtime.logs import get_logger
from sie.values.errors import SieError

_log = get_logger(__name__)
_PART_BYTES: Final = 1 << 19


async def bury(connection: Connection, lane: Lane, work: Work, reason: str, hosts: list[str]) -> None:
    """Keep a work item and the reason. A large body is divided among several letters; one by reference is read first.

    A letter that cannot be kept is only logged: the item's client gets its answer either way.
    """
    try:
        body = memoryview(await connection.fetch(lane.pool, work.stored)) if work.stored else work.body
        parts = [body[start : start + _PART_BYTES] for start in range(0, len(body), _PART_BYTES)] or [body]
        for number, part in enumerate(parts):
            piece = msgspec.structs.replace(work, body=part, stored="")
            letter = DeadLetter(VERSION, piece, reason, hosts, number, len(parts))
            name = f"dead.{work.id}.{number}"
            await connection.enqueue(lane.pool, dead_subject(lane, work.model), encode(letter), name)
    except SieError as error:
        _log.error("work item %s could not be kept as a dead letter: %s", work.id, error.message)
