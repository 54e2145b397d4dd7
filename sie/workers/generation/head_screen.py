"""A copy of an output head in eight bits, with which the likeliest token is looked for (`src/screen.h`, decision 090)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.native.decoder import Screen
from sie.native.encoder import empty_aligned
from sie.native.linear import TILE_OUTPUTS, WeightFormat, packed_bytes, unpack_bf16
from sie.workers.device.cores import on_all_cores
from sie.workers.generation.packed_weights import PackedLinear
from sie.workers.prepared import session

_CHUNK_TILES = 64
_QUAD = 4
_KEPT = 16
"""Pairs of inputs that keep bfloat16: `kScreenKept` in `src/decoder.h`."""
_PADDED_INPUTS = 64
_SAMPLED_CHUNKS = 8
_ROUNDING = 1e-4
"""Far more than what float32 rounds when sums of bytes are scaled, relative to both lengths."""
_LARGEST = float(np.finfo(np.float32).max)


class HeadScreen:
    """The rounded weights of a head, and for each output bounds of what rounding changes."""

    def __init__(self, head: PackedLinear, sample: Tensor) -> None:
        """Round a head in bfloat16 that has no bias. sample is some of its input, (rows, inputs)."""
        layout = _Layout(head.out_features, head.in_features)
        make = partial(_make, head, sample.float(), layout)
        self._bytes = session.array("screen", make, f"{layout.outputs} x {layout.inputs} rounded")
        _, kept, scales, of_outputs, of_pairs = layout.views(self._bytes)
        addresses = (row.ctypes.data for row in (kept, scales, *of_outputs, *of_pairs))
        self.record = Screen(self._bytes.ctypes.data, *addresses)
        """In the kernels' form; the addresses are valid as long as this object."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self._bytes.nbytes


class _Views(NamedTuple):
    """words is (tiles, quads and kept pairs, 16); input_scales are padded with zeros; the others have rows of `SieScreen`."""

    words: NDArray[np.int32]
    kept: NDArray[np.int32]
    input_scales: NDArray[np.float32]
    of_outputs: NDArray[np.float32]
    of_pairs: NDArray[np.float32]


class _Layout:
    """Places of the arrays of `SieScreen` in one array of bytes."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.tiles = -(-outputs // (2 * TILE_OUTPUTS)) * 2
        self.quads = -(-inputs // _PADDED_INPUTS) * _PADDED_INPUTS // _QUAD
        self._words = self.tiles * (self.quads + _KEPT) * TILE_OUTPUTS
        self.nbytes = 4 * (
            self._words + _KEPT + self.quads * _QUAD + 2 * self.tiles * TILE_OUTPUTS + 3 * self.tiles // 2
        )

    def views(self, whole: NDArray[np.uint8]) -> _Views:
        """Return the parts of an array of `nbytes` bytes."""
        inputs, outputs = self.quads * _QUAD, self.tiles * TILE_OUTPUTS
        words, kept, floats = np.split(whole.view(np.int32), (self._words, self._words + _KEPT))
        scales, of_outputs, of_pairs = np.split(floats.view(np.float32), (inputs, inputs + 2 * outputs))
        shape = self.tiles, self.quads + _KEPT, TILE_OUTPUTS
        return _Views(words.reshape(shape), kept, scales, of_outputs.reshape(2, -1), of_pairs.reshape(3, -1))


def _make(head: PackedLinear, sample: Tensor, layout: _Layout) -> NDArray[np.uint8]:
    whole = empty_aligned(layout.nbytes)
    words, kept, input_scales, of_outputs, of_pairs = layout.views(whole)
    tiles = -(-layout.outputs // TILE_OUTPUTS)
    chunks = range(0, tiles, _CHUNK_TILES)
    words[tiles:], of_outputs[:, tiles * TILE_OUTPUTS :] = 0, 0
    # Any scales give true bounds. Those of the head's columns give close ones, and a part of its rows shows them.
    some = torch.cat([_weights(head, first) for first in chunks[:: max(1, len(chunks) // _SAMPLED_CHUNKS)]])
    scales = some.square().mean(0).sqrt()
    scales = torch.where(scales > 0, scales, 1.0).nan_to_num(1.0, 1.0)
    sizes = (sample * scales).square().sum(0).nan_to_num(0, 0).view(-1, 2).sum(1)
    kept[:] = sizes.topk(_KEPT).indices
    is_rounded = torch.ones_like(scales).view(-1, 2).index_fill_(0, torch.from_numpy(kept).long(), 0).view(-1)
    input_scales[:] = 0
    input_scales[: layout.inputs] = scales * is_rounded

    def pack(first_tile: int) -> None:
        weights = _weights(head, first_tile)
        rounded, found = _round(weights, scales, is_rounded)
        count, first = len(weights) // TILE_OUTPUTS, first_tile * TILE_OUTPUTS
        padded = np.pad(rounded, ((0, 0), (0, layout.quads * _QUAD - layout.inputs)))
        own = weights.bfloat16().view(torch.int32).numpy()[:, kept]
        split = np.concatenate((padded.view(np.int32), own), 1).reshape(count, TILE_OUTPUTS, -1)
        words[first_tile : first_tile + count] = split.transpose(0, 2, 1)
        of_outputs[:, first : first + len(weights)] = found[:2]
        bounds = np.pad(found[2:], ((0, 0), (0, -len(weights) % (2 * TILE_OUTPUTS)))).reshape(3, -1, 2 * TILE_OUTPUTS)
        of_pairs[:, first_tile // 2 : first_tile // 2 + bounds.shape[1]] = bounds.max(2)

    on_all_cores(pack, chunks)
    return whole


def _weights(head: PackedLinear, first_tile: int) -> Tensor:
    """Return a chunk of a head's weights, (outputs in whole tiles, inputs) float32."""
    tile_bytes = packed_bytes(1, head.in_features, WeightFormat.BF16)
    chunk = head.packed[first_tile * tile_bytes : (first_tile + _CHUNK_TILES) * tile_bytes]
    return torch.from_numpy(unpack_bf16(chunk, head.in_features)).view(torch.bfloat16).float()


def _round(weights: Tensor, scales: Tensor, is_rounded: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the numbers of weights (outputs, inputs), and for each output the five arrays of `SieScreen` from `scales` on."""
    scaled = weights / scales * is_rounded
    steps = (scaled.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (scaled / steps).round_().nan_to_num_(0, 0, 0).clamp_(-127, 127)
    sums = numbers.sum(1) * steps[:, 0]
    lengths = 1.001 * numbers.norm(dim=1) * steps[:, 0]
    off = scaled.addcmul_(numbers, steps, value=-1).norm(dim=1)
    rows = torch.stack((steps[:, 0], sums, 1.001 * off + _ROUNDING * lengths, lengths, 1.001 * weights.norm(dim=1)))
    rows[:2] = rows[:2].nan_to_num(0, 0, 0)
    return numbers.to(torch.int8).numpy(), rows.nan_to_num(_LARGEST, _LARGEST).numpy()
