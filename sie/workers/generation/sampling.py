"""Turns a step's logits into tokens: penalties, bias, temperature, filters and the draw, in the order of `Sampling`.

All draws of a step run together on the device, with one copy from it and one wait for it. A nucleus of very many tokens
costs a second wait. The result of a draw depends only on its own logits and `Sampling`: its random number comes
from (seed, choice, position), and its code path never depends on other draws.
Source: the generation sheet, section 3.1 (the meaning of each field, and their order).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.native import draw as native_draw
from sie.values.errors import NonFinite, SieError
from sie.values.generate import Sampling, TokenLogprob
from sie.workers.device.device import move, read_later
from sie.workers.generation.logit_edits import edit_logits, has_penalty
from sie.workers.generation.masks import FindHidden, Hidden, find_hidden
from sie.workers.model_api import Chosen, Draw, Slot, SlotResult

_GREEDY_BELOW = 1e-7
"""Below this temperature, a draw takes the likeliest token."""
_NUM_CANDIDATES = 1024
"""The likeliest tokens, which nearly always include all that a draw keeps; if not, all its tokens are sorted."""
_NOT_FINITE = -1
"""Replaces a token when its logits are not finite."""
_FURTHER = -2
"""Replaces a token when the candidates do not include every token that the draw keeps."""
_MASK64 = (1 << 64) - 1

Drawn = Chosen | SieError
"""The token of a draw, or its own error: NonFinite, or BadRequest for a grammar that allows no token."""


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, determined by the arguments.

    Source: SplitMix64's finaliser, Steele, Lea and Flood 2014, over each argument in turn.
    """
    state = 0
    for value in (seed, choice, position):
        state = (state + (value & _MASK64) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def choose(
    logits: Tensor,
    rows: Sequence[int],
    draws: Sequence[Draw],
    best: Tensor | None = None,
    hidden: FindHidden | None = None,
) -> list[Drawn]:
    """Choose one token for each draw; draws[i] is from logits[rows[i]]. An error is the result of its own draw.

    logits (k, vocabulary), any float. best (k,): the result of `likeliest`, if already computed. hidden: returns the
    grammar masks, if their computation has started.
    """
    if all(_is_plain(draw) for draw in draws):
        found = read_later(likeliest(logits) if best is None else best)()
        return chosen_tokens(found.tolist(), rows)
    if _can_draw_compiled(logits):
        return _choose_compiled(logits, rows, draws, hidden)
    return _choose_by_torch(logits, rows, draws, hidden)


class Choosing(NamedTuple):
    """Draws that were launched. token_ids (n,) int64 are theirs on the device; a negative one is none.

    read waits for them, and returns them as `choose`, with None for a draw that only the host can finish.
    """

    token_ids: Tensor
    read: Callable[[], list[Drawn | None]]


def launch_choice(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], best: Tensor | None = None) -> Choosing:
    """Begin what `choose` does, without a wait for the device; no draw has a matcher.

    The logits may be overwritten as soon as this returns.
    """
    if all(_is_plain(draw) for draw in draws):
        token_ids = _rows_of(likeliest(logits) if best is None else best, rows)
        return Choosing(token_ids, _launch_read(logits, token_ids, draws))
    raw = _rows_of(logits, rows).float()
    token_ids = _first_drawn(edit_logits(raw, draws, ()), draws)
    return Choosing(token_ids, _launch_read(raw, token_ids, draws))


def chosen_tokens(found: Sequence[int], rows: Sequence[int]) -> list[Drawn]:
    """Return the token of each draw, NonFinite for -1; draws[i] is from row rows[i]."""
    return [_drawn_token(found[row]) for row in rows]


@overload
def by_slot(drawn: Sequence[Drawn], slots: Sequence[Slot]) -> Sequence[SlotResult]: ...


@overload
def by_slot(drawn: Sequence[Drawn | None], slots: Sequence[Slot]) -> Sequence[SlotResult | None]: ...


