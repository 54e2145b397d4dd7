"""Owns text to token ids, and the checks of token ids that a client made itself.

Truncation is silent, at the model's maximum, as sentence-transformers does it. Special tokens in a text are parsed,
also as sentence-transformers does it. Arrays are NumPy int32, contiguous: `token_ids` (t,) holds the sequences back to
back, `cu_seqlens` (n + 1,) their bounds, first 0, last t.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.catalog.stub import count_stub_tokens
from sie.errors import BadRequest, Internal, SieError
from sie.types import ModelCard

Int32Array = NDArray[np.int32]
BytesArray = NDArray[np.uint8]

_MAX_UTF8_BYTES = 4


class Tokenizer:
    """Turn texts into the token ids of one model. Safe to use from several threads at once."""

    def __init__(self, card: ModelCard, tokenizer: tokenizers.Tokenizer) -> None:
        self.card = card
        self.vocab_size = card.vocab_size or tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._is_plain = not (card.strip or card.lowercase)
        self._wants_types = card.score is not None and card.score.token_types

    @classmethod
    def load(cls, card: ModelCard) -> Tokenizer:
        """Read the card's tokenizer file.

        The file's own truncation and padding are replaced: MiniLM's says to pad every text to 128 tokens.
        Raises Internal when the file cannot be read; the message names the model, never a path.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(card.tokenizer_file)
        except Exception as exc:  # the library raises bare Exception for a missing and for a malformed file
            raise Internal(f"Model '{card.id}' has no readable tokenizer") from exc
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if card.max_sequence_length is not None:
            tokenizer.enable_truncation(card.max_sequence_length)  # pyright: ignore[reportUnknownMemberType]  # untyped
        return cls(card, tokenizer)

    def encode_texts(self, texts: Sequence[str]) -> tuple[Int32Array, Int32Array]:
        """Return (token_ids, cu_seqlens), special tokens included.

        Raises BadRequest for a text that is not valid Unicode.
        """
        if not self._is_plain:
            texts = [self._clean(text) for text in texts]
        try:
            if len(texts) == 1:
                # `encode` and the batch call cost the same for one text, but this one starts no thread pool
                ids = self._tokenizer.encode(texts[0]).ids
                return np.array(ids, np.int32), np.array((0, len(ids)), np.int32)
            rows = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        except TypeError as exc:
            raise unicode_error(texts, exc) from None
        return pack_ids(rows)

    def encode_pairs(self, query: str, documents: Sequence[str]) -> tuple[Int32Array, Int32Array, BytesArray | None]:
        """Return (token_ids, cu_seqlens, token_types) of the query with each document, as the tokenizer joins two texts.

        A pair that is too long loses tokens of the longer text first. token_types (t,) uint8 is None for a model that
        reads none. Raises BadRequest as `encode_texts` does.
        """
        if not self._is_plain:
            query, documents = self._clean(query), [self._clean(document) for document in documents]
        try:
            encodings = self._tokenizer.encode_batch_fast([(query, document) for document in documents])
        except TypeError as exc:
            raise unicode_error((query, *documents), exc) from None
        token_ids, cu_seqlens = pack_ids([encoding.ids for encoding in encodings])
        if not self._wants_types:
            return token_ids, cu_seqlens, None
        types = chain.from_iterable(encoding.type_ids for encoding in encodings)
        return token_ids, cu_seqlens, np.fromiter(types, np.uint8, len(token_ids))

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids without special tokens. Raises BadRequest as `encode_texts` does."""
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except TypeError as exc:
            raise unicode_error(texts, exc) from None

    def check_token_ids(self, token_lists: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
        """Return (token_ids, cu_seqlens) of token arrays that a client made, cut at the model's maximum.

        The ids are used as they are: no special token is added. Raises BadRequest for an empty array and for an id
        outside the vocabulary.
        """
        limit = self.card.max_sequence_length
        rows = [ids if limit is None else ids[:limit] for ids in token_lists]
        for index, ids in enumerate(token_lists):
            if not ids:
                raise BadRequest(f"Token array {index} must not be empty")
            if min(ids) < 0 or max(ids) >= self.vocab_size:
                raise BadRequest(f"Token array {index} holds an id outside the vocabulary [0, {self.vocab_size})")
        return pack_ids(rows)

    def _clean(self, text: str) -> str:
        text = text.strip() if self.card.strip else text
        return text.lower() if self.card.lowercase else text


def encode_stub_texts(card: ModelCard, texts: Sequence[str]) -> tuple[BytesArray, Int32Array, Int32Array]:
    """Return (text, text_offsets, cu_seqlens) for a stub model, which reads text and not tokens.

    text (bytes,) uint8 is the UTF-8 of all texts back to back and text_offsets (n + 1,) int32 bounds each;
    cu_seqlens (n + 1,) int32 bounds their costs. Raises BadRequest when the card is no stub or a text is not valid
    Unicode.
    """
    if card.stub is None:
        raise BadRequest(f"Model '{card.id}' is not a stub")
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as exc:
        raise unicode_error(texts, exc) from None
    sizes = [len(part) for part in encoded]
    max_tokens = card.stub.max_tokens
    costs = (count_stub_tokens(size, max_tokens) for size in sizes)
    return np.frombuffer(b"".join(encoded), np.uint8), bounds_of(sizes, len(texts)), bounds_of(costs, len(texts))


def is_long(texts: Sequence[str], threshold_bytes: int) -> bool:
    """Tell whether tokenising should leave the event loop: whether the texts may exceed threshold_bytes of UTF-8.

    Exact for ASCII; other texts are encoded only when their length in characters leaves it open.
    """
    num_chars = sum(map(len, texts))
    if num_chars > threshold_bytes:
        return True
    if num_chars * _MAX_UTF8_BYTES <= threshold_bytes:
        return False
    return sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts) > threshold_bytes


def pack_ids(rows: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """Return (token_ids, cu_seqlens) of sequences that are token ids already."""
    cu_seqlens = bounds_of(map(len, rows), len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(cu_seqlens[-1])), cu_seqlens


def bounds_of(sizes: Iterable[int], count: int) -> Int32Array:
    """Return the (count + 1,) int32 bounds of pieces that lie back to back."""
    return np.fromiter(accumulate(sizes, initial=0), np.int32, count + 1)


def unicode_error(texts: Sequence[str], cause: Exception) -> SieError:
    """Say which text holds a lone surrogate; a tokenizer that failed for another reason is our own fault."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            return BadRequest(f"Text {index} is not valid Unicode: it holds a lone surrogate")
    return Internal(f"The tokenizer failed: {type(cause).__name__}")
