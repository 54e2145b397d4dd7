"""Attention over blocks on a GPU in half precision.

Decoding tokens read their blocks in place (`kernels`). Prefill chunks use torch's flash attention, after their visible
keys and values are gathered. `gathered` computes the cases that it does not support: capped scores, sinks, or different
widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.workers.device.device import is_ampere, move
from sie.workers.generation.gathered import GatheredStep
from sie.workers.generation.kernel_check import why_no_kernels
from sie.workers.generation.paged_cache import Rule
from sie.workers.generation.step_layout import StepLayout
from sie.workers.model_api import Slot
from sie.workers.packed.flash import attend_flash, can_attend_flash

if TYPE_CHECKING:
    from sie.workers.generation.kernels import Tables
    from sie.workers.generation.paged_cache import LayerCache

_MAX_WIDTH = 256


def can_attend(device: torch.device, dtype: torch.dtype, widths: set[int]) -> bool:
    """Tell whether the kernels run here, for keys and values of this format and these widths."""
    return not why_gathered(device, dtype, widths)


def why_gathered(device: torch.device, dtype: torch.dtype, widths: set[int]) -> str:
    """Return why the kernels do not run here, or an empty text if they do. Raises DeviceLostError."""
    if device.type != "cuda":
        return "the kernels are for GPUs"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels need 16 bits, and keys are in {dtype}"
    if max(widths) > _MAX_WIDTH:
        return f"a head is {max(widths)} wide, and the kernels' limit is {_MAX_WIDTH}"
    return why_no_kernels(device) if is_ampere(device) else "the GPU is older than Ampere"


def why_gathered_prompts(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], rule: Rule) -> str:
    """Return why flash attention does not compute a layer's prefill chunks, or an empty text if it does."""
    if rule.softcap is not None:
        return "its scores are capped"
    if rule.sinks is not None:
        return "its attention has sinks"
    if can_attend_flash(device, dtype, widths):
        return ""
    return f"flash attention does not take keys and values that are {widths[0]} and {widths[1]} wide"


class DecodeStep:
    """A step whose tokens read blocks one by one; a `StepAttention`. Its tensors may change after a graph capture."""

    def __init__(self, rows: Tensor, tables: Tables) -> None:
        """Take the rows (n,) int64 that store the tokens' keys and values, and the sequences' positions and blocks."""
        self._rows = rows
        self._tables = tables

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Store keys and values (h_kv, n, d) and attend with queries (h, n, d); return (n, h, d_v)."""
        from sie.workers.generation import kernels

        kernels.write_rows(layer.rows_of_keys, layer.rows_of_values, self._rows, key, value)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        kernels.attend_blocks(query, layer.keys, layer.values, self._tables, layer.window, rule, out)
        return out


class MixedStep:
    """A step of any layout; a `StepAttention`."""

    def __init__(self, layout: StepLayout, device: torch.device, dtype: torch.dtype) -> None:
        """Take the step's layout and the format of keys and values."""
        self._num_decodes = count = len(layout.decodes)
        rows = move(torch.from_numpy(layout.rows), device)
        self._decodes = None if not count else DecodeStep(rows[:count], _tables(layout, device))
        self._prompts = None if not layout.prompts else PromptStep(_only_prompts(layout), rows[count:], device, dtype)

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Store keys and values (h_kv, t, d) and attend with queries (h, t, d); return (t, h, d_v)."""
        parts = (self._decodes, slice(self._num_decodes)), (self._prompts, slice(self._num_decodes, None))
        found = [
            step.attend(layer, query[:, own], key[:, own], value[:, own], rule)
            for step, own in parts
            if step is not None
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


class _Seen(NamedTuple):
    """The visible rows (s,) of prefill chunks; None: only the step's own keys and values."""

    rows: Tensor | None
    bounds: Tensor
    longest: int


class PromptStep:
    """The prefill chunks of one step, one after another; a `StepAttention`."""

    def __init__(self, layout: StepLayout, rows: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Take a layout without sequences that decode, and its rows (t,) on the device."""
        self._layout = layout
        self._rows = rows
        self._device = device
        self._dtype = dtype
        lengths = [len(slot.token_ids) for slot in layout.prompts]
        self._bounds, self._longest = move(_cumulated(lengths), device), max(lengths)
        self._seen: dict[int | None, _Seen] = {}
        self._gathered: GatheredStep | None = None

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Store keys and values and attend, as `StepAttention.attend`."""
        if why_gathered_prompts(self._device, self._dtype, layer.widths, rule):
            if self._gathered is None:
                self._gathered = GatheredStep(self._layout, self._device, self._dtype)
            return self._gathered.attend(layer, query, key, value, rule)
        from sie.workers.generation import kernels

        kernels.write_rows(layer.rows_of_keys, layer.rows_of_values, self._rows, key, value)
        seen = self._seen.get(layer.window) or self._see(layer.window)
        if seen.rows is not None:
            key, value = (
                rows.index_select(0, seen.rows).transpose(0, 1) for rows in (layer.rows_of_keys, layer.rows_of_values)
            )
        return attend_flash(
            query, key, value, bounds=(self._bounds, seen.bounds), longest=(self._longest, seen.longest),
            scaling=rule.scaling, reach=(-1 if layer.window is None else layer.window - 1, 0),
        )  # fmt: skip

    def _see(self, window: int | None) -> _Seen:
        prompts, size = self._layout.prompts, self._layout.block_tokens
        if all(slot.start == 0 for slot in prompts):
            seen = _Seen(None, self._bounds, self._longest)
        else:
            parts = [_seen_rows(slot, size, window) for slot in prompts]
            rows = move(torch.from_numpy(np.concatenate(parts)), self._device)
            lengths = [len(part) for part in parts]
            seen = _Seen(rows, move(_cumulated(lengths), self._device), max(lengths))
        self._seen[window] = seen
        return seen


def _seen_rows(slot: Slot, block_tokens: int, window: int | None) -> NDArray[np.int64]:
    """Return the rows of all positions that a chunk's tokens see, up to its last token."""
    first = 0 if window is None else max(0, slot.start - window + 1)
    positions = np.arange(first, slot.start + len(slot.token_ids))
    blocks = np.array(slot.blocks[: positions[-1] // block_tokens + 1], np.int64)
    return blocks[positions // block_tokens] * block_tokens + positions % block_tokens


def _only_prompts(layout: StepLayout) -> StepLayout:
    count = len(layout.decodes)
    return layout._replace(
        token_ids=layout.token_ids[count:], positions=layout.positions[count:], rows=layout.rows[count:], decodes=()
    )


def _tables(layout: StepLayout, device: torch.device) -> Tables:
    from sie.workers.generation.kernels import Tables

    positions = layout.positions[: len(layout.decodes)]
    blocks = np.zeros((int(positions.max()) // layout.block_tokens + 1, len(positions)), np.int32)
    for column, slot in enumerate(layout.decodes):
        num_seen = slot.start // layout.block_tokens + 1
        blocks[:num_seen, column] = slot.blocks[:num_seen]
    return Tables(move(torch.from_numpy(positions), device), move(torch.from_numpy(blocks), device))


def _cumulated(lengths: Sequence[int]) -> Tensor:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    bounds[1:] = np.cumsum(lengths)
    return torch.from_numpy(bounds)
