"""Owns attention over blocks on a GPU in half precision: one kernel that reads the blocks in place, by a table.

The kernel is the flash attention that torch carries; its pages hold a multiple of 256 tokens. What it does not compute
(capped scores, sinks) is gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sie.workers.generation.gathered import GatheredStep, Rule
from sie.workers.generation.layout import StepLayout

if TYPE_CHECKING:
    from sie.workers.generation.attention import LayerCache

PAGE_TOKENS = 256
"""Source: the check in flash attention 2's varlen forward, `page_block_size % 256 == 0`."""
_MAX_WIDTH = 256


def can_attend(device: torch.device, dtype: torch.dtype, widths: set[int]) -> bool:
    """Tell whether the kernel is there for keys and values of this format and these widths."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return len(widths) == 1 and max(widths) <= _MAX_WIDTH and torch.cuda.get_device_capability(device) >= (8, 0)


class VarlenStep:
    """One step on a GPU; a `StepAttention`."""

    def __init__(self, layout: StepLayout, device: torch.device, dtype: torch.dtype) -> None:
        """Take the step's layout and the format of keys and values."""
        self._layout = layout
        self._device = device
        self._dtype = dtype
        self._gathered: GatheredStep | None = None
        sequences = (*layout.decodes, *layout.prompts)
        lengths = np.array([len(slot.token_ids) for slot in sequences])
        seen = np.array([slot.start for slot in sequences]) + lengths
        counts = -(-seen // layout.block_tokens)
        table = np.full((len(sequences), int(counts.max())), layout.spare_block, np.int32)
        for row, slot, count in zip(table, sequences, counts, strict=True):
            row[:count] = slot.blocks[:count]
        self.tables = StepTables(
            rows=torch.from_numpy(layout.rows).to(device),
            cu_queries=_cumulated(lengths, device),
            cu_keys=_cumulated(seen, device),
            seen=torch.from_numpy(seen.astype(np.int32)).to(device),
            blocks=torch.from_numpy(table).to(device),
            longest_query=int(lengths.max()),
            longest_key=int(seen.max()),
        )

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Keep keys and values (h_kv, t, d) and attend with queries (h, t, d); return (t, h, d_v)."""
        if rule.softcap is not None or rule.sinks is not None:
            if self._gathered is None:
                self._gathered = GatheredStep(self._layout, self._device, self._dtype)
            return self._gathered.attend(layer, query, key, value, rule)
        return self.tables.attend(layer, query, key, value, rule)


class StepTables:
    """What the kernel reads of a step, all of it on the device, so that a recorded step can have its values exchanged."""

    def __init__(
        self,
        *,
        rows: Tensor,
        cu_queries: Tensor,
        cu_keys: Tensor,
        seen: Tensor,
        blocks: Tensor,
        longest_query: int,
        longest_key: int,
    ) -> None:
        """Take for n sequences and t tokens rows (t,) int64, cu_* (n + 1,), seen (n,) and blocks (n, m) int32."""
        self.rows = rows
        self.cu_queries = cu_queries
        self.cu_keys = cu_keys
        self.seen = seen
        self.blocks = blocks
        self._longest = longest_query, longest_key

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """As `StepAttention.attend`. Raises NotPageableError for capped scores and sinks."""
        from torch.nn.attention.varlen import varlen_attn

        from sie.workers.generation.attention import NotPageableError

        if rule.softcap is not None or rule.sinks is not None:
            raise NotPageableError("capped scores or sinks")
        layer.rows_of_keys.index_copy_(0, self.rows, key.transpose(0, 1))
        layer.rows_of_values.index_copy_(0, self.rows, value.transpose(0, 1))
        arguments: dict[str, Any] = {
            "scale": rule.scaling,
            "window_size": (-1 if layer.window is None else layer.window - 1, 0),
            "enable_gqa": query.shape[0] != key.shape[0],
            "seqused_k": self.seen,
            "block_table": self.blocks,
        }
        attended = varlen_attn(
            query.transpose(0, 1), layer.keys, layer.values, self.cu_queries, self.cu_keys, *self._longest, **arguments
        )
        assert isinstance(attended, Tensor)  # a pair only with return_aux
        return attended


def _cumulated(lengths: Any, device: torch.device) -> Tensor:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    bounds[1:] = np.cumsum(lengths)
    return torch.from_numpy(bounds).to(device)
