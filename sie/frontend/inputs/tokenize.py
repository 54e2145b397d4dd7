"""Turns text into token ids, and checks token ids from a client.

A text is cut at the model's maximum, as in sentence-transformers, and `Cuts` records the texts that were cut. Special
tokens in a text are parsed, also as in sentence-transformers. Arrays are NumPy int32, contiguous: `token_ids` (t,)
holds the sequences back to back, and `cu_seqlens` (n + 1,) their bounds, first 0, last t.
"""

from __future__ import annotations

import asyncio
import re
import string
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.frontend.inputs.pair_cuts import Cuts, Lengths, cut_pairs
from sie.frontend.inputs.text_bounds import groups, shorten
from sie.frontend.inputs.tokenizer_files import filler_of, most_chars, open_tokenizer, own_pool, with_marker
from sie.values.card import ModelCard, Side
from sie.values.errors import BadRequest, InputTooLong, Internal, SieError

Int32Array = NDArray[np.int32]
BytesArray = NDArray[np.uint8]

LONG_TEXT_BYTES = 8192
"""Above this, tokenising takes over about 2 ms and runs on a thread instead of the event loop (`is_long`)."""
_MANY_CHARS = 1024
_LONG_WORD = 32
"""WordPiece takes the square of a word's length: 8 KB of words of 100 letters take 60 ms, real texts 2 ms."""
_MAX_UTF8_BYTES = 4
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACES = re.compile(r"\s+")


class _Reader(NamedTuple):
    """The tokenizer and its settings for one role, queries or documents."""

    tokenizer: tokenizers.Tokenizer
    limit: int | None
    prefix: str = ""
    add_special_tokens: bool = True
    max_chars: int = sys.maxsize
    side: Side = "right"
    """The side on which long texts lose tokens."""

    def shorten(self, model_id: str, texts: Sequence[str], max_tokens: int | None = None) -> Sequence[str]:
        """Return the texts, or as much of each as holds the tokens that are read (`text_bounds.shorten`)."""
        limit = min((n for n in (self.limit, max_tokens) if n is not None), default=None)
        return shorten(model_id, self.tokenizer, texts, limit, self.max_chars, side=self.side)

    def room(self, max_tokens: int | None, *, pair: bool = False) -> int | None:
        """Return how many tokens max_tokens leaves beside the special ones; None when it is not below the limit.

        Raises BadRequest when it leaves no room.
        """
        if max_tokens is None or (self.limit is not None and max_tokens >= self.limit):
            return None
        num_special = self.tokenizer.num_special_tokens_to_add(pair) if self.add_special_tokens else 0
        if max_tokens <= num_special:
            raise BadRequest(
                f"A limit of {max_tokens} tokens leaves no room beside the {num_special} special ones "
                "(options 'max_seq_length', 'query_max_length')"
            )
        return max_tokens - num_special


