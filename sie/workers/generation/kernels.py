"""The Triton kernels of a decode step: they write keys and values into their blocks, and attend to them in place.

Memory limits a decode step: each visible key and value is read once, for all query heads that share it. A single
sequence would keep only one multiprocessor busy for each of its few key heads. So its tokens are split into parts that
run in parallel, and a second kernel combines the parts. The kernels read lengths on the device, and the grid depends
only on the number of sequences. So a captured launch stays valid for any later lengths.
Source: FlashAttention-2, arXiv 2307.08691, section 3.1; Flash-Decoding (PyTorch blog, 2023) for the parts.

Imported only if Triton is installed. With TRITON_INTERPRET=1 in the environment the kernels run on a CPU, slowly.
"""

# Triton is installed only with a GPU, and the arguments of a call decide its functions' types.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sie.workers.generation.paged_cache import Rule

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_DOT = 16
"""Least rows, columns and sums of a product on matrix units."""
_NUM_STAGES = 5
"""The fewest that load the next tile's keys and values during the current tile: its block numbers load before them."""
_MAX_PARTS = tl.constexpr(64)
_BUSY_PROGRAMS = 528
"""Programs that fill a GPU: four on each of 132 multiprocessors."""
_LEAST_PARTS = 4
"""For many sequences, since one of them may be long."""
_LEAST_TILES = 8
"""Least tiles of a part when the GPU is busy without it."""


class Tables(NamedTuple):
    """Positions and blocks of n tokens, all on the device; those of one prefill chunk have the same blocks.

    positions (n,) int64 are the tokens' positions. blocks (m, n) int32 has the blocks of token i in column i:
    position p is in blocks[p // block_tokens, i]. Entries after the one of its position are not read.
    """

    positions: Tensor
    blocks: Tensor


