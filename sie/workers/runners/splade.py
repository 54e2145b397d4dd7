"""Computes sparse vectors: a masked language model's logits pooled over each sequence, or bge-m3's lexical weights.

Logits are never computed for a whole step at once: tokens by vocabulary would be gigabytes. Whole sequences run through
the language model's head in chunks. A sequence that is longer than a chunk is pooled piece by piece. Formulas: SPLADE
v2, arXiv 2109.10086, section 3 (max), arXiv 2107.05720 (sum); M3-Embedding, arXiv 2402.03216, section 3.1 (lexical).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from sie.catalog.files import refuse
from sie.values.card import SparseOutput
from sie.values.errors import NonFinite
from sie.workers.device.device import read, read_later
from sie.workers.packed.batch import PackedBatch
from sie.workers.runners.probe import MAX_DIFFERENCE, difference
from sie.workers.runners.stand_in import ModelHead

Entries = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Indices (e,), ascending, and values (e,), positive and finite."""
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes of logits at once. A GPU waits for the host after each reading of entries; a CPU's caches like small chunks."""
_POOLED_BYTES = {"cpu": 0, "cuda": 1 << 30}
"""Bytes of pooled rows that are read together."""


class SparseHead(Protocol):
    """Turns packed hidden states into sparse vectors."""

    can_launch: bool
    """Whether `launch` returns before the device has computed."""

    def weights(self) -> Iterable[Tensor]:
        """Return its weights, which may include some of the encoder's."""
        ...

    def launch(self, hidden: Tensor, batch: PackedBatch) -> Callable[[], list[Entries]]:
        """Return a function that waits for the vectors of the batch's sequences, in the batch's order; hidden is (t, d).

        Either raises NonFinite if a value is not finite.
        """
        ...


class LanguageHead:
    """Runs the part of a masked language model after its encoder: packed hidden states to logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._head = ModelHead(model)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return (t, vocabulary) logits of (t, d) hidden states."""
        return self._head(hidden[None], input_ids=None, inputs_embeds=hidden[None])[0]


def take_head(model_id: str, model: PreTrainedModel) -> tuple[PreTrainedModel, LanguageHead]:
    """Return a masked language model's encoder and head, after checking that together they equal the model.

    Raises ModelLoadFailed for a model that cannot be split.
    """
    encoder = model.base_model
    if encoder is model or not isinstance(encoder, PreTrainedModel):
        raise refuse(model_id, f"{type(model).__name__} has no separate encoder")
    ids = torch.arange(4, 12, device=model.device)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0]
        hidden = encoder(input_ids=ids).last_hidden_state[0]
        head = LanguageHead(model)
        try:
            logits = head(hidden)
        except Exception as error:  # an unknown architecture may raise anything without its encoder
            raise refuse(model_id, f"the head of {type(model).__name__} cannot be run by itself: {error}") from error
        if difference(logits, expected) > MAX_DIFFERENCE[expected.dtype]:
            raise refuse(model_id, f"the head of {type(model).__name__} gives different logits by itself")
    return encoder, head


