"""Prepares texts for stub models, which read UTF-8 instead of token ids. `sie.catalog.stub` has their rules. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sie.catalog.stub import BYTES_PER_TOKEN, count_stub_tokens
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.tokenize import BytesArray, Int32Array, bounds_of, unicode_error
from sie.values.card import ModelCard
from sie.values.errors import BadRequest


def encode_stub_texts(
    card: ModelCard, texts: Sequence[str], max_tokens: int | None = None, cuts: Cuts | None = None
) -> tuple[BytesArray, Int32Array, Int32Array]:
    """Return (text, text_offsets, cu_seqlens) for a stub model, which reads text instead of tokens.

    text (bytes,) uint8 is the UTF-8 of all texts back to back, and text_offsets (n + 1,) int32 bounds each.
    cu_seqlens (n + 1,) int32 bounds their costs. max_tokens cuts longer texts. cuts also gets texts over the stub's own
    limit. Raises BadRequest when the card is not a stub or a text is not valid Unicode.
    """
    if card.stub is None:
        raise BadRequest(f"Model '{card.id}' is not a stub")
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as exc:
        raise unicode_error(texts, exc) from None
    limit = card.stub.max_tokens if max_tokens is None else min(max_tokens, card.stub.max_tokens)
    if cuts is not None:
        cuts |= {i: limit for i, part in enumerate(encoded) if len(part) > limit * BYTES_PER_TOKEN}
    if max_tokens is not None:
        encoded = [part[: max_tokens * BYTES_PER_TOKEN] for part in encoded]
    sizes = [len(part) for part in encoded]
    costs = (count_stub_tokens(size, card.stub.max_tokens) for size in sizes)
    return np.frombuffer(b"".join(encoded), np.uint8), bounds_of(sizes, len(texts)), bounds_of(costs, len(texts))


def encode_stub_text(card: ModelCard, texts: Sequence[str], cuts: Cuts | None = None) -> tuple[bytes, int]:
    """Return the UTF-8 of one text for a stub model, and its cost in tokens. cuts and errors: `encode_stub_texts`."""
    if card.stub is None:
        raise BadRequest(f"Model '{card.id}' is not a stub")
    try:
        encoded = texts[0].encode()
    except UnicodeEncodeError as exc:
        raise unicode_error(texts, exc) from None
    if cuts is not None and len(encoded) > card.stub.max_tokens * BYTES_PER_TOKEN:
        cuts[0] = card.stub.max_tokens
    return encoded, count_stub_tokens(len(encoded), card.stub.max_tokens)
