"""Computes the decoder of BART or MBART for one token of each sequence, with keys and values kept between calls.

The sequences of a batch have different lengths, and each attends to the hidden states of an encoder of its own.
Source: transformers 5.23 modeling_bart.py and modeling_mbart.py, which differ in the place of the norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_FIRST_CAPACITY: Final = 32


class Memory:
    """The keys and values of n sequences: those of their own tokens, and those of their encoders' hidden states.

    own: for each layer keys and values (2, n, heads, capacity, width). Each sequence has filled as many places as it
    has tokens. seen: for each layer keys and values (2, n, heads, s, width). num_seen (n,) says how many of the s count.
    """

    def __init__(self, own: list[Tensor], seen: list[Tensor], num_seen: Tensor) -> None:
        self.own = own
        self.seen = seen
        self.num_seen = num_seen
        self._update_mask()

    def keep(self, places: list[int]) -> None:
        """Drop all sequences but those at these places, which keep this order."""
        chosen = torch.tensor(places, device=self.num_seen.device)
        self.own = [kept.index_select(1, chosen) for kept in self.own]
        self.seen = [kept.index_select(1, chosen) for kept in self.seen]
        self.num_seen = self.num_seen.index_select(0, chosen)
        self._update_mask()

    def append(self, other: Memory) -> None:
        """Add the sequences of another memory behind its own."""
        self.own = [_join(*both) for both in zip(self.own, other.own, strict=True)]
        self.seen = [_join(*both) for both in zip(self.seen, other.seen, strict=True)]
        self.num_seen = torch.cat([self.num_seen, other.num_seen])
        self._update_mask()

    def grow(self, capacity: int) -> None:
        """Make room for capacity tokens of each sequence."""
        if self.own[0].shape[3] < capacity:
            room = max(capacity, 2 * self.own[0].shape[3])
            self.own = [_lengthen(kept, room) for kept in self.own]

    def _update_mask(self) -> None:
        length = self.seen[0].shape[3]
        is_seen = torch.arange(length, device=self.num_seen.device) < self.num_seen[:, None]
        self.seen_mask = None if bool(is_seen.all()) else is_seen[:, None, None]


def _lengthen(kept: Tensor, length: int) -> Tensor:
    return functional.pad(kept, (0, 0, 0, length - kept.shape[3])) if kept.shape[3] < length else kept


def _join(first: Tensor, second: Tensor) -> Tensor:
    length = max(first.shape[3], second.shape[3])
    return torch.cat([_lengthen(first, length), _lengthen(second, length)], dim=1)


class _Kept(NamedTuple):
    """Keys and values (2, n, heads, s, width) of one layer, and which of them count (n, 1, 1, s or fewer): None for all.

    places (n,): where the keys and values of the next tokens go; None for those that do not grow.
    """

    pairs: Tensor
    mask: Tensor | None
    places: Tensor | None = None


class CrossDecoder:
    """A decoder with cross attention, and its head."""

    def __init__(self, decoder: Any, head: Any) -> None:
        """Decoder is a BartDecoder or MBartDecoder; head turns its hidden states into logits."""
        self._decoder = decoder
        self._head = head
        self._last_norm = getattr(decoder, "layer_norm", None)
        """MBART's, whose layers norm their inputs; BART's layers norm their outputs."""
        self._offset: int = decoder.embed_positions.offset
        self.max_positions: int = decoder.embed_positions.weight.shape[0] - self._offset

    def begin(self, hidden: Tensor, num_seen: Sequence[int]) -> Memory:
        """Return the memory of sequences without tokens; hidden (n, s, d) is their encoders', num_seen the valid rows."""
        own: list[Tensor] = []
        seen: list[Tensor] = []
        for layer in self._decoder.layers:
            attention = layer.encoder_attn
            seen.append(torch.stack([_heads(part(hidden), attention) for part in (attention.k_proj, attention.v_proj)]))
            attention = layer.self_attn
            shape = (2, len(hidden), attention.num_heads, _FIRST_CAPACITY, attention.head_dim)
            own.append(hidden.new_zeros(shape))
        return Memory(own, seen, torch.tensor(num_seen, device=hidden.device))

    def step(self, memory: Memory, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return the logits (n, v) after one more token of each sequence."""
        length = max(positions) + 1
        memory.grow(length)
        ids, places = torch.tensor([token_ids, positions], device=memory.num_seen.device)
        mask = (torch.arange(length, device=places.device) <= places[:, None])[:, None, None]
        decoder = self._decoder
        hidden = decoder.embed_tokens(ids) + functional.embedding(places + self._offset, decoder.embed_positions.weight)
        hidden = decoder.layernorm_embedding(hidden)[:, None]
        for layer, own, seen in zip(decoder.layers, memory.own, memory.seen, strict=True):
            hidden = self._layer(layer, hidden, _Kept(own, mask, places), _Kept(seen, memory.seen_mask))
        if self._last_norm is not None:
            hidden = self._last_norm(hidden)
        return self._head(hidden[:, 0])

    def _layer(self, layer: Any, hidden: Tensor, own: _Kept, seen: _Kept) -> Tensor:
        def attend_own(value: Tensor) -> Tensor:
            return _attend(layer.self_attn, value, own)

        def attend_seen(value: Tensor) -> Tensor:
            return _attend(layer.encoder_attn, value, seen)

        def transform(value: Tensor) -> Tensor:
            return layer.fc2(layer.activation_fn(layer.fc1(value)))

        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        for part, norm in zip((attend_own, attend_seen, transform), norms, strict=True):
            hidden = norm(hidden + part(hidden)) if self._last_norm is None else hidden + part(norm(hidden))
        return hidden


def _heads(value: Tensor, attention: Any) -> Tensor:
    """Return (n, heads, t, width) of (n, t, d)."""
    return value.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)


def _attend(attention: Any, value: Tensor, kept: _Kept) -> Tensor:
    """Return (n, 1, d): attention over the kept keys and values, to which those of the value itself are added first."""
    if kept.places is not None:
        rows = torch.arange(len(value), device=value.device)
        for own, part in zip(kept.pairs, (attention.k_proj, attention.v_proj), strict=True):
            own[rows, :, kept.places] = _heads(part(value), attention)[:, :, 0]
    keys, values = kept.pairs if kept.mask is None else kept.pairs[:, :, :, : kept.mask.shape[-1]]
    queries = _heads(attention.q_proj(value), attention)
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=kept.mask, scale=attention.scaling)
    return attention.out_proj(found.transpose(1, 2).flatten(2))
