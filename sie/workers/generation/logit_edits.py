"""Edits a step's logits before the temperature: penalties, bias and forbidden tokens, for all draws together.

The numbers of all edits go to the device in one copy, and each kind of edit is launched once, however many draws have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.workers.device.device import move_together
from sie.workers.generation.masks import Hidden
from sie.workers.model_api import Draw

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.bool_)
_Places = NDArray[np.int64]
"""Entries (k,) of logits (n, vocabulary), counted over all rows."""


class _Edits(NamedTuple):
    """The edits of n rows of logits.

    seen (k,) are places with counts (k,) float32 of their tokens. penalties (3, n) float32 are the presence, frequency
    and repetition penalties of each row. biased (b,) are places with bias (b,) float32. forbidden (f,) are places.
    masks (n, bytes) uint8 have a bit for each hidden token, the lowest first; without a grammar they are empty. bits
    (256, 8) bool are those of each byte.
    """

    seen: _Places
    counts: NDArray[np.float32]
    penalties: NDArray[np.float32]
    biased: _Places
    bias: NDArray[np.float32]
    forbidden: _Places
    masks: NDArray[np.uint8]
    bits: NDArray[np.bool_]


def edit_logits(raw: Tensor, draws: Sequence[Draw], hidden: Sequence[Hidden]) -> Tensor:
    """Return the logits with penalties and bias, and -inf for forbidden tokens; raw itself if no draw has an edit.

    raw (n, vocabulary) float32; draws[i] is from row i. hidden has the masks of the draws with a matcher, in order.
    """
    vocab_size = raw.shape[1]
    packs = _packs(raw.device)
    rows = [row for row, draw in enumerate(draws) if draw.matcher is not None]
    by_row = {row: mask for row, mask in zip(rows, hidden, strict=True) if isinstance(mask, np.ndarray)}  # not an error
    edits = _collect(draws, by_row, vocab_size, packs=packs)
    if not by_row and not any(map(len, (edits.seen, edits.biased, edits.forbidden))):
        return raw
    scores = raw.clone(memory_format=torch.contiguous_format)
    flat = scores.view(-1)
    seen, counts, penalties, biased, bias, forbidden, masks, bits = move_together(edits, raw.device)
    if len(seen):
        _penalise(flat, seen, counts, penalties[:, seen // vocab_size])
    if len(biased):
        flat.index_add_(0, biased, bias)
    if len(forbidden):
        flat.index_fill_(0, forbidden, -torch.inf)
    if len(masks):
        is_hidden = bits.index_select(0, masks.flatten().int()).view(len(raw), -1)
        scores.masked_fill_(is_hidden[:, :vocab_size], -torch.inf)
    for row, mask in () if packs else by_row.items():
        scores[row].masked_fill_(torch.from_numpy(mask), -torch.inf)
    return scores


def _packs(device: torch.device) -> bool:
    """Whether grammars' masks go to the device as bits. On a CPU they are there, and packing costs more than it saves."""
    return device.type != "cpu"


def has_penalty(draw: Draw) -> bool:
    """Tell whether a draw has a penalty that changes logits."""
    sampling = draw.sampling
    return draw.seen is not None and (
        sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    )


def _collect(draws: Sequence[Draw], hidden: dict[int, NDArray[np.bool_]], vocab_size: int, *, packs: bool) -> _Edits:
    """Return all edits of a step; without packs those of grammars are left out. hidden has the masks by row."""
    seen, counts = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    biased: list[int] = []
    bias: list[float] = []
    forbidden: list[int] = []
    masks = np.zeros((len(draws) if hidden and packs else 0, -(-vocab_size // 8)), np.uint8)
    for row, draw in enumerate(draws):
        first = row * vocab_size
        if draw.seen is not None and has_penalty(draw):
            is_known = draw.seen.ids < vocab_size
            seen.append(draw.seen.ids[is_known].astype(np.int64) + first)
            counts.append(draw.seen.counts[is_known].astype(np.float32))
        for token_id, value in draw.sampling.logit_bias:
            if 0 <= token_id < vocab_size:
                biased.append(first + token_id)
                bias.append(value)
        if row not in hidden:
            forbidden += [first + token_id for token_id in draw.forbidden if token_id < vocab_size]
    for row, mask in hidden.items() if packs else ():
        masks[row] = np.packbits(mask, bitorder="little")
    return _Edits(
        np.concatenate(seen), np.concatenate(counts), _penalties(draws), np.array(biased, np.int64),
        np.array(bias, np.float32), np.array(forbidden, np.int64), masks, _BITS,
    )  # fmt: skip


def _penalties(draws: Sequence[Draw]) -> NDArray[np.float32]:
    kinds = [
        (draw.sampling.presence_penalty, draw.sampling.frequency_penalty, draw.sampling.repetition_penalty)
        for draw in draws
    ]
    return np.ascontiguousarray(np.array(kinds, np.float32).T)


def _penalise(flat: Tensor, seen: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Apply the presence, frequency and repetition penalties (3, k), in this order, to the tokens seen (k,)."""
    presence, frequency, factor = penalties
    values = flat[seen] - presence - frequency * counts
    flat[seen] = torch.where(values > 0, values / factor, values * factor)
