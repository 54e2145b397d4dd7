"""Computes the log probabilities of given tokens from the logits of the positions before them.

Source: OpenAI API reference, completions, `echo` beside `logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sie.values.errors import NonFinite
from sie.workers.device.device import move, read
from sie.workers.generation.prompt_scores import LEAST_LOGPROB
from sie.workers.model_api import Scored, Slot

_ROWS_AT_ONCE = 16
"""In float32, beside the logits themselves: 32 MiB for a vocabulary of 262,144."""


def kept_tokens(slot: Slot) -> Sequence[int]:
    """Return of which tokens of a slot the logits are wanted: those that judge the next one, and the last if it draws."""
    scored = slot.scored
    judging = () if scored is None else range(scored.first, scored.first + len(scored.targets))
    return (*judging, len(slot.token_ids) - 1) if slot.draws else judging


def drawing_rows(slots: Sequence[Slot]) -> list[int]:
    """Return which of the rows of logits that `kept_tokens` asks for are drawn from, one for each slot with draws."""
    rows: list[int] = []
    num_rows = 0
    for slot in slots:
        num_rows += len(kept_tokens(slot))
        if slot.draws:
            rows.append(num_rows - 1)
    return rows


def score(logits: Tensor, slots: Sequence[Slot]) -> None:
    """Write what slots want to know of given tokens to their `Scored`; logits (k, vocabulary) of what `kept_tokens` names.

    Raises NonFinite where they are not.
    """
    first = 0
    for slot in slots:
        if slot.scored is not None:
            for start in range(0, len(slot.scored.targets), _ROWS_AT_ONCE):
                end = min(start + _ROWS_AT_ONCE, len(slot.scored.targets))
                _score_rows(logits[first + start : first + end].float(), slot.scored, start, end)
        first += len(kept_tokens(slot))


def _score_rows(logits: Tensor, scored: Scored, start: int, end: int) -> None:
    """Score targets start to end - 1 by as many rows of logits (n, vocabulary)."""
    num_top = scored.top.shape[1]
    targets = move(torch.from_numpy(scored.targets[start:end].astype("int64")), logits.device)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.max(-1, keepdim=True) if num_top == 1 else logprobs.topk(num_top, dim=-1)
    # A float64 holds each id and each float32: one copy.
    rows = read(torch.cat([found.double() for found in (logprobs.gather(1, targets[:, None]), values, ids)], 1)).numpy()
    if np.isnan(rows[:, 0]).any():  # one value that is not finite makes all of its row so
        raise NonFinite("the model's logits are not finite")
    scored.own[start:end] = rows[:, 0].clip(LEAST_LOGPROB)
    scored.top[start:end] = rows[:, 1 : 1 + num_top].clip(LEAST_LOGPROB)
    scored.top_ids[start:end] = rows[:, 1 + num_top :]