def write_rows(keys: Tensor, values: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
    """Write the keys and values (h_kv, t, d) of t tokens to rows (t,) int64 of the blocks' rows (r, h_kv, d), in place.

    If tokens share a row, any one of them is kept.
    """
    key, value = (states if states.stride(2) == 1 else states.contiguous() for states in (key, value))
    num_heads, num_tokens, key_width = key.shape
    value_heads, _, value_width = value.shape
    key_size, value_size = num_heads * key_width, value_heads * value_width
    padded, value_padded = triton.next_power_of_2(key_size), triton.next_power_of_2(value_size)
    _write[num_tokens,](
        key, value, keys, values, rows, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KEY_WIDTH=key_width, KEY_SIZE=key_size, KEY_PADDED=padded,
        VALUE_WIDTH=value_width, VALUE_SIZE=value_size, VALUE_PADDED=value_padded,
        num_warps=min(16, max(4, max(padded, value_padded) // 1024)),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _write(
    key, value, keys, values, rows, key_head, key_token, value_head, value_token,
    KEY_WIDTH: tl.constexpr, KEY_SIZE: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Copy one token's keys and values."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    place = tl.arange(0, KEY_PADDED)
    source = token * key_token + (place // KEY_WIDTH) * key_head + place % KEY_WIDTH
    tl.store(keys + row * KEY_SIZE + place, tl.load(key + source, mask=place < KEY_SIZE), mask=place < KEY_SIZE)
    place = tl.arange(0, VALUE_PADDED)
    source = token * value_token + (place // VALUE_WIDTH) * value_head + place % VALUE_WIDTH
    tl.store(
        values + row * VALUE_SIZE + place, tl.load(value + source, mask=place < VALUE_SIZE), mask=place < VALUE_SIZE
    )


def attend_blocks(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tables, window: int | None, rule: Rule, out: Tensor
) -> None:
    """Attend with one query of each sequence, (h, n, d), to its tokens up to the query's; fill out (n, h, d_v).

    keys (b, block_tokens, h_kv, d) and values, h a multiple of h_kv, already hold the query's token. query, keys and
    values have one 16-bit format (or float32), with sums in float32. window as in `LayerForm`.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads, num_sequences, width = query.shape
    _, block_tokens, num_keys, value_width = values.shape
    group = num_heads // num_keys
    form = _Form.of(width, value_width)
    num_parts, least_tiles = _cut(num_sequences * num_keys)
    sums = query.new_empty(num_sequences, num_heads, num_parts, value_width, dtype=torch.float32)
    weights = query.new_empty(2, num_sequences, num_heads, num_parts, dtype=torch.float32)
    common: dict[str, Any] = {
        "WINDOW": window or 0, "TILE": form.tile, "HAS_SINKS": rule.sinks is not None, "VALUE_WIDTH": value_width,
        "VALUE_PADDED": form.value_padded,
    }  # fmt: skip
    sinks = query if rule.sinks is None else rule.sinks
    _attend[num_sequences, num_keys, num_parts](
        query, keys, values, tables.positions, tables.blocks, sinks, out, sums, weights[0], weights[1],
        query.stride(0), query.stride(1), tables.blocks.stride(0), num_heads, num_parts, least_tiles,
        rule.scaling, 0.0 if rule.softcap is None else rule.softcap,
        HAS_CAP=rule.softcap is not None, GROUP=group, ROWS=max(_MIN_DOT, triton.next_power_of_2(group)),
        WIDTH=width, PADDED=form.padded, NUM_KEYS=num_keys, BLOCK_TOKENS=block_tokens,
        **common, num_warps=4, num_stages=_NUM_STAGES,
    )  # fmt: skip
    _join[num_sequences, num_heads](
        tables.positions, sinks, out, sums, weights[0], weights[1], num_heads, num_parts, least_tiles,
        **common, num_warps=2,
    )  # fmt: skip


class _Form(NamedTuple):
    """The kernel's build options for a head width: fixed, since tuning would run inside a capture or a request."""

    padded: int
    value_padded: int
    tile: int

    @classmethod
    def of(cls, width: int, value_width: int) -> _Form:
        """Return options with at most 75 KiB of shared memory for a program: three fit on a Hopper multiprocessor."""
        padded, value_padded = (max(_MIN_DOT, triton.next_power_of_2(own)) for own in (width, value_width))
        return cls(padded, value_padded, 32 if max(padded, value_padded) > 128 else 64)


def _cut(num_pairs: int) -> tuple[int, int]:
    """Return the most parts of a sequence and the least tiles of a part, for a number of (sequence, key head) pairs."""
    wanted = -(-_BUSY_PROGRAMS // num_pairs)
    if wanted <= _LEAST_PARTS:
        return _LEAST_PARTS, _LEAST_TILES
    return min(_MAX_PARTS.value, triton.next_power_of_2(wanted)), 1


@triton.jit
def _span(position, num_parts, least_tiles, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the first visible position, the first tile, the number of tiles, and the number of tiles in a part."""
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    first_tile = first // TILE
    num_tiles = position // TILE + 1 - first_tile
    return first, first_tile, num_tiles, tl.maximum(tl.cdiv(num_tiles, num_parts), least_tiles)


@triton.jit(  # one build for any number of sequences: no request should wait for a build
    do_not_specialize=["blocks_row", "num_parts", "least_tiles"], do_not_specialize_on_alignment=["positions"]
)
def _attend(
    query, keys, values, positions, blocks, sinks, out, sums, maxima, totals,
    query_head, query_token, blocks_row, num_heads, num_parts, least_tiles, scaling, softcap,
    HAS_CAP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    NUM_KEYS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one key's heads to one part of one sequence."""
    sequence, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + sequence).to(tl.int32)
    first, first_tile, num_tiles, part_tiles = _span(position, num_parts, least_tiles, WINDOW, TILE)
    begin = part * part_tiles
    if begin >= num_tiles:
        return
    end = tl.minimum(begin + part_tiles, num_tiles)
    row, column, value_column = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    head = key_head * GROUP + row
    own = tl.load(
        query + head[:, None] * query_head + sequence * query_token + column[None, :],
        mask=(row < GROUP)[:, None] & (column < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    # Powers of two instead of powers of e: one instruction each.
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighed = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    for tile in range(first_tile + begin, first_tile + end):
        token = tile * TILE + tl.arange(0, TILE)
        seen = (token >= first) & (token <= position)
        block = tl.load(blocks + (token // BLOCK_TOKENS) * blocks_row + sequence, mask=seen, other=0).to(tl.int64)
        place = (block * BLOCK_TOKENS + token % BLOCK_TOKENS) * NUM_KEYS + key_head
        # Unwritten memory may hold NaN, and 0 times NaN is NaN: it is not read.
        key = tl.load(
            keys + place[:, None] * WIDTH + column[None, :], mask=seen[:, None] & (column < WIDTH)[None, :], other=0.0
        )
        scores = tl.dot(own, tl.trans(key)) * scaling
        if HAS_CAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E / softcap)) + 1.0))
        scores = tl.where(seen[None, :], scores * _LOG2_E, float("-inf"))
        largest = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        faded = tl.exp2(maximum - largest)
        total = total * faded + tl.sum(weights, 1)
        value = tl.load(
            values + place[:, None] * VALUE_WIDTH + value_column[None, :],
            mask=seen[:, None] & (value_column < VALUE_WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        weighed = weighed * faded[:, None] + tl.dot(weights.to(value.dtype), value)
        maximum = largest
    is_own = row < GROUP
    kept = is_own[:, None] & (value_column < VALUE_WIDTH)[None, :]
    place = sequence * num_heads + head
    if part_tiles >= num_tiles:  # the only part
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_own, other=0.0).to(tl.float32) * _LOG2_E
            total += tl.exp2(sink - maximum)
        target = out + place[:, None] * VALUE_WIDTH + value_column[None, :]
        tl.store(target, (weighed / total[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        place = place * num_parts + part
        tl.store(sums + place[:, None] * VALUE_WIDTH + value_column[None, :], weighed, mask=kept)
        tl.store(maxima + place, maximum, mask=is_own)
        tl.store(totals + place, total, mask=is_own)


@triton.jit(do_not_specialize=["num_parts", "least_tiles"], do_not_specialize_on_alignment=["positions"])
def _join(
    positions, sinks, out, sums, maxima, totals, num_heads, num_parts, least_tiles,
    WINDOW: tl.constexpr, TILE: tl.constexpr, HAS_SINKS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one head of one sequence by their weights."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + sequence).to(tl.int32)
    _, _, num_tiles, part_tiles = _span(position, num_parts, least_tiles, WINDOW, TILE)
    num_used = tl.cdiv(num_tiles, part_tiles)
    if num_used == 1:
        return
    column = tl.arange(0, VALUE_PADDED)
    is_own = column < VALUE_WIDTH
    place = (sequence * num_heads + head) * num_parts
    every = tl.arange(0, _MAX_PARTS)
    maximum = tl.max(tl.load(maxima + place + every, mask=every < num_used, other=float("-inf")), 0)
    total = 0.0
    weighed = tl.zeros([VALUE_PADDED], tl.float32)
    for start in range(0, num_used, 8):  # eight loads in flight at once
        part = start + tl.arange(0, 8)
        is_used = part < num_used
        weights = tl.exp2(tl.load(maxima + place + part, mask=is_used, other=float("-inf")) - maximum)
        total += tl.sum(weights * tl.load(totals + place + part, mask=is_used, other=0.0), 0)
        own = tl.load(
            sums + (place + part)[:, None] * VALUE_WIDTH + column[None, :],
            mask=is_used[:, None] & is_own[None, :], other=0.0,
        )  # fmt: skip
        weighed += tl.sum(weights[:, None] * own, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - maximum)
    target = out + (sequence * num_heads + head) * VALUE_WIDTH + column
    tl.store(target, (weighed / total).to(out.dtype.element_ty), mask=is_own)
