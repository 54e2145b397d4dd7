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
    """Return a slot's tokens whose logits are needed: those that score the next token, and the last if it draws."""
    scored = slot.scored
    scoring = () if scored is None else range(scored.first, scored.first + len(scored.targets))
    return (*scoring, len(slot.token_ids) - 1) if slot.draws else scoring


def kept_rows(slots: Sequence[Slot], ends: Sequence[int]) -> list[int]:
    """Return the places of all `kept_tokens` in a step's row, where ends[i] is that of the i-th slot's last token."""
    return [
        end - len(slot.token_ids) + 1 + token
        for end, slot in zip(ends, slots, strict=True)
        for token in kept_tokens(slot)
    ]


def drawing_rows(slots: Sequence[Slot]) -> list[int]:
    """Return the indices, among the logit rows of all `kept_tokens`, to draw from: one for each slot with draws."""
    rows: list[int] = []
    num_rows = 0
    for slot in slots:
        num_rows += len(kept_tokens(slot))
        if slot.draws:
            rows.append(num_rows - 1)
    return rows


def score(logits: Tensor, slots: Sequence[Slot]) -> None:
    """Write the log probabilities of given tokens to the slots' `Scored`; logits (k, vocabulary) are of `kept_tokens`.

    Raises NonFinite if logits are not finite.
    """
    first = 0
    for slot in slots:
        if slot.scored is not None:
            for start in range(0, len(slot.scored.targets), _ROWS_AT_ONCE):
                end = min(start + _ROWS_AT_ONCE, len(slot.scored.targets))
                _score_rows(logits[first + start : first + end].float(), slot.scored, start, end)
        first += len(kept_tokens(slot))


def _score_rows(logits: Tensor, scored: Scored, start: int, end: int) -> None:
    """Score targets start to end - 1 with one row of logits (n, vocabulary) each."""
    num_top = scored.top.shape[1]
    targets = move(torch.from_numpy(scored.targets[start:end].astype("int64")), logits.device)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.max(-1, keepdim=True) if num_top == 1 else logprobs.topk(num_top, dim=-1)
    # A float64 holds every id and every float32, so one copy is enough.
    rows = read(torch.cat([found.double() for found in (logprobs.gather(1, targets[:, None]), values, ids)], 1)).numpy()
    if np.isnan(rows[:, 0]).any():  # one non-finite logit makes its whole row NaN
        raise NonFinite("the model's logits are not finite")
    scored.own[start:end] = rows[:, 0].clip(LEAST_LOGPROB)
    scored.top[start:end] = rows[:, 1 : 1 + num_top].clip(LEAST_LOGPROB)
    scored.top_ids[start:end] = rows[:, 1 + num_top :]
