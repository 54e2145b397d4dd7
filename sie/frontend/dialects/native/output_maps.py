"""Encodes one item of an encode reply, one map for each output, as msgpack fragments and for JSON.

    dense        {dims, dtype, values: [width]}
    others       the facts and arrays of their `sie.values.output_kinds.OutputKind`, such as {dims, dtype, indices, values}

An item has its id first, if the request gave one, then these keys in this order, then `truncated: true` if its text was
truncated. Source: SIE API reference, section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.frontend.dialects.native.arrays import array_header, array_prefix, pack
from sie.values.inference import EncodeReply, RaggedRows
from sie.values.output_kinds import KINDS, OutputKind


def msgpack_items(reply: EncodeReply) -> list[Any]:
    """Return the fragments of the items array, to be joined once. They hold views of the reply's rows."""
    parts: list[Any] = [array_header(reply.num_items)]
    num_outputs = (reply.width > 0) + len(reply.ragged)
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
        for output, rows in reply.ragged.items():
            parts += _ragged_parts(KINDS[output], rows, item, reply.output_dtype)
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


def _ragged_parts(kind: OutputKind, rows: RaggedRows, item: int, output_dtype: str) -> Iterator[Any]:
    start, end = rows.offsets[item], rows.offsets[item + 1]
    count = end - start
    yield _start(kind.name, rows.dims, count if kind.counts_entries else 0, _shown_dtype(kind, rows, output_dtype))
    for form, array in zip(kind.arrays, rows.arrays, strict=True):
        entry_bytes = array.width * _item_bytes(array.dtype)
        yield _key(form.field)
        if form.has_rows:
            yield array_prefix(array.dtype, (count, array.width), count * entry_bytes)
        else:  # not cached, because two items rarely have the same number of entries
            yield array_prefix.__wrapped__(array.dtype, (count,), count * entry_bytes)
        yield array.values[start * entry_bytes : end * entry_bytes]


@lru_cache(maxsize=1024)
def _start(output: str, dims: int, count: int, dtype: str) -> bytes:
    """Return the fragment from an output's key to the last of its facts."""
    kind = KINDS[output]
    facts = _facts(kind, dims, count, dtype)
    fields = [part for name, value in facts.items() for part in (pack(name), pack(value))]
    return b"".join([pack(output), _map_header(len(facts) + len(kind.arrays)), *fields])


def _facts(kind: OutputKind, dims: int, count: int, dtype: str) -> dict[str, int | str]:
    values = {"dims": dims, "entries": count, "dtype": dtype}
    return {fact.field: values[fact.tells] for fact in kind.facts}


def _shown_dtype(kind: OutputKind, rows: RaggedRows, output_dtype: str) -> str:
    if kind.rounding == "rows":
        return wire_dtype(output_dtype)
    return "float16" if rows.arrays[-1].dtype == "<f2" else "float32"


@lru_cache(maxsize=64)
def _key(field: str) -> bytes:
    return pack(field)


@lru_cache(maxsize=8)
def _item_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def json_items(reply: EncodeReply) -> list[dict[str, Any]]:
    """Return the items as plain JSON types; a float16 becomes a number."""
    items: list[dict[str, Any]] = [{} if id_ is None else {"id": id_} for id_ in _ids(reply)]
    dtype = wire_dtype(reply.output_dtype)
    if reply.width:
        rows = np.frombuffer(reply.values, reply.dtype).reshape(reply.num_items, reply.width).tolist()
        for item, row in zip(items, rows, strict=True):
            item["dense"] = {"dims": reply.dims, "dtype": dtype, "values": row}
    for output, rows in reply.ragged.items():
        _add_ragged(items, KINDS[output], rows, reply.output_dtype)
    for item in reply.cuts:
        items[item]["truncated"] = True
    return items


def _ids(reply: EncodeReply) -> Sequence[str | None]:
    return reply.ids or (None,) * reply.num_items


def _add_ragged(items: list[dict[str, Any]], kind: OutputKind, rows: RaggedRows, output_dtype: str) -> None:
    dtype = _shown_dtype(kind, rows, output_dtype)
    arrays: dict[str, NDArray[Any]] = {}
    for form, array in zip(kind.arrays, rows.arrays, strict=True):
        values = np.frombuffer(array.values, array.dtype)
        arrays[form.field] = values.reshape(-1, array.width) if form.has_rows else values
    for item, (start, end) in zip(items, itertools.pairwise(rows.offsets), strict=True):
        own = {field: values[start:end].tolist() for field, values in arrays.items()}
        item[kind.name] = {**_facts(kind, rows.dims, end - start, dtype), **own}
