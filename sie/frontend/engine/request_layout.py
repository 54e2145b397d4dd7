"""Lays out a request's arrays in its extent: the header's bytes, each array's place, and the bytes to lease."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
from numpy.typing import NDArray

from sie.catalog.profiles import model_of
from sie.values.work import ArrayRef, WorkHeader
from sie.values.work_bytes import DTYPES, extent_bytes, extent_head, plan_arrays

_encoder: Final = msgspec.msgpack.Encoder()
_MAX_KEPT_TASK_BYTES: Final = 2048
"""The layout of a longer task is not cached: thousands are cached, and such a task is a long list of labels."""


class RequestLayout(NamedTuple):
    """The part that all requests of one shape share. model is the name that workers know, not the requested entry."""

    header: bytes
    refs: tuple[ArrayRef, ...]
    nbytes: int
    model: str
    head: bytes
    """The first bytes of the extent: its prologue and the header."""
    places: tuple[slice, ...]
    """Where each array lies in the extent."""


TextEncodeKey = tuple[str, str, bool | None, int | None, tuple[str, ...]]
"""The fields of a request to encode one text that its layout depends on: model, dtype, normalised, width, outputs."""


def lay_out(header: WorkHeader, arrays: Sequence[tuple[str, NDArray[Any]]]) -> RequestLayout:
    """Return the layout of a request with these arrays, by name; header.arrays is filled in here."""
    shapes = tuple([(name, array.dtype.str, array.shape) for name, array in arrays])
    return (_lay_out if len(header.task) <= _MAX_KEPT_TASK_BYTES else _lay_out.__wrapped__)(header, shapes)


def lay_out_once(header: WorkHeader, arrays: Sequence[tuple[str, NDArray[Any]]]) -> RequestLayout:
    """Return the layout of a request with a unique header, such as one with a random seed. It is not cached."""
    return _lay_out.__wrapped__(header, tuple([(name, array.dtype.str, array.shape) for name, array in arrays]))


def lay_out_bytes(header: WorkHeader, sizes: Sequence[int]) -> RequestLayout:
    """Return the layout of a request whose arrays are bytes (uint8), named by their numbers. It is not cached here."""
    return _lay_out.__wrapped__(header, tuple([(str(index), "|u1", (size,)) for index, size in enumerate(sizes)]))


@lru_cache(maxsize=4096)
def lay_out_text(key: TextEncodeKey, num_tokens: int, text_bytes: int | None) -> RequestLayout:
    """Return the layout of a request to encode one text.

    text_bytes: the size of the text, or None to send its token ids. The arrays are as in `WorkHeader`: the bounds of
    the tokens, then the ids, or the text and its bounds.
    """
    model, output_dtype, normalize, truncate_dim, output_types = key
    shapes = [("cu_seqlens", "<i4", (2,))]
    if text_bytes is not None:
        shapes += [("text", "|u1", (text_bytes,)), ("text_offsets", "<i4", (2,))]
    else:
        shapes.append(("token_ids", "<i4", (num_tokens,)))
    header = WorkHeader(model, "encode", 1, (), output_dtype, normalize, truncate_dim, output_types)
    return _lay_out.__wrapped__(header, tuple(shapes))


@lru_cache(maxsize=4096)
def _lay_out(header: WorkHeader, shapes: tuple[tuple[str, str, tuple[int, ...]], ...]) -> RequestLayout:
    plan = plan_arrays(shapes)
    model = model_of(header.model)
    encoded = _encoder.encode(msgspec.structs.replace(header, model=model, arrays=plan.refs))
    start = extent_bytes(len(encoded), 0)
    places = tuple(
        [
            slice(start + ref.offset, start + ref.offset + DTYPES[ref.dtype].itemsize * prod(ref.shape))
            for ref in plan.refs
        ]
    )
    return RequestLayout(encoded, plan.refs, start + plan.nbytes, model, extent_head(encoded), places)
