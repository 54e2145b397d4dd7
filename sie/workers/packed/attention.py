"""Provides the one attention function with which every transformers model runs packed.

Registered with `AttentionInterface`, it gets each layer's queries, keys and values as one row of t tokens, and keeps
sequences apart by the step's boundaries. No function may be registered with `AttentionMaskInterface`. For an unknown
name transformers builds no mask at all (masking_utils._preprocess_mask_arguments). A registered function that returns
None would still read the position ids in every step, and on a GPU synchronise.

The boundaries are passed beside the model, not through it, because some families drop keyword arguments. They are
thread-local, because a load probes its model in one thread while another runs the step loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sie.workers.packed.alibi import attend_by_distance
from sie.workers.packed.batch import Run
from sie.workers.packed.compiled_attention import attend_compiled, can_attend_compiled
from sie.workers.packed.flash import attend_flash, can_attend_flash

NAME = "sie_packed"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


class NotPackableError(Exception):
    """A layer needs a feature that packed attention does not compute; the model runs in rectangles instead."""


class AttentionRule(NamedTuple):
    """How one layer attends, as a forward pass showed; window None reaches the whole sequence."""

    module: torch.nn.Module
    num_heads: int
    num_key_heads: int
    head_width: int
    value_width: int
    scale: float
    is_causal: bool
    window: int | None


class Boundaries:
    """The sequence boundaries of the running step, on its device, and the number of attention calls.

    cu_seqlens (n + 1,) int32 on the device of the step; runs are empty if only the device knows the lengths. attended (n,), if given, is the number of attended tokens of
    each sequence (`sie.workers.packed.batch.PackedBatch`). Masks are built once a step, not once a layer.
    """

    def __init__(
        self, cu_seqlens: Tensor, runs: Sequence[Run], max_length: int, attended: Tensor | None = None
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.runs = runs
        self.max_length = max_length
        self.attended = attended
        self.num_calls = 0
        self.rules: list[AttentionRule] | None = None
        """Each call's rule, if a list was put here."""
        self._masks: dict[tuple[int, int, bool], Tensor] = {}
        self._run_masks: dict[tuple[int, int | None, bool], Tensor | None] = {}
        self._seen: tuple[Tensor, Tensor] | None = None

    def run_mask(self, run: Run, first: int, window: int | None, causal: bool) -> Tensor | None:
        """Return the bool mask of a run whose first sequence has number `first`, True where attended.

        Its shape is (length, length), or (count, 1, 1 or length, length) if some tokens are not attended. It is None if
        all are.
        """
        band = self.band_mask(run.length, window, causal) if window is not None and window < run.length else None
        if self.attended is None:
            return band
        key = (first, window, causal)
        if key not in self._run_masks:
            self._run_masks[key] = self._seen_mask(run, first, causal, band)
        return self._run_masks[key]

    def _seen_mask(self, run: Run, first: int, causal: bool, band: Tensor | None) -> Tensor | None:
        assert self.attended is not None
        columns = torch.arange(run.length, device=self.attended.device)
        seen = columns < self.attended[first : first + run.count, None]
        if band is None and causal:
            band = self.band_mask(run.length, run.length, causal=True)
        seen = seen[:, None, None, :]
        return seen if band is None else seen & band

    def seen_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the indices of the attended tokens, and their bounds (n + 1,) int32 for each sequence."""
        assert self.attended is not None
        if self._seen is None:
            starts = self.cu_seqlens[:-1].repeat_interleave(self.cu_seqlens.diff())
            position = torch.arange(int(self.cu_seqlens[-1]), device=self.cu_seqlens.device) - starts
            limit = self.attended.repeat_interleave(self.cu_seqlens.diff())
            bounds = torch.zeros_like(self.cu_seqlens)
            bounds[1:] = self.attended.cumsum(0)
            self._seen = ((position < limit).nonzero()[:, 0], bounds)
        return self._seen

    def band_mask(self, length: int, window: int, causal: bool) -> Tensor:
        """Return the (length, length) bool mask of the tokens closer than window, True where attended."""
        key = (length, window, causal)
        if key not in self._masks:
            ones = torch.ones(length, length, dtype=torch.bool, device=self.cu_seqlens.device)
            self._masks[key] = ones.tril(0 if causal else window - 1).triu(1 - window)
        return self._masks[key]


class _Rule(NamedTuple):
    """The attention rule of one layer within a sequence; window None reaches the whole sequence."""

    scaling: float | None
    causal: bool
    window: int | None
    by_distance: bool = False
    """Whether distance lowers the logits; see `sie.workers.packed.alibi`."""


_running = threading.local()


@contextmanager
def packed_step(boundaries: Boundaries) -> Iterator[Boundaries]:
    """Set the sequence boundaries of this thread's forward passes."""
    _running.boundaries = boundaries
    try:
        yield boundaries
    finally:
        _running.boundaries = None


