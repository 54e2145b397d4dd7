"""Computes packed attention on a CPU in one call of the compiled kernel, not one library call for each run."""

from __future__ import annotations

import torch
from torch import Tensor

from sie.native.attention import AttentionCall, can_attend, run_attention, scratch_bytes

_FORMATS = (torch.float32, torch.bfloat16)


def can_attend_compiled(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend_compiled` supports these states (h, t, d)."""
    states = (query, key, value)
    return (
        all(each.device.type == "cpu" and each.dtype == query.dtype and each.stride(2) == 1 for each in states)
        and query.dtype in _FORMATS
        and value.shape[2] == query.shape[2]
        and can_attend(is_bf16=query.dtype == torch.bfloat16, width=query.shape[2])
    )


def attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor,
    longest: int,
    seen: Tensor | None,
    scale: float | None,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    """Attend within each sequence; return (t, h, d).

    query (h, t, d), key and value (h_kv, t, d), of any strides except the last; cu_seqlens (n + 1,) int32; seen (n,)
    int32 is the number of attended tokens of each sequence, None for all.
    """
    num_heads, num_tokens, width = query.shape
    out = query.new_empty(num_tokens, num_heads, width)
    num_threads = torch.get_num_threads()
    scratch = torch.empty(scratch_bytes(longest, width, num_threads), dtype=torch.uint8)
    call = AttentionCall(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
        query.stride(1), query.stride(0), key.stride(1), key.stride(0),
        value.stride(1), value.stride(0), out.stride(0), out.stride(1),
        cu_seqlens.data_ptr(), None if seen is None else seen.data_ptr(),
        len(cu_seqlens) - 1, num_heads, key.shape[0], width,
        width**-0.5 if scale is None else scale, is_causal, window or 0, num_threads, 0, None,
    )  # fmt: skip
    run_attention(call, scratch.data_ptr(), is_bf16=query.dtype == torch.bfloat16)
    return out