def by_slot(drawn: Sequence[Drawn | None], slots: Sequence[Slot]) -> Sequence[SlotResult | None]:
    """Return the tokens of each slot, its first error, or None if one has no token, from those of all draws in order."""
    rest = iter(drawn)
    return [_joined([next(rest) for _ in slot.draws]) for slot in slots]


def _joined(drawn: Sequence[Drawn | None]) -> SlotResult | None:
    chosen: list[Chosen] = []
    for one in drawn:
        if not isinstance(one, Chosen):
            return one
        chosen.append(one)
    return tuple(chosen)


def can_leave_out_logits(slots: Sequence[Slot]) -> bool:
    """Tell whether the likeliest allowed token of each slot is all that a step is asked for."""
    return all(
        slot.scored is None
        and all(
            _is_simple(draw) and is_greedy(draw.sampling) and draw.forbidden == slot.draws[0].forbidden
            for draw in slot.draws
        )
        for slot in slots
    )


def _choose_by_torch(
    logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], hidden: FindHidden | None
) -> list[Drawn]:
    raw = _rows_of(logits, rows).float()
    masks = hidden() if hidden is not None else find_hidden(draws, raw.shape[1])
    scores = edit_logits(raw, draws, masks)
    token_ids = _first_drawn(scores, draws)
    drawn = _launch_read(raw, token_ids, draws)()
    further = [i for i, one in enumerate(drawn) if one is None]
    if further:
        token_ids = _drawn(token_ids, scores, further, draws, _draw_sorted)
        drawn = _launch_read(raw, token_ids, draws)()
    return _with_errors([one for one in drawn if one is not None], draws, masks)


def _rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    return tensor if list(rows) == list(range(len(tensor))) else tensor[_to(rows, tensor.device)]


