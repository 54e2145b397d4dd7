"""Attends with a penalty for distance in place of positions (ALiBi), the same in both directions.

A head's logits lose its slope times the number of tokens between query and key. Source: arXiv 2108.12409, section 3;
symmetric in arXiv 2310.19923, section 3.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_MAX_BIAS_ELEMENTS: Final = 16 << 20


@lru_cache(maxsize=8)
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return (num_heads,) float32 slopes: powers of 2 ** (-8 / n), for n the largest power of two within num_heads.

    Heads after the n-th take every second slope of those for 2 n heads. Source: the paper's own code, get_slopes.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    between = [2.0 ** (-4.0 * (index + 1) / power) for index in range(0, 2 * power, 2)]
    return torch.tensor([*first, *between][:num_heads], device=device)


def attend_by_distance(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attend within each sequence of a batch (n, h, length, d); returns the same shape.

    mask, if given, is a bool that broadcasts to (n, h, length, length), True where attended. Long
    sequences are attended in parts of their queries, because the penalties of all would be gigabytes.
    """
    heads, length = query.shape[1], query.shape[2]
    rows = max(1, min(length, _MAX_BIAS_ELEMENTS // (heads * length)))
    slopes = alibi_slopes(heads, query.device)
    positions = torch.arange(length, device=query.device)
    parts: list[Tensor] = []
    for start in range(0, length, rows):
        here = slice(start, start + rows)
        distance = (positions[here, None] - positions).abs()
        bias = (-slopes[:, None, None] * distance).to(query.dtype)[None]
        if mask is not None:
            seen = mask[..., here, :] if mask.shape[-2] > 1 else mask
            bias = bias.masked_fill(~seen, -math.inf)
        parts.append(scaled_dot_product_attention(query[:, :, here], key, value, attn_mask=bias, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
