"""Runs the steps of a T5: its encoder reads whole prompts, its decoder keeps keys and values in blocks.

A sequence is its prompt, the token that starts each answer, and the answer. In the blocks, the rows of the prompt hold
the keys and values of cross attention, and the rows behind them those of the decoder's own tokens: both have one shape.
So the planner counts, copies and frees both at once.
Source: transformers 5.23 modeling_t5.py and modeling_mt5.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sie.workers.device.device import move
from sie.workers.generation.paged_cache import LayerCache, PagedCache
from sie.workers.generation.sampling import likeliest
from sie.workers.model_api import Slot


class _Group(NamedTuple):
    """n sequences with q tokens each, which are consecutive in the step.

    They see the rows prompt (n, s) and own (n, m), padded with the spare row. prompt_bias (n, 1, 1, s) is 0 for a row,
    else -inf. distances (n, q, m) are those from each token to its own rows; it does not see those with a positive one.
    """

    tokens: slice
    prompt: Tensor
    prompt_bias: Tensor
    own: Tensor
    distances: Tensor


class _Step(NamedTuple):
    """The t tokens of a decoder's step: their ids and rows (t,), the groups in order, and the last of each slot."""

    ids: Tensor
    rows: Tensor
    groups: list[_Group]
    ends: Tensor


