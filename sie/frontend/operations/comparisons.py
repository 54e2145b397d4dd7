"""Prepares scores by vectors: chooses the outputs to compare, and lays out the texts as arrays.

Pure. Source of the modes: SIE API reference, section 19.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.profile_options import token_limit
from sie.frontend.inputs.prompts import apply_prompt
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.inference import ScoreRequest
from sie.values.output_kinds import KINDS

Compared = tuple[tuple[str, float], ...]
"""The compared outputs, each with its weight; empty for a model that reads pairs."""

_HYBRID: Final = {kind.name: kind.hybrid_weight for kind in KINDS.values() if kind.hybrid_weight}
_MODES: Final = {**{kind.score_mode: (kind.name,) for kind in KINDS.values()}, "hybrid": tuple(_HYBRID)}
_LIST: Final = (("score", 1.0),)
"""A model that reads lists is given them as a query, and then each document's number."""
_MAX_WEIGHT: Final = 1e6


def resolve_compared(options: dict[str, Any], card: ModelCard) -> Compared:
    """Return the outputs by which this model scores a request, without those of weight 0.

    Raises BadRequest for a `score_mode` or `score_weights` that the model cannot serve.
    """
    mode, weights = options.get("score_mode"), options.get("score_weights")
    if not card.compares or "dense" not in card.outputs:
        for name, value in (("score_mode", mode), ("score_weights", weights)):
            if value is not None:
                raise BadRequest(f"Model '{card.id}' does not support option '{name}'")
        if card.listwise is not None:
            return _LIST
        return (("multivector", 1.0),) if card.compares else ()
    mode = "dense" if mode is None else mode
    outputs = _MODES.get(mode) if isinstance(mode, str) else None
    if outputs is None:
        raise BadRequest(f"Invalid score_mode {mode!r}. Valid: {sorted(_MODES)}")
    if weights is not None and mode != "hybrid":
        raise BadRequest(f"Option 'score_weights' belongs to score_mode 'hybrid', not '{mode}'")
    values = (1.0,) if mode != "hybrid" else tuple(_HYBRID.values()) if weights is None else _check_weights(weights)
    compared = tuple((output, value) for output, value in zip(outputs, values, strict=True) if value)
    for output, _ in compared:
        if output not in card.outputs:
            reason = card.missing_outputs.get(output, "its checkpoint has no such head")
            raise BadRequest(f"Model '{card.id}' does not support score_mode '{mode}': no {output} output ({reason})")
    return compared


def _check_weights(weights: Any) -> tuple[float, float, float]:
    try:
        values = msgspec.convert(weights, tuple[float, float, float])
    except (msgspec.ValidationError, OverflowError):
        values = (-1.0, -1.0, -1.0)
    if any(values) and all(0 <= value <= _MAX_WEIGHT for value in values):
        return values
    raise BadRequest(
        f"Option 'score_weights' must be three numbers from 0 to {_MAX_WEIGHT:.0f}, not all 0, "
        "for dense, sparse and colbert"
    )


def comparison_arrays(card: ModelCard, tokenizer: Tokenizer, request: ScoreRequest, cuts: Cuts | None = None) -> Arrays:
    """Return the arrays of a request scored by vectors, the items' bounds first: the query, then the documents.

    Both are read as in encode, with the checkpoint's templates and prompts. An instruction applies to the query only.
    cuts gets the documents that were cut, or all documents if the query was cut. Raises BadRequest for a text that is
    not valid Unicode, or a template with an unknown placeholder.
    """
    cut_query: Cuts = {}
    query = apply_prompt(card, [request.query], request.options, request.instruction, is_query=True)
    documents = apply_prompt(card, request.documents, request.options, None, is_query=False)
    query_ids, _ = tokenizer.encode_texts(query, True, token_limit(request.options, is_query=True), cut_query)
    limit = token_limit(request.options, is_query=False)
    document_ids, bounds = tokenizer.encode_texts(documents, False, limit, cuts)
    if cuts is not None and cut_query:
        cuts |= dict.fromkeys(range(len(documents)), cut_query[0])
    cu_seqlens = np.concatenate(([0], bounds + len(query_ids)), dtype=np.int32)
    return [("cu_seqlens", cu_seqlens), ("token_ids", np.concatenate((query_ids, document_ids)))]
