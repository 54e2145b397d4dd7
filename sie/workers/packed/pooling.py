"""Pools packed hidden states to one vector a sequence, in all modes of sentence-transformers.

Sums are float32, whatever the model's format. Source of all formulas: sentence_transformers 6.2
sentence_transformer/modules/pooling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sie.native.pooling import can_pool
from sie.native.pooling import pool_mean as run_pool_mean

Pool = Callable[[Tensor, Tensor], Tensor]


def pool(hidden: Tensor, cu_seqlens: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool each packed sequence in every mode and concatenate the vectors in the order of `modes`.

    hidden (t, d) any float, sequences back to back, none empty; cu_seqlens (n + 1,) int32, first 0, last t. Returns (n,
    d * len(modes)) float32, same device. Raises KeyError for an unknown mode.
    """
    vectors = [POOLINGS[mode](hidden, cu_seqlens) for mode in modes]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)


def pool_cls(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Take each sequence's first token; shapes as in `pool`."""
    return hidden.index_select(0, cu_seqlens[:-1]).float()


def pool_last_token(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Take each sequence's last token; shapes as in `pool`."""
    return hidden.index_select(0, cu_seqlens[1:] - 1).float()


def pool_max(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Take the largest value of each dimension; shapes as in `pool`."""
    return torch.segment_reduce(hidden.float(), "max", offsets=cu_seqlens, axis=0)


def pool_mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Take the mean; shapes as in `pool`. Source: Sentence-BERT, arXiv 1908.10084, section 3."""
    if _is_for_kernel(hidden) and cu_seqlens.dtype == torch.int32:
        return _pool_mean_compiled(hidden, cu_seqlens)
    return _sum(hidden.float(), cu_seqlens) / _lengths(cu_seqlens)


def pool_mean_sqrt_len(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Take the sum over the square root of the length; shapes as in `pool`."""
    return _sum(hidden.float(), cu_seqlens) / _lengths(cu_seqlens).sqrt()


def pool_weighted_mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Take the mean with weights 1, 2, 3, ... along the sequence; shapes as in `pool`.

    Source: SGPT, arXiv 2202.08904, section 3.
    """
    lengths = _lengths(cu_seqlens)
    starts = cu_seqlens.index_select(0, _sequence_of_token(cu_seqlens, hidden.shape[0]))
    weights = torch.arange(1, hidden.shape[0] + 1, device=hidden.device) - starts
    return _sum(hidden.float() * weights[:, None], cu_seqlens) / (lengths * (lengths + 1) / 2)


def _is_for_kernel(hidden: Tensor) -> bool:
    is_plain = (
        hidden.device.type == "cpu" and hidden.is_contiguous() and hidden.dtype in (torch.bfloat16, torch.float32)
    )
    return is_plain and can_pool(is_bf16=hidden.dtype == torch.bfloat16)


def _pool_mean_compiled(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Pool in one call: for a single text, launching torch's operations takes longer than their work."""
    num_sequences, width = len(cu_seqlens) - 1, hidden.shape[1]
    out = torch.empty(num_sequences, width)
    is_bf16 = hidden.dtype == torch.bfloat16
    run_pool_mean(hidden.data_ptr(), width, cu_seqlens.data_ptr(), num_sequences, out.data_ptr(), is_bf16=is_bf16)
    return out


def _sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    # index_add is five times faster than segment_reduce on a CPU. On a GPU its order is not fixed (docs/models.md), but
    # there segment_reduce adds the tokens of a text one after another.
    sums = values.new_zeros(len(cu_seqlens) - 1, values.shape[1])
    return sums.index_add_(0, _sequence_of_token(cu_seqlens, values.shape[0]), values)


def _sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return (t,): 0, 0, ..., 1, 1, ..."""
    numbers = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    # With output_size a GPU need not wait for the sum of the lengths.
    return numbers.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """Return (n, 1) float32."""
    return cu_seqlens.diff().float()[:, None]


POOLINGS: dict[str, Pool] = {
    "cls": pool_cls,
    "max": pool_max,
    "mean": pool_mean,
    "mean_sqrt_len_tokens": pool_mean_sqrt_len,
    "weightedmean": pool_weighted_mean,
    "lasttoken": pool_last_token,
}