class EncoderDecoder:
    """Computes the logits of steps for a `TextGenerator`; see `runner.StepDecoder`."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        """Take a T5ForConditionalGeneration or MT5ForConditionalGeneration, and blocks for the layers of its decoder."""
        self._model = model
        self._cache = cache
        self._layers: list[tuple[Any, LayerCache]] = list(zip(model.decoder.block, cache.layers, strict=True))
        self._spare_row = cache.num_blocks * cache.block_tokens
        self._scale = model.config.d_model**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0

    def run(self, slots: Sequence[Slot]) -> Tensor:
        """Return the logits (k, vocabulary) after the last token of each slot with draws.

        A slot that starts at 0 has its whole prompt. One without draws needs nothing, and nothing is done for it.
        """
        slots = [slot for slot in slots if slot.draws]
        if not slots:
            return torch.empty(0, self._model.config.vocab_size)
        new = [slot for slot in slots if not slot.start]
        for places in alike([_num_encoded(slot) for slot in new]):
            self._encode([new[place] for place in places])
        step = self._lay_out(slots)
        hidden = self._model.decoder.embed_tokens(step.ids)
        biases: list[Tensor] = []
        for block, layer in self._layers:
            attention = block.layer[0].SelfAttention
            if attention.has_relative_attention_bias:  # the first layer's, which is that of all
                biases = [_bias(attention, group) for group in step.groups]
            hidden = _bounded(hidden + self._attend_own(block.layer[0], layer, hidden, step, biases))
            hidden = _bounded(hidden + self._attend_prompt(block.layer[1], layer, hidden, step))
            hidden = _bounded(block.layer[2](hidden))
        hidden = self._model.decoder.final_layer_norm(hidden[step.ends])
        return self._model.lm_head(hidden * self._scale)

    def likeliest(self, slots: Sequence[Slot]) -> Tensor:
        """Return the likeliest token (k,) of each slot with draws that its first draw allows; -1 if not finite."""
        logits = self.run(slots)
        for row, slot in zip(logits, [slot for slot in slots if slot.draws], strict=True):
            row[list(slot.draws[0].forbidden)] = -torch.inf
        return likeliest(logits)

    def _encode(self, slots: Sequence[Slot]) -> None:
        """Write the keys and values of prompts that the decoder attends to."""
        device = self._cache.device
        lengths = [_num_encoded(slot) for slot in slots]
        ids = np.zeros((len(slots), max(lengths)), np.int64)
        for row, slot, length in zip(ids, slots, lengths, strict=True):
            row[:length] = slot.token_ids[:length]
        is_token = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        mask = move(torch.from_numpy(is_token), device)
        padding = None if is_token.all() else mask.long()
        found = self._model.encoder(input_ids=move(torch.from_numpy(ids), device), attention_mask=padding)
        hidden = found.last_hidden_state[mask]
        rows = self._rows([(slot, 0, length) for slot, length in zip(slots, lengths, strict=True)])
        for block, layer in self._layers:
            attention = block.layer[1].EncDecAttention
            layer.rows_of_keys.index_copy_(0, rows, _heads(attention.k(hidden), layer))
            layer.rows_of_values.index_copy_(0, rows, _heads(attention.v(hidden), layer))

    def _rows(self, spans: Sequence[tuple[Slot, int, int]]) -> Tensor:
        """Return the rows of positions in slots, from the first to before the last, as one tensor."""
        return move(torch.from_numpy(np.concatenate([self._span(*span) for span in spans])), self._cache.device)

    def _span(self, slot: Slot, first: int, last: int) -> NDArray[np.int64]:
        positions = np.arange(first, last)
        size = self._cache.block_tokens
        return np.asarray(slot.blocks, np.int64)[positions // size] * size + positions % size

    def _lay_out(self, slots: Sequence[Slot]) -> _Step:
        """Return the decoder's tokens of a step. A sequence that is read again has several, and is in a group alone."""
        firsts = [max(slot.start, _num_encoded(slot)) for slot in slots]
        lasts = [slot.start + len(slot.token_ids) for slot in slots]
        single = [i for i in range(len(slots)) if lasts[i] - firsts[i] == 1]
        others = [[i] for i in range(len(slots)) if lasts[i] - firsts[i] > 1]
        places = [[single[place] for place in run] for run in alike([lasts[i] for i in single])] + others
        order = [i for run in places for i in run]
        groups: list[_Group] = []
        num_tokens = 0
        for run in places:
            count = sum(lasts[i] - firsts[i] for i in run)
            groups.append(self._group([(slots[i], firsts[i], lasts[i]) for i in run], num_tokens, count))
            num_tokens += count
        ends = np.empty(len(slots), np.int64)
        ends[order] = np.cumsum([lasts[i] - firsts[i] for i in order]) - 1
        ids = np.concatenate([slots[i].token_ids[firsts[i] - slots[i].start :] for i in order]).astype(np.int64)
        rows = self._rows([(slots[i], firsts[i], lasts[i]) for i in order])
        device = self._cache.device
        return _Step(move(torch.from_numpy(ids), device), rows, groups, move(torch.from_numpy(ends), device))

    def _group(self, spans: Sequence[tuple[Slot, int, int]], first: int, count: int) -> _Group:
        num_encoded = np.array([_num_encoded(slot) for slot, _, _ in spans])
        last = np.array([last for _, _, last in spans])
        places = last[:, None] + np.arange(-count // len(spans), 0) - num_encoded[:, None]
        distances = np.arange(int((last - num_encoded).max())) - places[:, :, None]
        prompt = self._table([self._span(slot, 0, _num_encoded(slot)) for slot, _, _ in spans])
        bias = torch.zeros(prompt.shape, dtype=self._cache.dtype, device=prompt.device)
        return _Group(
            slice(first, first + count),
            prompt,
            bias.masked_fill_(prompt == self._spare_row, -torch.inf)[:, None, None],
            self._table([self._span(slot, _num_encoded(slot), last) for slot, _, last in spans]),
            move(torch.from_numpy(distances), self._cache.device),
        )

    def _table(self, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        table = np.full((len(rows), max(map(len, rows))), self._spare_row, np.int64)
        for padded, own in zip(table, rows, strict=True):
            padded[: len(own)] = own
        return move(torch.from_numpy(table), self._cache.device)

    def _attend_own(self, part: Any, layer: LayerCache, hidden: Tensor, step: _Step, biases: list[Tensor]) -> Tensor:
        """Return what self-attention adds (t, d). Stores the keys and values of the step's tokens first."""
        states, attention = part.layer_norm(hidden), part.SelfAttention
        layer.rows_of_keys.index_copy_(0, step.rows, _heads(attention.k(states), layer))
        layer.rows_of_values.index_copy_(0, step.rows, _heads(attention.v(states), layer))
        query = _heads(attention.q(states), layer)
        found = [
            _attend(layer, query[group.tokens], group.own, bias)
            for group, bias in zip(step.groups, biases, strict=True)
        ]
        return attention.o(torch.cat(found))

    def _attend_prompt(self, part: Any, layer: LayerCache, hidden: Tensor, step: _Step) -> Tensor:
        """Return what cross attention adds (t, d)."""
        attention = part.EncDecAttention
        query = _heads(attention.q(part.layer_norm(hidden)), layer)
        found = [_attend(layer, query[group.tokens], group.prompt, group.prompt_bias) for group in step.groups]
        return attention.o(torch.cat(found))


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of the lengths in groups, in which the longest is at most twice the shortest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[index] <= 2 * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _num_encoded(slot: Slot) -> int:
    """Return the number of tokens that the encoder reads: the prompt without the token that starts the answer."""
    return slot.draws[0].num_prompt - 1


def _heads(states: Tensor, layer: LayerCache) -> Tensor:
    return states.unflatten(-1, (-1, layer.widths[0]))


def _bias(attention: Any, group: _Group) -> Tensor:
    """Return what is added to the scores (n, h, q, m): the weights of distances, and -inf for hidden rows."""
    buckets = attention._relative_position_bucket(
        group.distances, bidirectional=False, num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )  # fmt: skip
    weights = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
    return weights.masked_fill(group.distances[:, None] > 0, -torch.inf)


def _attend(layer: LayerCache, query: Tensor, seen: Tensor, bias: Tensor) -> Tensor:
    """Return the values (n * q, h * d) that queries (n * q, h, d) find in the rows (n, s) that they see."""
    count = len(seen)
    key, value = (
        rows.index_select(0, seen.flatten()).unflatten(0, (count, -1)).transpose(1, 2)
        for rows in (layer.rows_of_keys, layer.rows_of_values)
    )
    queries = query.unflatten(0, (count, -1)).transpose(1, 2)
    found = functional.scaled_dot_product_attention(queries, key, value, attn_mask=bias, scale=1.0)
    return found.transpose(1, 2).flatten(2).flatten(0, 1)


def _bounded(hidden: Tensor) -> Tensor:
    """Return hidden states within the range of float16, as the library does."""
    if hidden.dtype != torch.float16:
        return hidden
    most = torch.finfo(torch.float16).max - 1000
    return hidden.clamp(-most, most)
