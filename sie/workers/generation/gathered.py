"""Attention over blocks that gathers each sequence's keys and values for torch: on CPUs, and where no kernel fits.

Decoding sequences run together, each padded to the longest of its group. Their grouped queries are rows of one query,
so that a key is read once for all its heads. A prefill chunk runs by itself. Contiguous blocks are read in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sie.workers.device.device import move
from sie.workers.generation.paged_cache import LayerCache, Rule
from sie.workers.generation.step_layout import DecodeGroup, PromptPart, StepLayout

_MIN_ROWS = 16
_MAX_SCORES = 1 << 25
"""Numbers: 64 MiB in 16 bits, 128 MiB in float32."""


class _Source(NamedTuple):
    """The visible rows of keys and values: `rows` of the gathered blocks, or of all blocks if `blocks` is None."""

    blocks: Tensor | None
    rows: slice


class _Group(NamedTuple):
    """Decoding sequences. mask (n, 1, 1, rows) is 0 for a visible row, else -inf; None: all are visible."""

    first: int
    count: int
    source: _Source
    mask: Tensor | None


class _Part(NamedTuple):
    """A prefill chunk. source None: it sees only itself, causally. mask (length, rows) as in `_Group`."""

    first: int
    length: int
    source: _Source | None
    mask: Tensor | None


class _Seen(NamedTuple):
    groups: list[_Group]
    parts: list[_Part]


class GatheredStep:
    """One step on the device. It builds masks and tables once for each window, not in each layer."""

    def __init__(self, layout: StepLayout, device: torch.device, dtype: torch.dtype) -> None:
        """Take the step's layout and the format of keys and values."""
        self._layout = layout
        self._rows = move(torch.from_numpy(layout.rows), device)
        self._device = device
        self._dtype = dtype
        self._is_bf16_cpu = device.type == "cpu" and dtype == torch.bfloat16
        self._seen: dict[int | None, _Seen] = {}

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Store keys and values (h_kv, t, d) and attend with queries (h, t, d); return (t, h, d_v)."""
        layer.rows_of_keys.index_copy_(0, self._rows, key.transpose(0, 1))
        layer.rows_of_values.index_copy_(0, self._rows, value.transpose(0, 1))
        seen = self._seen.get(layer.window) or self._see(layer.window)
        if len(seen.groups) == 1 and not seen.parts:
            return _attend_group(seen.groups[0], layer, query, rule)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for group in seen.groups:
            rows = slice(group.first, group.first + group.count)
            out[rows] = _attend_group(group, layer, query[:, rows], rule)
        for part in seen.parts:
            rows = slice(part.first, part.first + part.length)
            own = (key[:, rows], value[:, rows]) if part.source is None else _read(layer, part.source)
            out[rows] = attend_one(query[:, rows], *own, part.mask, rule)
        return out

    def _see(self, window: int | None) -> _Seen:
        groups, parts = self._layout.reach(window)
        seen = _Seen([self._group(group) for group in groups], [self._part(part) for part in parts])
        self._seen[window] = seen
        return seen

    def _group(self, group: DecodeGroup) -> _Group:
        count, width = group.table.shape
        if count == 1:
            return _Group(group.first, 1, self._one(group.table[0], int(group.starts[0]), int(group.ends[0])), None)
        columns = np.arange(width * self._layout.block_tokens)
        hidden = (columns < group.starts[:, None]) | (columns >= group.ends[:, None])
        mask = self._mask(hidden)[:, None, None, :] if hidden.any() else None
        table = move(torch.from_numpy(group.table.reshape(-1)), self._device)
        return _Group(group.first, count, _Source(table, slice(None)), mask)

    def _part(self, part: PromptPart) -> _Part:
        end = part.offset + part.length
        if part.offset == 0 and part.window is None:
            mask = _causal(part.length, self._dtype, self._device) if self._is_bf16_cpu else None
            return _Part(part.first, part.length, None, mask)
        position, column = np.arange(part.offset, end)[:, None], np.arange(end)
        hidden = column > position
        if part.window is not None:
            hidden |= column <= position - part.window
        return _Part(part.first, part.length, self._one(part.blocks, 0, end), self._mask(hidden))

    def _one(self, blocks: NDArray[np.int64], start: int, end: int) -> _Source:
        if (np.diff(blocks) == 1).all():
            first = int(blocks[0]) * self._layout.block_tokens
            return _Source(None, slice(first + start, first + end))
        return _Source(move(torch.from_numpy(blocks), self._device), slice(start, end))

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(move(torch.from_numpy(hidden), self._device), -torch.inf)


def band_mask(length: int, window: int, like: Tensor) -> Tensor:
    """Return the mask (length, length) of a sequence in which each token sees `window` positions up to its own."""
    ones = torch.ones(length, length, dtype=torch.bool, device=like.device)
    hidden = ones.triu(1) | ones.tril(-window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attend within one sequence, causally if mask is None: (h, t, d), (h_kv, s, d) to (t, h, d_v)."""
    if rule.softcap is not None or rule.sinks is not None:
        if mask is None:
            mask = _causal(query.shape[1], query.dtype, query.device)
        grouped, count = query.unflatten(0, (key.shape[0], -1)), max(1, _MAX_SCORES // (query.shape[0] * key.shape[1]))
        parts = zip(grouped.split(count, 2), mask.split(count), strict=True)
        attended = [_weigh(part, key.unsqueeze(1), value.unsqueeze(1), own_mask, rule) for part, own_mask in parts]
        return torch.cat(attended, 2).flatten(0, 1).transpose(0, 1)
    if mask is not None and _prefers_products(query, key):
        return _multiply(query, key, value, mask, rule.scaling)
    attended = scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=rule.scaling,
        enable_gqa=key.shape[0] != query.shape[0],
    )  # fmt: skip
    return attended[0].transpose(0, 1)


