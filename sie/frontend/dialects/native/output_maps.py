"""Encodes one item of an encode reply: the maps `dense`, `sparse` and `multivector`, as msgpack fragments and for JSON.

    dense        {dims, dtype, values: [width]}
    sparse       {dims, dtype, indices: int32 [e], values: [e]}
    multivector  {token_dims, num_tokens, dtype, values: [num_tokens, width]}

An item has its id first, if the request gave one, then these keys in this order, then `truncated: true` if its text was
truncated. Source: SIE API reference, section 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sie.frontend.dialects.native.arrays import array_header, array_prefix, pack
from sie.values.encode import EncodeReply, SparseRows, TokenRows

_INDEX_BYTES = 4


def msgpack_items(reply: EncodeReply) -> list[Any]:
    """Return the fragments of the items array, to be joined once. They hold views of the reply's rows."""
    parts: list[Any] = [array_header(reply.num_items)]
    num_outputs = sum((reply.width > 0, reply.sparse is not None, reply.multivector is not None))
    row_bytes = reply.values.nbytes // reply.num_items
    for item in range(reply.num_items):
        id_ = reply.ids[item] if reply.ids else None
        is_cut = item in reply.cuts
        parts.append(_map_header(num_outputs + (id_ is not None) + is_cut))
        if id_ is not None:
            parts += (_ID, pack(id_))
        if reply.width:
            parts.append(dense_prefix(reply.output_dtype, reply.dims, reply.dtype, reply.width, row_bytes))
            parts.append(reply.values[item * row_bytes : (item + 1) * row_bytes])
        if reply.sparse is not None:
            parts += _sparse_parts(reply.sparse, item)
        if reply.multivector is not None:
            parts += _token_parts(reply.multivector, item, reply.output_dtype)
        if is_cut:
            parts.append(_TRUNCATED)
    return parts


@lru_cache(maxsize=256)
def dense_prefix(output_dtype: str, dims: int, dtype: str, width: int, row_bytes: int) -> bytes:
    """Return the fragment of an item from its key `dense` to the header of the row's bytes."""
    fields = pack("dims") + pack(dims) + pack("dtype") + pack(wire_dtype(output_dtype)) + pack("values")
    return pack("dense") + b"\x83" + fields + array_prefix(dtype, (width,), row_bytes)


def wire_dtype(output_dtype: str) -> str:
    """Return a dtype's name in a reply; the reference never answers `ubinary`."""
    return "binary" if output_dtype == "ubinary" else output_dtype


_ID = pack("id")
_TRUNCATED = pack("truncated") + pack(True)


def _map_header(num_keys: int) -> bytes:
    return bytes((0x80 | num_keys,))


def _sparse_parts(sparse: SparseRows, item: int) -> Iterator[Any]:
    start, end = sparse.offsets[item], sparse.offsets[item + 1]
    count, value_bytes = end - start, _item_bytes(sparse.dtype)
    yield _sparse_start(sparse.dims, sparse.dtype)
    # These prefixes are not cached, because two items rarely have the same number of entries.
    yield array_prefix.__wrapped__("<i4", (count,), count * _INDEX_BYTES)
    yield sparse.indices[start * _INDEX_BYTES : end * _INDEX_BYTES]
    yield _VALUES
    yield array_prefix.__wrapped__(sparse.dtype, (count,), count * value_bytes)
    yield sparse.values[start * value_bytes : end * value_bytes]


_VALUES = pack("values")


@lru_cache(maxsize=64)
def _sparse_start(dims: int, dtype: str) -> bytes:
    fields = pack("dims") + pack(dims) + pack("dtype") + pack(_sparse_dtype(dtype)) + pack("indices")
    return pack("sparse") + b"\x84" + fields


def _token_parts(vectors: TokenRows, item: int, output_dtype: str) -> Iterator[Any]:
    start, end = vectors.offsets[item], vectors.offsets[item + 1]
    row_bytes = vectors.width * _item_bytes(vectors.dtype)
    yield _token_start(vectors.dims, output_dtype, end - start)
    yield array_prefix(vectors.dtype, (end - start, vectors.width), (end - start) * row_bytes)
    yield vectors.values[start * row_bytes : end * row_bytes]


@lru_cache(maxsize=1024)
def _token_start(dims: int, output_dtype: str, num_tokens: int) -> bytes:
    counts = pack("token_dims") + pack(dims) + pack("num_tokens") + pack(num_tokens)
    return pack("multivector") + b"\x84" + counts + pack("dtype") + pack(wire_dtype(output_dtype)) + _VALUES


@lru_cache(maxsize=8)
def _item_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _sparse_dtype(dtype: str) -> str:
    return "float16" if dtype == "<f2" else "float32"


def json_items(reply: EncodeReply) -> list[dict[str, Any]]:
    """Return the items as plain JSON types; a float16 becomes a number."""
    items: list[dict[str, Any]] = [{} if id_ is None else {"id": id_} for id_ in _ids(reply)]
    dtype = wire_dtype(reply.output_dtype)
    if reply.width:
        rows = np.frombuffer(reply.values, reply.dtype).reshape(reply.num_items, reply.width).tolist()
        for item, row in zip(items, rows, strict=True):
            item["dense"] = {"dims": reply.dims, "dtype": dtype, "values": row}
    if reply.sparse is not None:
        _add_sparse(items, reply.sparse)
    if reply.multivector is not None:
        _add_vectors(items, reply.multivector, dtype)
    for item in reply.cuts:
        items[item]["truncated"] = True
    return items


def _ids(reply: EncodeReply) -> Sequence[str | None]:
    return reply.ids or (None,) * reply.num_items


def _add_sparse(items: list[dict[str, Any]], sparse: SparseRows) -> None:
    indices = np.frombuffer(sparse.indices, "<i4")
    values = np.frombuffer(sparse.values, sparse.dtype)
    for number, item in enumerate(items):
        own = slice(sparse.offsets[number], sparse.offsets[number + 1])
        item["sparse"] = {
            "dims": sparse.dims,
            "dtype": _sparse_dtype(sparse.dtype),
            "indices": indices[own].tolist(),
            "values": values[own].tolist(),
        }


def _add_vectors(items: list[dict[str, Any]], vectors: TokenRows, dtype: str) -> None:
    rows = np.frombuffer(vectors.values, vectors.dtype).reshape(-1, vectors.width)
    for number, item in enumerate(items):
        start, end = vectors.offsets[number], vectors.offsets[number + 1]
        item["multivector"] = {
            "token_dims": vectors.dims,
            "num_tokens": end - start,
            "dtype": dtype,
            "values": rows[start:end].tolist(),
        }