class SpladeHead:
    """Pools log1p(relu(logit)), or log1p of that, over each sequence's tokens."""

    can_launch = False
    """The host waits for the number of entries before it can ask for them."""

    def __init__(self, options: SparseOutput, head: LanguageHead, vocab_size: int) -> None:
        self._head = head
        self._is_max = options.pooling == "max"
        self._num_logs = 2 if options.activation == "log1p_relu" else 1
        self._row_bytes = 4 * vocab_size
        self._max_entries = options.max_entries

    def weights(self) -> Iterable[Tensor]:
        """Return all weights of the language model; the head's last layer often shares the embeddings."""
        return self._head.model.parameters()

    def launch(self, hidden: Tensor, batch: PackedBatch) -> Callable[[], list[Entries]]:
        """See `SparseHead`."""
        entries = [keep_largest(found, self._max_entries) for found in self.run(hidden, batch)]
        return lambda: entries

    def run(self, hidden: Tensor, batch: PackedBatch) -> list[Entries]:
        """Return the vectors of the batch's sequences, in the batch's order."""
        kind = hidden.device.type
        chunk_tokens = max(16, _CHUNK_BYTES[kind] // self._row_bytes)
        most_rows = _POOLED_BYTES[kind] // self._row_bytes
        entries: list[Entries] = []
        waiting: list[Tensor] = []
        for pooled in self._pooled(hidden, batch.cu_seqlens.tolist(), chunk_tokens):
            waiting.append(pooled)
            if sum(map(len, waiting)) > most_rows:
                entries += take_entries(torch.cat(waiting))
                waiting.clear()
        return entries + take_entries(torch.cat(waiting)) if waiting else entries

    def _pooled(self, hidden: Tensor, bounds: list[int], chunk_tokens: int) -> Iterator[Tensor]:
        """Yield (k, vocabulary) float32 of the next k sequences, until all sequences are done."""
        for first, last in _chunks(bounds, chunk_tokens):
            start, end = bounds[first], bounds[last]
            if end - start > chunk_tokens:  # one long sequence
                pieces = hidden[start:end].split(chunk_tokens)
                yield self._finish(
                    self._join(torch.stack([self._pool(self._head(piece)[None])[0] for piece in pieces]))
                )
                continue
            logits = self._head(hidden[start:end])
            yield self._finish(torch.cat([self._pool(same) for same in _by_length(logits, bounds[first : last + 1])]))

    def _pool(self, logits: Tensor) -> Tensor:
        """Pool (k, length, vocabulary) over the length: the maximum of the raw logits, or the sum of their weights."""
        return logits.amax(1).float() if self._is_max else self._weights(logits.float()).sum(1)

    def _join(self, pooled: Tensor) -> Tensor:
        return pooled.amax(0, keepdim=True) if self._is_max else pooled.sum(0, keepdim=True)

    def _finish(self, pooled: Tensor) -> Tensor:
        # The weight grows with the logit, so the largest logit has the largest weight: one log1p for each sequence.
        return self._weights(pooled) if self._is_max else pooled

    def _weights(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self._num_logs):
            weights = weights.log1p()
        return weights


class LexicalHead:
    """Gives each token id the largest relu(linear(hidden)) of its tokens; special tokens get no weight."""

    can_launch = True

    def __init__(self, options: SparseOutput, special_ids: Sequence[int], device: torch.device) -> None:
        weights = load_file(Path(options.weights_file), device=str(device))
        self._weight = weights["weight"].float()
        self._bias = weights["bias"].float() if "bias" in weights else None
        self._special_ids = np.array(special_ids, np.int64)

    def weights(self) -> Iterable[Tensor]:
        """Return the linear layer's weights."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def launch(self, hidden: Tensor, batch: PackedBatch) -> Callable[[], list[Entries]]:
        """See `SparseHead`."""
        wait = read_later(nn.functional.linear(hidden.float(), self._weight, self._bias).relu()[:, 0])
        return lambda: self._entries(wait().numpy(), batch)

    def _entries(self, weights: NDArray[np.float32], batch: PackedBatch) -> list[Entries]:
        """Return the vectors from each token's weight (t,)."""
        if not np.isfinite(weights).all():
            raise _non_finite()
        weights[np.isin(batch.input_ids, self._special_ids)] = 0
        bounds = batch.cu_seqlens.tolist()
        return [_largest_by_id(batch.input_ids[start:end], weights[start:end]) for start, end in pairwise(bounds)]


def _largest_by_id(ids: NDArray[np.int64], weights: NDArray[np.float32]) -> Entries:
    indices, places = np.unique(ids, return_inverse=True)
    values = np.zeros(len(indices), np.float32)
    np.maximum.at(values, places, weights)
    kept = values > 0
    return indices[kept].astype(np.int32), values[kept]


class StaticTable:
    """Weights of token ids for queries that need no model. Source: SparseStaticEmbedding of sentence-transformers."""

    def __init__(self, weights_file: str, max_entries: int | None = None) -> None:
        """max_entries is how many of a query's largest weights are kept; None keeps all."""
        self._weights = load_file(Path(weights_file))["weight"].float().numpy()
        self._max_entries = max_entries
        self.memory_bytes = self._weights.nbytes

    def __call__(self, token_ids: NDArray[np.int32]) -> Entries:
        """Return the weights of the distinct token ids among (t,). Raises NonFinite."""
        indices = np.unique(token_ids)
        values = self._weights[indices]
        if not np.isfinite(values).all():
            raise _non_finite()
        kept = values > 0
        return keep_largest((indices[kept].astype(np.int32), values[kept]), self._max_entries)


def keep_largest(entries: Entries, most: int | None) -> Entries:
    """Return the entries with the largest values, in their order. None keeps all. Source: `max_active_dims` of SparseEncoder."""
    indices, values = entries
    if most is None or len(values) <= most:
        return entries
    kept = np.sort(np.argpartition(values, -most)[-most:])
    return indices[kept], values[kept]


def take_entries(weights: Tensor) -> list[Entries]:
    """Return the positive entries of each row of (k, vocabulary) float32. Raises NonFinite.

    The host waits twice: for the number of entries, and for all that it reads, in one copy.
    """
    is_entry = weights > 0
    rows, columns = is_entry.nonzero(as_tuple=True)
    parts = (
        columns, weights[rows, columns].view(torch.int32), is_entry.sum(1), torch.isfinite(weights).all().view(1),
    )  # fmt: skip
    found = read(torch.cat([part.to(torch.int32) for part in parts])).numpy()
    if weights.device.type != "cpu":
        found = found.copy()  # entries live until their reply is complete, and page-locked memory is scarce
    count = len(columns)
    indices, values = found[:count], found[count : 2 * count].view(np.float32)
    if not found[-1]:
        raise _non_finite()
    bounds = [0, *np.cumsum(found[2 * count : -1]).tolist()]
    return [(indices[start:end], values[start:end]) for start, end in pairwise(bounds)]


def _chunks(bounds: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences with at most max_tokens tokens together; a longer sequence is its own range."""
    first = 0
    for last in range(1, len(bounds)):
        if last - first > 1 and bounds[last] - bounds[first] > max_tokens:
            yield first, last - 1
            first = last - 1
    yield first, len(bounds) - 1


def _by_length(logits: Tensor, bounds: list[int]) -> Iterator[Tensor]:
    """Yield (k, length, vocabulary) for each run of k sequences of one length."""
    start = 0
    for length, same in groupby(end - begin for begin, end in pairwise(bounds)):
        count = sum(1 for _ in same)
        yield logits[start : start + count * length].unflatten(0, (count, length))
        start += count * length


def _non_finite() -> NonFinite:
    return NonFinite("the model produced a value that is not finite")
