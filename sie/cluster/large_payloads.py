"""Sends payloads that are too large for a message of NATS by reference: they lie in a pool's object store meanwhile."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.payloads import Cards, CountResult, CountWork, TextFrame, decode, encode

LargeT = TypeVar("LargeT", Cards, CountResult, CountWork, TextFrame)


async def pack(connection: Connection, pool: str, name: str, payload: LargeT, **empty: Any) -> bytes:
    """Return a payload as bytes. If it is large, it is stored under name, and the bytes only refer to it.

    empty has the small values of the fields that are stored. Raises Overloaded if the store is full, and Unavailable.
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
    """Return the whole of a payload that nobody else reads, and delete it from the store. Raises as `unpack`."""
    whole = await unpack(connection, pool, payload, decoder)
    if payload.stored:
        await connection.forget(pool, payload.stored)
    return whole