def _first_drawn(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the token of each row of scores (n, vocabulary) as (n,) int64; -1 if not finite, -2 as `_draw_filtered`."""
    token_ids = likeliest(scores)
    sampled = [i for i, draw in enumerate(draws) if not is_greedy(draw.sampling)]
    for is_filtered in (False, True):
        own = [i for i in sampled if _is_filtered(draws[i].sampling) == is_filtered]
        if own:
            token_ids = _drawn(token_ids, scores, own, draws, _draw_filtered if is_filtered else _draw_unfiltered)
    return token_ids


def likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row (k, vocabulary) as (k,) int64, the first of equals; -1 if not finite."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        numbers = logits.numpy()  # numpy finds the maximum in a tenth of the time
        places = numbers.argmax(1)
        return torch.from_numpy(np.where(np.isfinite(numbers[np.arange(len(places)), places]), places, _NOT_FINITE))
    best, token_ids = logits.max(-1)
    return token_ids.masked_fill_(~(best.abs() < torch.inf), _NOT_FINITE)


def _drawn_token(token_id: int, logprob: TokenLogprob | None = None) -> Drawn:
    if token_id == _NOT_FINITE:
        return NonFinite("the model's logits are not finite")
    return Chosen(token_id, logprob)


def _with_errors(drawn: list[Drawn], draws: Sequence[Draw], masks: Sequence[Hidden]) -> list[Drawn]:
    """Replace the tokens of draws whose grammar has failed."""
    by_grammar = iter(masks)
    for i, draw in enumerate(draws):
        if draw.matcher is not None and isinstance(mask := next(by_grammar), SieError):
            drawn[i] = mask
    return drawn


def _drawn(
    token_ids: Tensor, scores: Tensor, own: Sequence[int], draws: Sequence[Draw], draw: Callable[..., Tensor]
) -> Tensor:
    """Return token_ids (n,) with the tokens of own draws drawn, except for rows that are not finite."""
    index = _to(own, scores.device)
    found = draw(scores[index], [draws[i] for i in own])
    return token_ids.index_copy(0, index, torch.where(token_ids[index] == _NOT_FINITE, _NOT_FINITE, found))


def is_greedy(sampling: Sampling) -> bool:
    """Tell whether a draw takes the likeliest token, without a random number."""
    return sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1


def _is_plain(draw: Draw) -> bool:
    """Tell whether a draw needs only the likeliest token of the unchanged logits."""
    return is_greedy(draw.sampling) and not draw.forbidden and _is_simple(draw)


def _is_simple(draw: Draw) -> bool:
    """Tell whether a draw is from unchanged logits, except for forbidden tokens, and reports only its token."""
    return not draw.sampling.logit_bias and not has_penalty(draw) and draw.matcher is None and draw.logprobs is None


def _is_filtered(sampling: Sampling) -> bool:
    """Tell whether top_k or top_p removes tokens; min_p needs no order."""
    return sampling.top_k > 0 or 0 < sampling.top_p < 1


def _to(numbers: Sequence[int], device: torch.device) -> Tensor:
    return move(torch.tensor(numbers, dtype=torch.int64), device)


# --- compiled draws -------------------------------------------------------------------------------------------------


def _can_draw_compiled(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and native_draw.can_draw()


def _choose_compiled(
    logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], hidden: FindHidden | None
) -> list[Drawn]:
    """Choose like `choose`: the library draws what is simple, torch the rest."""
    simple = [i for i, draw in enumerate(draws) if _is_simple(draw)]
    others = [i for i, draw in enumerate(draws) if not _is_simple(draw)]
    chosen: dict[int, Drawn] = {}
    if simple:
        logits = logits.contiguous()
        forbidden = {i: np.array(draws[i].forbidden, np.int32) for i in simple}
        records = [_record(logits[rows[i]], draws[i], forbidden[i]) for i in simple]
        found = native_draw.draw_tokens(records, torch.get_num_threads())
        chosen.update(zip(simple, map(_drawn_token, found), strict=True))
    if others:
        found_others = _choose_by_torch(logits, [rows[i] for i in others], [draws[i] for i in others], hidden)
        chosen.update(zip(others, found_others, strict=True))
    return [chosen[i] for i in range(len(draws))]


def _record(row: Tensor, draw: Draw, forbidden: NDArray[np.int32]) -> native_draw.Draw:
    sampling = draw.sampling
    is_sampled = not is_greedy(sampling)
    return native_draw.Draw(
        logits=row.data_ptr(), hidden=forbidden.ctypes.data, num_hidden=len(forbidden), vocabulary=len(row),
        number=uniform(sampling.seed, draw.choice, draw.position) if is_sampled else 0.0,
        temperature=sampling.temperature if is_sampled else 1.0,
        top_p=sampling.top_p if is_sampled and 0 < sampling.top_p < 1 else 1.0,
        min_p=sampling.min_p if is_sampled and 0 < sampling.min_p < 1 else 0.0,
        top_k=sampling.top_k if is_sampled else 1,
    )  # fmt: skip


# --- the draw -------------------------------------------------------------------------------------------------------


def _probabilities(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    return (scores / _column([draw.sampling.temperature for draw in draws], scores.device)).softmax(-1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return move(torch.tensor(values, dtype=torch.float32), device)[:, None]


def _drop_unlikely(kept: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return probabilities with 0 for tokens below min_p times the largest."""
    least = [draw.sampling.min_p if 0 < draw.sampling.min_p < 1 else 0.0 for draw in draws]
    if not any(least):
        return kept
    return kept.masked_fill(kept < kept.amax(-1, keepdim=True) * _column(least, kept.device), 0)


def _draw_unfiltered(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    return _invert(_drop_unlikely(_probabilities(scores, draws), draws), draws)


def _draw_filtered(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw among the likeliest tokens, sorted by probability, then id; -2 if the draw may need other tokens too."""
    probabilities = _probabilities(scores, draws)
    vocab_size = scores.shape[1]
    width = min(max(_NUM_CANDIDATES, *(draw.sampling.top_k + 1 for draw in draws)), vocab_size)
    values, ids = _first_of_equals(*probabilities.topk(width, dim=-1))
    kept = _keep_likeliest(values, draws)
    chosen = ids.gather(1, _invert(_drop_unlikely(kept, draws), draws)[:, None])[:, 0]
    if width == vocab_size:
        return chosen
    # topk may leave out any of several equals: if a kept token ties with its last one, all tokens must be sorted.
    return chosen.masked_fill_(((kept > 0) & (kept <= values[:, -1:])).any(-1), _FURTHER)


def _draw_sorted(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw among all tokens."""
    values, ids = _probabilities(scores, draws).sort(dim=-1, descending=True, stable=True)
    weights = _drop_unlikely(_keep_likeliest(values, draws), draws)
    return ids.gather(1, _invert(weights, draws)[:, None])[:, 0]


def _first_of_equals(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of topk, (n, k) each, with equals in the order of their ids, which topk does not guarantee."""
    ids, order = ids.sort(dim=-1)
    values, places = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, places)


def _keep_likeliest(values: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return probabilities (n, k), best first, with 0 after each draw's top_k and nucleus."""
    top_p = [draw.sampling.top_p if 0 < draw.sampling.top_p < 1 else math.inf for draw in draws]
    top_k = [float(draw.sampling.top_k or math.inf) for draw in draws]
    before = values.cumsum(-1, dtype=torch.float64) - values
    places = torch.arange(values.shape[1], device=values.device)
    is_out = (places >= _column(top_k, values.device)) | (before >= _column(top_p, values.device))
    return values.masked_fill(is_out, 0)


def _invert(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the index in each row (n, v) of weights where the draw's number falls; its weight is never 0.

    For weights that are not finite, any valid index is returned: the error is raised after everything is launched.
    """
    numbers = [uniform(draw.sampling.seed, draw.choice, draw.position) for draw in draws]
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:].contiguous()
    target = move(torch.tensor(numbers, dtype=torch.float64), weights.device)[:, None] * total
    places = torch.searchsorted(sums, target, right=True)
    # Rounding may put a target at the total, after the last weight.
    last = torch.searchsorted(sums, total, right=False)
    return torch.minimum(places, last)[:, 0].clamp_(max=weights.shape[1] - 1)


# --- the copy to the host ---------------------------------------------------------------------------------------------


def _launch_read(raw: Tensor, token_ids: Tensor, draws: Sequence[Draw]) -> Callable[[], list[Drawn | None]]:
    """Begin to copy the tokens (n,) of draws, with the log probabilities that they ask for, from raw (n, vocabulary).

    The function waits for the copy. It returns None for a draw that needs all tokens sorted.
    """
    wanted = [i for i, draw in enumerate(draws) if draw.logprobs is not None]
    if not wanted:
        found = read_later(token_ids)
        return lambda: [None if token_id == _FURTHER else _drawn_token(token_id) for token_id in found().tolist()]
    width = min(max(draws[i].logprobs or 0 for i in wanted), raw.shape[1])
    own = token_ids if len(wanted) == len(draws) else token_ids[_to(wanted, raw.device)]
    logprobs = _rows_of(raw, wanted).log_softmax(-1)
    values, ids = logprobs.topk(width, dim=-1)
    # A float64 holds every id and every float32, so one copy is enough.
    table = torch.cat((logprobs.gather(1, own.clamp(min=0)[:, None]).double(), values.double(), ids.double()), 1)
    numbers = read_later(torch.cat((token_ids.double(), table.flatten())))

    def read() -> list[Drawn | None]:
        chosen, rows = numbers().tensor_split((len(draws),))
        found: dict[int, TokenLogprob] = {}
        for i, (logprob, *best) in zip(wanted, rows.view(len(wanted), 1 + 2 * width).tolist(), strict=True):
            top = zip(map(int, best[width:]), best[:width], strict=True)
            found[i] = TokenLogprob(logprob, tuple(top)[: draws[i].logprobs])
        return [
            None if token_id == _FURTHER else _drawn_token(int(token_id), found.get(i))
            for i, token_id in enumerate(chosen.tolist())
        ]

    return read