def _causal(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu_(1)


def _prefers_products(query: Tensor, key: Tensor) -> bool:
    """Tell whether two products are faster than the library's kernel: about three times for a bfloat16 chunk on a CPU.

    Products round scores to bfloat16, as the eager attention of every family does. False if the scores would take too
    much memory.
    """
    is_bf16_cpu = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    return is_bf16_cpu and query.shape[1] >= _MIN_ROWS and query.shape[0] * query.shape[1] * key.shape[1] <= _MAX_SCORES


def _multiply(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attend by two products, each over all queries that share a key: (h, t, d), (h_kv, s, d) to (t, h, d_v)."""
    num_heads, length, _ = query.shape
    grouped = (query * scaling).reshape(key.shape[0], -1, query.shape[2])
    scores = (grouped @ key.transpose(1, 2)).view(num_heads, length, -1).add_(mask)
    attended = scores.softmax(-1).view(*grouped.shape[:2], -1) @ value
    return attended.view(num_heads, length, -1).transpose(0, 1)


def _attend_group(group: _Group, layer: LayerCache, query: Tensor, rule: Rule) -> Tensor:
    """Attend with one query of each sequence, (h, n, d), to its visible rows; return (n, h, d_v)."""
    key, value = _read(layer, group.source)
    num_heads = key.shape[0]
    # The queries that share a key become rows of one query: (n, h_kv, h / h_kv, d).
    grouped = query.unflatten(0, (num_heads, -1)).permute(2, 0, 1, 3)
    key, value = (states.unflatten(1, (group.count, -1)).transpose(0, 1) for states in (key, value))
    if rule.softcap is None and rule.sinks is None:
        attended = scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask, scale=rule.scaling)
    else:
        attended = _weigh(grouped.unsqueeze(3), key.unsqueeze(2), value.unsqueeze(2), _wider(group.mask), rule)
    return attended.reshape(group.count, query.shape[0], -1)


def _wider(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.unsqueeze(1)


def _weigh(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attend with capped scores or sinks: (..., h_kv, g, t, d), (..., h_kv, 1, s, d) to (..., h_kv, g, t, d_v).

    Source: the eager attention of transformers' Gemma 2 (cap, then mask) and gpt-oss (sinks).
    """
    scores = (query @ key.transpose(-1, -2)).float() * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    if rule.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    sinks = rule.sinks.float().view(key.shape[-4], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(value.dtype) @ value


def _read(layer: LayerCache, source: _Source) -> tuple[Tensor, Tensor]:
    """Return keys and values (h_kv, rows, d)."""
    if source.blocks is None:
        return layer.rows_of_keys[source.rows].transpose(0, 1), layer.rows_of_values[source.rows].transpose(0, 1)
    found = (blocks.index_select(0, source.blocks).flatten(0, 1)[source.rows] for blocks in (layer.keys, layer.values))
    key, value = found
    return key.transpose(0, 1), value.transpose(0, 1)