class Tokenizer:
    """Turn texts into the token ids of one model. Safe to use from several threads at once."""

    def __init__(self, card: ModelCard, tokenizer: tokenizers.Tokenizer) -> None:
        self.card = card
        self.vocab_size = card.vocab_size or tokenizer.get_vocab_size()
        self._document = self._query = _Reader(
            tokenizer, card.max_sequence_length, max_chars=most_chars(card, tokenizer), side=card.truncation_side
        )
        self._is_plain = not (card.strip or card.lowercase or card.drop_punctuation)
        self._filler = filler_of(card, tokenizer)
        self._wants_types = card.score is not None and card.score.token_types

    @classmethod
    def load(cls, card: ModelCard, loop: asyncio.AbstractEventLoop | None = None) -> Tokenizer:
        """Read the card's tokenizer files.

        Replaces the truncation and padding in the files: MiniLM's file pads every text to 128 tokens. With the event
        loop of a server, rules that may take long are guarded; this function must then run on a thread.
        Raises Internal when a file cannot be used; the message names the model, never a path.
        """
        late, static = card.late, card.static_queries
        if late is None:
            # `sie.frontend.operations.extraction` cuts an extractor's texts: into windows, or to fit with their label.
            # A generation prompt that is too long is rejected, or loses its oldest tokens.
            limit = card.max_sequence_length if card.extract is None and card.generate is None else None
            tokenizer = cls(card, open_tokenizer(card, card.tokenizer_file, limit, loop))
        else:
            document = _open_late(card, late.document_length, late.document_prefix, loop)
            tokenizer = cls(card, document.tokenizer)
            tokenizer._document = document
            tokenizer._query = _open_late(card, late.query_length, late.query_prefix, loop)
        if card.static_vectors is not None:
            tokenizer._document = tokenizer._query = tokenizer._document._replace(add_special_tokens=False)
        if static is not None:
            query = open_tokenizer(card, static.tokenizer_file, static.max_length, loop)
            most = most_chars(card, query)
            tokenizer._query = _Reader(query, static.max_length, add_special_tokens=False, max_chars=most)
        return tokenizer

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, for callers that need more than token ids. Do not change it."""
        return self._document.tokenizer

    @property
    def pool(self) -> ThreadPoolExecutor | None:
        """The thread on which all texts must be read, or None: short texts may be read on the event loop."""
        return own_pool(self._document.tokenizer) or own_pool(self._query.tokenizer)

    def may_read_now(self, texts: Sequence[str], threshold_bytes: int = LONG_TEXT_BYTES) -> bool:
        """Return whether these texts may be read on the event loop."""
        return self.pool is None and not is_long(texts, threshold_bytes)

    @property
    def max_chars(self) -> int:
        """The most characters that may be read of one text."""
        return self._document.max_chars

    def count_prompt(self, prompt: str, is_query: bool) -> int:
        """Return how many first tokens of a text with this prompt are the prompt's, special ones included.

        A special token at the end does not count. Source: sentence_transformers 6.2, `_get_prompt_length`.
        """
        ids, empty = (self.encode_texts([text], is_query)[0] for text in (prompt, ""))
        return (len(ids) - bool(len(empty) and ids[-1] == empty[-1])) if prompt and len(ids) else 0

    def encode_texts(
        self, texts: Sequence[str], is_query: bool = False, max_tokens: int | None = None, cuts: Cuts | None = None
    ) -> tuple[Int32Array, Int32Array]:
        """Return (token_ids, cu_seqlens), with special tokens unless the ids index a table of weights.

        is_query matters only to a model that reads queries differently from documents. max_tokens can only lower the
        model's limit. cuts gets the texts that were cut. Raises BadRequest for a text that is not valid Unicode, and
        for a limit without room for a text.
        """
        reader = self._query if is_query else self._document
        tokenizer, limit, prefix, add_special_tokens, *_ = reader
        if not self._is_plain:
            texts = [self._clean(text) for text in texts]
        if prefix:
            texts = [prefix + text for text in texts]
        try:
            if len(texts) != 1 or len(texts[0]) > LONG_TEXT_BYTES:
                return self._encode_many(reader, texts, max_tokens, cuts)
            if max_tokens is not None and (room := reader.room(max_tokens)) is not None:
                return pack_ids(self._filled(_encode_short(reader, texts, room, max_tokens, cuts)))
            # The batch call is used for one text too. It skips offsets, a sixth of the work, and lets other threads
            # run. It starts no threads while TOKENIZERS_PARALLELISM is false, as in a frontend.
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as exc:
            raise unicode_error(texts, exc) from None
        ids = encodings[0].ids
        if limit is not None and len(ids) >= limit and cuts is not None:
            _note_cuts(encodings, limit, cuts)
        if self._filler is not None:
            return pack_ids(self._filled([ids]))
        return np.array(ids, np.int32), np.array((0, len(ids)), np.int32)

    def _encode_many(
        self, reader: _Reader, texts: Sequence[str], max_tokens: int | None, cuts: Cuts | None
    ) -> tuple[Int32Array, Int32Array]:
        """Do the work of `encode_texts` in parts of bounded size, and without the ends of long texts."""
        texts = reader.shorten(self.card.id, texts, max_tokens)
        room = None if max_tokens is None else reader.room(max_tokens)
        rows: list[list[int]] = []
        for part in groups(texts):
            own: Cuts = {}
            if max_tokens is not None and room is not None:
                found = _encode_short(reader, part, room, max_tokens, own)
            else:
                encodings = reader.tokenizer.encode_batch_fast(part, add_special_tokens=reader.add_special_tokens)
                if reader.limit is not None and cuts is not None:
                    _note_cuts(encodings, reader.limit, own)
                found = [encoding.ids for encoding in encodings]
            if cuts is not None:
                cuts |= {len(rows) + index: limit for index, limit in own.items()}
            rows += found
        return pack_ids(self._filled(rows))

    def encode_pairs(
        self, query: str, documents: Sequence[str], max_tokens: int | None = None, cuts: Cuts | None = None
    ) -> tuple[Int32Array, Int32Array, BytesArray | None]:
        """Return (token_ids, cu_seqlens, token_types) of the query paired with each document by the tokenizer.

        A pair that is too long loses tokens of the longer text first. token_types (t,) uint8 is None for a model that
        does not read them. max_tokens, cuts and errors as in `encode_texts`. A pair counts as cut if either text is.
        """
        limit = self._document.limit
        is_lower = self._document.room(max_tokens, pair=True) is not None
        limit, cuts = max_tokens if is_lower else limit, {} if cuts is None else cuts
        if not self._is_plain:
            query, documents = self._clean(query), [self._clean(document) for document in documents]
        rows: list[tuple[list[int], list[int]]] = []
        try:
            whole = [query, *documents]
            query, *documents = self._document.shorten(self.card.id, whole, limit)
            for part in groups(documents):
                own: Cuts = {}
                lengths = Lengths(self._document.tokenizer, [whole[0], *whole[len(rows) + 1 :]])
                encodings = self._pair(query, part, limit, own, lengths, is_cut_here=is_lower)
                cuts |= {len(rows) + index: most for index, most in own.items()}
                rows += [(encoding.ids, encoding.type_ids if self._wants_types else []) for encoding in encodings]
        except TypeError as exc:
            raise unicode_error((query, *documents), exc) from None
        token_ids, cu_seqlens = pack_ids([ids for ids, _ in rows])
        if not self._wants_types:
            return token_ids, cu_seqlens, None
        return (
            token_ids,
            cu_seqlens,
            np.fromiter(chain.from_iterable(types for _, types in rows), np.uint8, len(token_ids)),
        )

    def _pair(
        self,
        query: str,
        documents: Sequence[str],
        limit: int | None,
        cuts: Cuts,
        lengths: Lengths,
        *,
        is_cut_here: bool,
    ) -> Sequence[tokenizers.Encoding]:
        tokenizer = self._document.tokenizer
        is_cut_here = is_cut_here or lengths.any_is_cut([query, *documents])
        # When both texts of a pair are cut, the library also joins each piece of one with each piece of the other.
        # That takes a gigabyte for two texts of 10,000 words. So the library cuts only single texts.
        if limit is not None and (is_cut_here or len(query) > limit):
            side = self._document.side
            return cut_pairs(tokenizer, query, documents, limit, cuts, lengths=lengths, side=side)
        encodings = tokenizer.encode_batch_fast([(query, document) for document in documents])
        if limit is not None:
            _note_cuts(encodings, limit, cuts)
        return encodings

    def encode_plain(self, texts: Sequence[str], cuts: Cuts | None = None) -> list[list[int]]:
        """Return each text's token ids without special tokens; cuts and BadRequest as in `encode_texts`."""
        tokenizer, limit = self._document.tokenizer, self._document.limit
        rows: list[list[int]] = []
        try:
            texts = self._document.shorten(self.card.id, texts)
            for part in groups(texts):
                encodings = tokenizer.encode_batch_fast(part, add_special_tokens=False)
                own: Cuts = {}
                if limit is not None and cuts is not None:
                    _note_cuts(encodings, limit, own)
                    cuts |= {len(rows) + index: limit for index in own}
                rows += [encoding.ids for encoding in encodings]
        except TypeError as exc:
            raise unicode_error(texts, exc) from None
        return rows

    def shorten(self, texts: Sequence[str], max_tokens: int | None, *, side: Side) -> Sequence[str]:
        """Return the texts, long ones cut on a side to more than max_tokens tokens. Errors as `text_bounds.shorten`."""
        return shorten(self.card.id, self.backend, texts, max_tokens, self.max_chars, side=side)

    def ends_of(self, texts: Sequence[str], max_tokens: int) -> list[int]:
        """Return the end of each text's token number max_tokens, special ones left out, or that of a shorter text.

        Raises TypeError, the library's, for a text that is not valid Unicode.
        """
        ends: list[int] = []
        for part in groups(self.shorten(texts, max_tokens, side="right")):
            for encoding in self.backend.encode_batch(part, add_special_tokens=False):
                end = _end_of(encoding, max_tokens, self._document.side)
                ends.append(len(texts[len(ends)]) if end is None else end)
        return ends

    def check_token_ids(
        self, token_lists: Sequence[Sequence[int]], max_tokens: int | None = None, cuts: Cuts | None = None
    ) -> tuple[Int32Array, Int32Array]:
        """Return (token_ids, cu_seqlens) of a client's token arrays, cut at the lower of max_tokens and the maximum.

        The ids are used unchanged, without added special tokens. cuts as in `encode_texts`. Raises BadRequest for an
        empty array and for an id outside the vocabulary.
        """
        limit = min((n for n in (self.card.max_sequence_length, max_tokens) if n is not None), default=None)
        if self._document.side == "left":
            rows = [ids if limit is None else ids[-limit:] for ids in token_lists]
        else:
            rows = [ids if limit is None else ids[:limit] for ids in token_lists]
        for index, ids in enumerate(token_lists):
            if not ids:
                raise BadRequest(f"Token array {index} must not be empty", extras={"param": "input"})
            if min(ids) < 0 or max(ids) >= self.vocab_size:
                raise BadRequest(
                    f"Token array {index} holds an id outside the vocabulary [0, {self.vocab_size})",
                    extras={"param": "input"},
                )
            if limit is not None and len(ids) > limit and cuts is not None:
                cuts[index] = limit
        return pack_ids(self._filled(rows))

    def _filled(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return token ids padded to the fixed length of the card, if it has one."""
        filler, padding = self._filler, self.card.padding
        if filler is None or padding is None:
            return rows
        if padding.side == "left":
            return [[*filler[len(row) :], *row] for row in rows]
        return [[*row, *filler[len(row) :]] for row in rows]

    def _clean(self, text: str) -> str:
        """Return the text as the model's tokenizer class cleans it.

        Source of drop_punctuation: transformers 5.23 models/siglip/tokenization_siglip.py (canonicalize_text).
        """
        if self.card.splits_underscores:
            text = text.replace("_", " ")
        if self.card.drop_punctuation:
            text = _SPACES.sub(" ", text.translate(_NO_PUNCTUATION))
        text = text.strip() if self.card.strip else text
        return text.lower() if self.card.lowercase else text


def _open_late(card: ModelCard, length: int | None, prefix: str, loop: asyncio.AbstractEventLoop | None) -> _Reader:
    limit = length or card.max_sequence_length
    tokenizer = with_marker(open_tokenizer(card, card.tokenizer_file, limit, loop), prefix)
    return _Reader(tokenizer, limit, prefix, max_chars=most_chars(card, tokenizer))


def _note_cuts(encodings: Sequence[tokenizers.Encoding], limit: int, cuts: Cuts) -> None:
    """Add the encodings that the library cut at limit; it keeps the removed tokens as `overflowing`."""
    for index, encoding in enumerate(encodings):
        if len(encoding) >= limit and encoding.overflowing:
            cuts[index] = limit


def _end_of(encoding: tokenizers.Encoding, max_tokens: int, side: Side) -> int | None:
    """Return the end of token number max_tokens of a text; None if no token follows it. side is where it was cut."""
    pieces = [encoding, *encoding.overflowing]
    rest = max_tokens
    for place, piece in enumerate(pieces if side == "right" else reversed(pieces), 1):
        if rest < len(piece) or (rest == len(piece) and place < len(pieces)):
            span = piece.token_to_chars(rest - 1)
            assert span is not None, "no token of a text is added by the tokenizer"
            return span[1]
        rest -= len(piece)
    return None


def _encode_short(
    reader: _Reader, texts: Sequence[str], room: int, max_tokens: int, cuts: Cuts | None
) -> list[list[int]]:
    """Return each text's ids with at most room tokens beside the special ones.

    All callers share the tokenizer's limit, so texts are cut here, between encoding and post-processing.
    """
    tokenizer = reader.tokenizer
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for index, encoding in enumerate(encodings):
        if len(encoding) > room and cuts is not None:
            cuts[index] = max_tokens
        encoding.truncate(room, direction=reader.side)
    return [tokenizer.post_process(encoding, None, reader.add_special_tokens).ids for encoding in encodings]


def is_long(texts: Sequence[str], threshold_bytes: int) -> bool:
    """Tell whether texts exceed threshold_bytes of UTF-8, so that tokenising should leave the event loop.

    Long words count as long texts. Exact for ASCII. Other texts are encoded only when their length in characters does not decide.
    """
    num_chars = sum(map(len, texts))
    if num_chars > threshold_bytes:
        return True
    if num_chars > _MANY_CHARS and any(len(word) > _LONG_WORD for text in texts for word in text.split()):
        return True
    if num_chars * _MAX_UTF8_BYTES <= threshold_bytes:
        return False
    return sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts) > threshold_bytes


def pack_ids(rows: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """Return (token_ids, cu_seqlens) of sequences of token ids."""
    cu_seqlens = bounds_of(map(len, rows), len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(cu_seqlens[-1])), cu_seqlens


def bounds_of(sizes: Iterable[int], count: int) -> Int32Array:
    """Return the (count + 1,) int32 bounds of pieces stored back to back."""
    return np.fromiter(accumulate(sizes, initial=0), np.int32, count + 1)


def too_long(card: ModelCard, message: str) -> InputTooLong:
    """Return the error for an input that is longer than the model reads; it names the model."""
    return InputTooLong(f"Model '{card.id}': {message}", extras={"model": card.id})


def unicode_error(texts: Sequence[str], cause: Exception) -> SieError:
    """Return BadRequest naming the text with a lone surrogate, or Internal if the tokenizer failed otherwise."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            return BadRequest(f"Text {index} is not valid Unicode: it holds a lone surrogate")
    return Internal(f"The tokenizer failed: {type(cause).__name__}")
