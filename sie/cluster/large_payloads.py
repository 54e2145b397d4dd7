"""Sends payloads that are too large for a message of NATS by reference: they lie in a pool's object store meanwhile."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.payloads import Cards, CountResult, CountWork, TextFrame, decode, encode

LargeT = TypeVar("LargeT", Cards, CountResult, CountWork, TextFrame)


async def pack(connection: Connection, pool: str, name: str, payload: LargeT, **empty: Any) -> bytes:
    """Return a payload as bytes; a large one is kept under a name, and refers to it with the fields in empty replaced.

    Raises Overloaded if the store is full, and Unavailable.
    """
    packed = encode(payload)
    if len(packed) <= INLINE_BYTES:
        return packed
    return encode(msgspec.structs.replace(payload, stored=await connection.keep(pool, name, packed), **empty))


async def unpack(
    connection: Connection, pool: str, payload: LargeT, decoder: msgspec.msgpack.Decoder[LargeT]
) -> LargeT:
    """Return the whole of a payload. Raises Unavailable if it is not there, and ProtocolError."""
    return decode(await connection.fetch(pool, payload.stored), decoder) if payload.stored else payload


async def take(connection: Connection, pool: str, payload: LargeT, decoder: msgspec.msgpack.Decoder[LargeT]) -> LargeT:
    """Return the whole of a payload that nobody else reads, and delete what was kept of it. Raises as `unpack`."""
    whole = await unpack(connection, pool, payload, decoder)
    if payload.stored:
        await connection.forget(pool, payload.stored)
    return whole
