"""Compares a query with its documents by their vectors: cosine, dot product of weights, MaxSim.

All in float32, on the model's device. A query's vectors are kept after its step. Each document is reduced to its score
in its own step. Sources: ColBERT, arXiv 2004.12832, section 3.3 (MaxSim); M3-Embedding, arXiv 2402.03216, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from sie.values.card import LateInteraction
from sie.workers.model_api import Comparison, Side
from sie.workers.runners.splade import Entries

_CHUNK_BYTES = 64 << 20
"""Most bytes of a matrix of all document tokens by some query tokens."""


class TextVectors(NamedTuple):
    """One text's vectors to compare; None for an output that was not requested. Any: the caller knows which were."""

    dense: Any
    """Tensor (d,)"""
    sparse: Any
    """`Entries`"""
    multivector: Any
    """Tensor (r, d), not normalised"""


def compare(
    texts: Sequence[TextVectors], sides: Sequence[Side], late: LateInteraction | None, device: torch.device
) -> NDArray[np.float32]:
    """Return the (n,) scores of a step's texts, 0 for a query, and store each query in its comparison.

    device is the model's. The caller must not pass a document before its comparison has a query.
    """
    documents: dict[Comparison, list[int]] = {}
    for item, (text, side) in enumerate(zip(texts, sides, strict=True)):
        if side.is_query:
            side.comparison.query = _query_of(text, side.comparison, late)
        else:
            documents.setdefault(side.comparison, []).append(item)
    scores = np.zeros(len(texts), np.float32)
    if documents:
        found = [_scores(query, [texts[item] for item in items], late, device) for query, items in documents.items()]
        scores[[item for items in documents.values() for item in items]] = torch.cat(found).cpu().numpy()
    return scores


def _query_of(text: TextVectors, comparison: Comparison, late: LateInteraction | None) -> TextVectors:
    """Return a query ready for comparison, in its own memory rather than the step's."""
    dense = None if text.dense is None else normalize(text.dense, dim=-1)
    rows = text.multivector
    if rows is not None:
        rows = normalize(rows, dim=-1) if _normalizes(comparison, late) else rows.clone()
    return TextVectors(dense, text.sparse, rows)


def _normalizes(comparison: Comparison, late: LateInteraction | None) -> bool:
    if comparison.normalize is not None:
        return comparison.normalize
    return late is None or late.normalize


def _scores(
    comparison: Comparison, documents: Sequence[TextVectors], late: LateInteraction | None, device: torch.device
) -> Tensor:
    """Return the weighted sum of the scores of all compared outputs, (n,)."""
    query: TextVectors | None = comparison.query
    assert query is not None, "a document came before its query"
    total = torch.zeros(len(documents), device=device)
    for output, weight in comparison.outputs:
        if output == "dense":
            rows = normalize(torch.stack([text.dense for text in documents]), dim=-1)
            found = rows @ query.dense
        elif output == "sparse":
            found = torch.from_numpy(sparse_dots(query.sparse, [text.sparse for text in documents])).to(device)
        else:
            rows = torch.cat([text.multivector for text in documents])
            rows = normalize(rows, dim=-1) if _normalizes(comparison, late) else rows
            found = max_sims(query.multivector, rows, [len(text.multivector) for text in documents])
            if late is not None and late.mean_score:
                found = found / max(1, len(query.multivector))
        total += weight * found
    return total


def max_sims(query: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return (n,): for each document, the sum over the query's vectors of the largest dot product with its vectors.

    query is (q, d). rows (r, d) are the documents' vectors back to back, and counts their numbers. A document without
    vectors gives -inf.
    """
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(rows.device)
    scores = rows.new_zeros(len(counts))
    for part in query.split(max(1, _CHUNK_BYTES // (4 * max(1, len(rows))))):
        dots = rows @ part.T
        best = dots.new_full((len(counts), len(part)), -torch.inf)
        scores += best.scatter_reduce(0, owners[:, None].expand_as(dots), dots, "amax").sum(1)
    return scores


def sparse_dots(query: Entries, documents: Sequence[Entries]) -> NDArray[np.float32]:
    """Return (n,): for each document, the sum of value products over the indices that it shares with the query."""
    own, weights = query
    if not len(own):
        return np.zeros(len(documents), np.float32)
    indices = np.concatenate([indices for indices, _ in documents])
    values = np.concatenate([values for _, values in documents])
    places = np.searchsorted(own, indices).clip(max=len(own) - 1)
    products = np.where(own[places] == indices, weights[places] * values, 0)
    owners = np.repeat(np.arange(len(documents)), [len(indices) for indices, _ in documents])
    return np.bincount(owners, products, len(documents)).astype(np.float32)
