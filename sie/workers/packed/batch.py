"""Packs the sequences of a step back to back in one row, without padding.

Pure NumPy. Sequences are sorted by length, so that those of equal length form one contiguous run of the row. Attention
without a variable-length kernel then works on plain views. `order` restores the caller's order. For models that cannot
run the row, `rectangles` cuts it into batches, with padding only if the caller allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.workers.packed.adjacent import AdjacentItems, lengths_of

MOST_PADDING: Final = 0.25
"""Most padding of a padded rectangle, as a part of its area.

Lengths that are spread evenly from half the width to the width have this much padding. So each rectangle is about half as
wide as the next one, and texts of 8 to 512 tokens take about six. With an eighth they would take more than twice as many.
"""
SMALL_AREA: Final = 256
"""Area up to which all of a rectangle may be padding: a pass over so few tokens takes as long as its launches."""
LIGHT_AREA: Final = 4096
"""Area up to which a rectangle may be larger than the whole step without padding."""


class Run(NamedTuple):
    """Adjacent sequences of equal length: tokens start .. start + count * length of the row."""

    start: int
    count: int
    length: int


class PackedBatch(NamedTuple):
    """n sequences, t tokens. Row i of the result belongs to item order[i] of the step."""

    input_ids: NDArray[np.int64]
    """(t,)"""
    position_ids: NDArray[np.int64]
    """(t,): 0, 1, ... within each sequence."""
    cu_seqlens: NDArray[np.int32]
    """(n + 1,): the start of each sequence; first 0, last t."""
    order: NDArray[np.intp]
    """(n,)"""
    runs: tuple[Run, ...]
    max_length: int
    token_types: NDArray[np.int64] | None = None
    """(t,), for pairs whose model needs them."""
    attended: NDArray[np.int32] | None = None
    """(n,): how many leading tokens of each sequence its tokens attend to; None if all."""


def pack_sequences(
    token_ids: Sequence[NDArray[np.integer]],
    token_types: Sequence[NDArray[np.integer]] | None = None,
    *,
    attended: NDArray[np.int32] | None = None,
) -> PackedBatch:
    """Pack the token ids of a step, each (t_i,) of any integer type, and their token types if given.

    attended is (n,), in the order of token_ids.

    Copies all input. Raises ValueError without a sequence or for an empty one.
    """
    given = np.array(lengths_of(token_ids), np.int32)
    if not len(given) or not given.all():
        raise ValueError("a step has at least one sequence, and each at least one token")
    order = np.argsort(given, kind="stable")
    lengths = given[order]
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    position_ids = np.arange(cu_seqlens[-1], dtype=np.int64) - np.repeat(cu_seqlens[:-1], lengths)
    if isinstance(token_ids, AdjacentItems):  # a view of each sequence would cost more than one more copy of the ids
        places = position_ids + np.repeat((given.cumsum() - given)[order], lengths)
        input_ids = token_ids.joined()[places].astype(np.int64)
    else:
        input_ids = _in_order(token_ids, order)
    types = None if token_types is None else _in_order(token_types, order)
    if attended is not None:
        attended = None if np.array_equal(attended[order], lengths) else attended[order]
    runs = _runs(lengths.tolist())
    return PackedBatch(input_ids, position_ids, cu_seqlens, order, runs, int(lengths[-1]), types, attended)


def with_filler(batch: PackedBatch, num_tokens: int) -> PackedBatch:
    """Return the batch with one more sequence of num_tokens at the end; `order` still covers only the others."""
    t = len(batch.input_ids)
    return batch._replace(
        input_ids=np.concatenate((batch.input_ids, np.full(num_tokens, batch.input_ids[0]))),
        position_ids=np.concatenate((batch.position_ids, np.arange(num_tokens))),
        cu_seqlens=np.append(batch.cu_seqlens, np.int32(t + num_tokens)),
        runs=(*batch.runs, Run(t, 1, num_tokens)),
        max_length=max(batch.max_length, num_tokens),
        token_types=None if batch.token_types is None else np.pad(batch.token_types, (0, num_tokens)),
        attended=None if batch.attended is None else np.append(batch.attended, np.int32(num_tokens)),
    )


class Rectangle(NamedTuple):
    """Adjacent sequences as the rows of one batch: num_tokens tokens of the packed row from start on, and padding."""

    start: int
    count: int
    num_tokens: int
    width: int

    @property
    def area(self) -> int:
        """Tokens with padding."""
        return self.count * self.width


def rectangles(runs: Sequence[Run], *, pads: bool) -> list[Rectangle]:
    """Cut a step into rectangles, in its order: one for each length, or few with padding.

    With padding, each rectangle takes all shorter sequences that `MOST_PADDING` or `SMALL_AREA` allows. It is as wide as
    its longest sequence, so that no position is outside the model's table. Memory is budgeted by a step's tokens without
    padding. So above `LIGHT_AREA` no rectangle is larger than that.
    """
    found = [Rectangle(start, count, count * length, length) for start, count, length in runs]
    if not pads:
        return found
    most_area = max(LIGHT_AREA, sum(each.num_tokens for each in found))
    joined = [found.pop()]
    while found:
        shorter, longer = found.pop(), joined[-1]
        both = Rectangle(
            shorter.start, shorter.count + longer.count, shorter.num_tokens + longer.num_tokens, longer.width
        )
        is_full = both.num_tokens >= (1 - MOST_PADDING) * both.area and both.area <= most_area
        if is_full or both.area <= SMALL_AREA:
            joined[-1] = both
        else:
            joined.append(shorter)
    return joined[::-1]


def padded_rows(
    values: NDArray[np.integer], rectangle: Rectangle, kept: NDArray[np.bool_], padding: int
) -> NDArray[np.integer]:
    """Return a rectangle's rows (count, width) of a step's values (t,).

    Where kept (count, width) is False, they have the value `padding`.
    """
    rows = np.full(kept.shape, padding, values.dtype)
    rows[kept] = values[rectangle.start : rectangle.start + rectangle.num_tokens]
    return rows


def token_lengths(batch: PackedBatch) -> NDArray[np.int64]:
    """Return the length (t,) of each token's sequence."""
    lengths = np.diff(batch.cu_seqlens)
    return np.repeat(lengths, lengths).astype(np.int64)


def rounded_tokens(num_tokens: int) -> int:
    """Return the padded width of a step if each width costs memory: at most 33 % more, mostly 3 %.

    There are 44 widths up to 1,024 tokens: multiples of 8, 16 and 32, which also suit matrix units.
    """
    for limit, multiple in ((64, 8), (256, 16), (1024, 32), (8192, 128)):
        if num_tokens <= limit:
            return -(-num_tokens // multiple) * multiple
    return -(-num_tokens // 512) * 512


def _in_order(sequences: Sequence[NDArray[np.integer]], order: NDArray[np.intp]) -> NDArray[np.int64]:
    return np.concatenate([sequences[i] for i in order.tolist()], dtype=np.int64)


def _runs(lengths: list[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    start = 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        runs.append(Run(start, count, length))
        start += count * length
    return tuple(runs)
