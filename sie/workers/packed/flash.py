"""Owns the call of torch's flash attention over packed sequences: a GPU in half precision, any torch from 2.11 on."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

MAX_WIDTH = 256
"""Of a head; it is a multiple of 8, and the same for keys and values."""


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    reach: tuple[int, int],
) -> Tensor:
    """Attend within each of n sequences: (h, t, d), (h_kv, s, d), h a multiple of h_kv, to (t, h, d).

    bounds (n + 1,) int32 are where the queries and the keys of each begin, longest the most of one. A query sees so many
    keys before and behind its own as reach says, -1 all. The last query of a sequence is at the place of its last key: that
    is how flash attention 2.1 and later align what differs in length.
    """
    from torch.nn.attention.varlen import varlen_attn

    arguments: dict[str, Any] = {"scale": scaling, "window_size": reach}
    if key.shape[0] != query.shape[0] and _asks_about_groups():
        arguments["enable_gqa"] = True
    query, key, value = (states.transpose(0, 1) for states in (query, key, value))
    attended = varlen_attn(query, key, value, *bounds, *longest, **arguments)
    assert isinstance(attended, Tensor)  # a pair only with return_aux
    return attended


def can_attend_flash(device: torch.device, dtype: torch.dtype, widths: tuple[int, int]) -> bool:
    """Tell whether it attends with keys and values of such widths."""
    is_half = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return is_half and widths[0] == widths[1] <= MAX_WIDTH and widths[0] % 8 == 0


@cache
def _asks_about_groups() -> bool:
    """Whether keys with fewer heads must be announced: torch 2.11 hands them on to the kernel, later ones ask first."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
