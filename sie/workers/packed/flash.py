"""Calls torch's flash attention over packed sequences: only on a GPU in half precision, with torch 2.11 or later."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sie.workers.device.device import is_ampere

MAX_WIDTH = 256
"""The largest head width; it must be a multiple of 8, and the same for keys and values."""


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

    bounds (n + 1,) int32 are the starts of each sequence's queries and keys; longest are their maximum lengths. reach
    is the number of keys that a query sees before and after its own position, -1 for all. The last query of a sequence
    is aligned with its last key, as flash attention 2.1 and later align different lengths.
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
    """Return whether `attend_flash` supports keys and values of these widths."""
    is_half = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return is_half and widths[0] == widths[1] <= MAX_WIDTH and widths[0] % 8 == 0 and is_ampere(device)


@cache
def _asks_about_groups() -> bool:
    """Whether keys with fewer heads must be announced: torch 2.11 passes them to the kernel, later versions check."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
