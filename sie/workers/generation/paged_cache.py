"""Holds each layer's keys and values in blocks, and the blocks of all layers of a model."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sie.workers.device.device import move


class LayerForm(NamedTuple):
    """Shapes (heads, width) of a token's key and value in one layer, and its attention window; None: no limit."""

    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype
    window: int | None

    @property
    def token_bytes(self) -> int:
        """Memory of one token."""
        (key_heads, key_width), (value_heads, value_width) = self.key_shape, self.value_shape
        return (key_heads * key_width + value_heads * value_width) * self.dtype.itemsize


class StepAttention(Protocol):
    """Computes the attention of the running step."""

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Store keys and values (h_kv, t, d) and attend with queries (h, t, d); return (t, h, d_v)."""
        ...


class LayerCache:
    """One layer's keys and values, (blocks, block_tokens, heads, width)."""

    __slots__ = ("cache", "keys", "rows_of_keys", "rows_of_values", "values", "window")

    def __init__(self, cache: PagedCache, form: LayerForm) -> None:
        shape = (cache.num_blocks + 1, cache.block_tokens)
        self.cache = cache
        self.window = form.window
        self.keys = _zeros((*shape, *form.key_shape), form.dtype, cache.device)
        self.values = _zeros((*shape, *form.value_shape), form.dtype, cache.device)
        self.rows_of_keys = self.keys.flatten(0, 1)
        self.rows_of_values = self.values.flatten(0, 1)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a key head and a value head."""
        return self.keys.shape[3], self.values.shape[3]


class PagedCache:
    """The blocks of all layers of one model, and the step that runs on them."""

    def __init__(
        self, layers: Sequence[tuple[nn.Module, LayerForm]], num_blocks: int, block_tokens: int, device: torch.device
    ) -> None:
        """Give each layer's module its blocks: num_blocks and one spare block."""
        self.device = device
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dtype = layers[0][1].dtype
        self.step: StepAttention | None = None
        self.layers = [LayerCache(self, form) for _, form in layers]
        for (module, _), layer in zip(layers, self.layers, strict=True):
            setattr(module, _PLACE, layer)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to); no block may be both."""
        if pairs:
            source, target = move(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), self.device)
            for layer in self.layers:
                for blocks in (layer.keys, layer.values):
                    blocks.index_copy_(0, target, blocks[source])

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with 0."""
        if blocks:
            index = move(torch.tensor(blocks, dtype=torch.int64), self.device)
            for layer in self.layers:
                layer.keys.index_fill_(0, index, 0)
                layer.values.index_fill_(0, index, 0)


_PLACE = "_sie_paged"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the system claims their memory at the first write.

    `torch.zeros` writes all of it, and so does `calloc` where it finds memory that was used before.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    room = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype).view(shape)


class Rule(NamedTuple):
    """How scores become weights: scaled, softly capped, and with a sink (h,) that takes weight and has no value."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
