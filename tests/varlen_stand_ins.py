"""torch's flash attention as its versions declare it, on a CPU: stand-ins that take no argument that a version lacks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """As in torch 2.11: keys may have fewer heads, and nobody asks."""
    return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size)


def of_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """As in torch 2.13: keys with fewer heads must be announced."""
    assert seqused_k is block_table is num_splits is None
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size)


def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size):
    """Attend as both document it: the last query of a sequence is where its last key is."""
    assert return_aux is None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert type(max_q) is type(max_k) is int
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(cu_seq_k.diff().max()) <= max_k
    assert key.shape[2] == value.shape[2] == query.shape[2]
    assert query.shape[2] % 8 == 0
    left, right = window_size
    out = torch.empty_like(query)
    for (first, last), (first_key, last_key) in zip(
        pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True
    ):
        num_keys = last_key - first_key
        place = torch.arange(num_keys - (last - first), num_keys)[:, None]
        column = torch.arange(num_keys)
        seen = torch.ones(last - first, num_keys, dtype=torch.bool)
        if left >= 0:
            seen &= column >= place - left
        if right >= 0:
            seen &= column <= place + right
        own = (query[first:last], key[first_key:last_key], value[first_key:last_key])
        out[first:last] = scaled_dot_product_attention(
            *(states.transpose(0, 1)[None] for states in own), attn_mask=seen, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
    return out