def register() -> None:
    """Register the function with transformers as `sie_packed`. A second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of the running step.

    query (1, h, t, d), key and value (1, h_kv, t, d), h a multiple of h_kv. Returns (1, t, h, d). With sliding_window,
    a token attends to tokens less than that many positions away, before it or on both sides. Source: transformers 5.23
    modeling_flash_attention_utils._process_flash_attention_kwargs for the meaning of the values.
    """
    boundaries: Boundaries | None = getattr(_running, "boundaries", None)
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if boundaries is None or attention_mask is not None or unsupported or query.shape[0] != 1:
        raise NotPackableError(", ".join(unsupported) or "not a packed step")
    boundaries.num_calls += 1
    reaches_all = sliding_window is None or sliding_window >= boundaries.max_length
    by_distance = getattr(module, "is_alibi", False)
    rule = _Rule(scaling, _is_causal(module, is_causal), None if reaches_all else sliding_window, by_distance)
    if boundaries.rules is not None:
        if by_distance:
            raise NotPackableError("logits that distance lowers have no compiled form")
        width = query.shape[3]
        scale = width**-0.5 if scaling is None else scaling
        shape = (query.shape[1], key.shape[1], width, value.shape[3])
        boundaries.rules.append(AttentionRule(module, *shape, scale, rule.causal, sliding_window))
    # With fewer keys than queries the kernel would align windows and causality to the wrong end.
    is_plain = boundaries.attended is None or not (rule.causal or rule.window)
    if by_distance:
        attended = _attend_runs(query[0], key[0], value[0], boundaries, rule)
    elif query.is_cuda and is_plain and can_attend_flash(query.device, query.dtype, (key.shape[3], value.shape[3])):
        attended = _attend_varlen(query[0], key[0], value[0], boundaries, rule)
    elif can_attend_compiled(query[0], key[0], value[0]):
        attended = attend_compiled(
            query[0],
            key[0],
            value[0],
            cu_seqlens=boundaries.cu_seqlens,
            longest=boundaries.max_length,
            seen=boundaries.attended,
            scale=rule.scaling,
            is_causal=rule.causal,
            window=rule.window,
        )
    else:
        attended = _attend_runs(query[0], key[0], value[0], boundaries, rule)
    return attended.unsqueeze(0), None


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Decide as the library does: by the argument, else a "bidirectional" config, else the layer's attribute."""
    if is_causal is not None:
        return is_causal
    if getattr(getattr(module, "config", None), "is_causal", None) is False:
        return False
    return bool(getattr(module, "is_causal", True))


def _attend_runs(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, rule: _Rule) -> Tensor:
    """Attend run by run: sequences of one length already form a rectangle. Takes (h, t, d), returns (t, h, d)."""
    if not boundaries.runs:
        raise NotPackableError("attention runs by length, and the device alone knows the lengths of a captured step")
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    grouped = key.shape[0] != query.shape[0]
    first = 0
    for run in boundaries.runs:
        start, count, length = run
        mask = boundaries.run_mask(run, first, rule.window, rule.causal)
        first += count
        tokens = slice(start, start + count * length)
        q, k, v = (_rectangle(states, tokens, count) for states in (query, key, value))
        if rule.by_distance:
            part = attend_by_distance(q, k, v, mask, rule.scaling)
        else:
            is_causal = rule.causal and mask is None
            part = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=rule.scaling, enable_gqa=grouped
            )
        out[tokens].unflatten(0, (count, length)).copy_(part.transpose(1, 2))
    return out


def _rectangle(states: Tensor, tokens: slice, count: int) -> Tensor:
    """Return a run's part of states (h, t, d) as (count, h, length, d)."""
    return states[:, tokens].unflatten(1, (count, -1)).transpose(0, 1)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, rule: _Rule) -> Tensor:
    """Attend in one kernel (CUDA, half precision only). Takes (h, t, d), returns (t, h, d)."""
    reach = -1 if rule.window is None else rule.window - 1
    bounds = key_bounds = boundaries.cu_seqlens
    if boundaries.attended is not None:
        seen, key_bounds = boundaries.seen_tokens()
        key, value = key[:, seen], value[:, seen]
    return attend_flash(
        query, key, value, bounds=(bounds, key_bounds), longest=(boundaries.max_length, boundaries.max_length),
        scaling=rule.scaling, reach=(reach, 0 if rule.causal else reach),
    )  # fmt: skip
