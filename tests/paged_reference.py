"""What the kernels of a decode step compute, written out in torch: their oracle, and their stand-in where there is no GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tables(NamedTuple):
    """As `sie.workers.generation.kernels.Tables`."""

    positions: torch.Tensor
    blocks: torch.Tensor


def write_rows(keys, values, rows, key, value):
    keys.index_copy_(0, rows, key.transpose(0, 1))
    values.index_copy_(0, rows, value.transpose(0, 1))


def attend_blocks(query, keys, values, tables, window, rule, out):
    for i, position in enumerate(tables.positions.tolist()):
        tokens = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
        blocks = tables.blocks[tokens // keys.shape[1], i].long()
        key, value = (states[blocks, tokens % keys.shape[1]].float().transpose(0, 1) for states in (keys, values))
        grouped = query[:, i].float().unflatten(0, (len(key), -1))
        scores = grouped @ key.transpose(1, 2) * rule.scaling
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.float().view(len(key), -1, 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[1]]
        out[i] = (weights @ value).flatten(0, 1)
