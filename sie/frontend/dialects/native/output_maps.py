"""Encodes one item of an encode reply, one map for each output, as msgpack fragments and for JSON.

    dense        {dims, dtype, values: [width]}
    others       the facts and arrays of their `sie.values.output_kinds.OutputKind`, such as {dims, dtype, indices, values}

An item has its id first, if the request gave one, then these keys in this order, then `truncated: true` if its text was
truncated. Source: SIE API reference, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def json_items(reply: EncodeReply) -> Iterator[dict[str, Any]]:
    """Yield the items as plain JSON types, each made when it is asked for; a float16 becomes a number."""
    dtype = wire_dtype(reply.output_dtype)
    rows = None
    if reply.width:
        rows = np.frombuffer(reply.values.cast("B"), reply.dtype).reshape(reply.num_items, reply.width)
    ragged = [_ragged_reader(KINDS[output], own, reply.output_dtype) for output, own in reply.ragged.items()]
    for index in range(reply.num_items):
        id_ = reply.ids[index] if reply.ids else None
        item: dict[str, Any] = {} if id_ is None else {"id": id_}
        if rows is not None:
            item["dense"] = {"dims": reply.dims, "dtype": dtype, "values": rows[index].tolist()}
        for name, read in ragged:
            item[name] = read(index)
        if index in reply.cuts:
            item["truncated"] = True
        yield item


def _ragged_reader(
    kind: OutputKind, rows: RaggedRows, output_dtype: str
) -> tuple[str, Callable[[int], dict[str, Any]]]:
    """Return an output's key, and a function from an item's index to its value."""
    dtype = _shown_dtype(kind, rows, output_dtype)
    arrays: dict[str, NDArray[Any]] = {}
    for form, array in zip(kind.arrays, rows.arrays, strict=True):
        values = np.frombuffer(array.values, array.dtype)
        arrays[form.field] = values.reshape(-1, array.width) if form.has_rows else values

    def read(index: int) -> dict[str, Any]:
        start, end = rows.offsets[index], rows.offsets[index + 1]
        own = {field: values[start:end].tolist() for field, values in arrays.items()}
        return {**_facts(kind, rows.dims, end - start, dtype), **own}

    return kind.name, read
