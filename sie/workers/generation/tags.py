"""Corrects the masks of tokens that llguidance treats as special, although their text may be part of an answer.

The library treats every added token that is special or written `<...>` as special, such as Qwen's `<tool_call>`, which
is text to the tokenizer. It never allows such a token where a grammar has its text. But if only one text can follow, it
may force such a token, and then refuse it. Seen in llguidance 1.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sie.catalog.added_tokens import read_added_tokens
from sie.values.card import ModelCard

_CALL_TAGS: Final = ("<tool_call>", "</tool_call>")


class Spellings(NamedTuple):
    """For tokens that the library treats as special: how other tokens spell them, and which of them are text for us."""

    pieces: Mapping[int, list[int]]
    """By special token, the tokens that spell its text byte by byte."""
    tags: tuple[int, ...]
    """Tokens around calls and reasoning that are not special to the tokenizer: models are trained to write them."""

    def mend(self, matcher: LLMatcher, words: NDArray[np.int32]) -> None:
        """Replace a wrongly forced special token with the start of its text, and allow tags where their text fits."""
        token_id = _only_token(words)
        pieces = self.pieces.get(token_id, [])
        if pieces and not matcher.validate_tokens([token_id]) and matcher.validate_tokens(pieces[:1]):
            words[:] = 0
            _allow(words, pieces[0])
        for tag in self.tags:
            pieces = self.pieces[tag]
            if _is_allowed(words, pieces[0]) and matcher.validate_tokens(pieces) == len(pieces):
                _allow(words, tag)

    def spell(self, matcher: LLMatcher, token_id: int) -> list[int]:
        """Return the tokens to give a matcher for a token: itself if the grammar allows it, else its spelling."""
        is_tag = token_id in self.tags and not matcher.validate_tokens([token_id])
        return self.pieces[token_id] if is_tag else [token_id]


def read_spellings(card: ModelCard, tokenizer: LLTokenizer) -> Spellings:
    """Return the spellings of a model's special tokens, read from its tokenizer file."""
    apart = [
        token for token in read_added_tokens(card.tokenizer_file)
        if token.content and token.id < tokenizer.vocab_size and tokenizer.is_special_token(token.id)
    ]  # fmt: skip
    rule = card.generate
    known = {*_CALL_TAGS, *((rule.reasoning_tags if rule is not None else None) or ())}
    pieces = {
        token.id: [piece for char in token.content for piece in tokenizer.greedy_tokenize(char)] for token in apart
    }
    return Spellings(pieces, tuple(token.id for token in apart if not token.special and token.content in known))


def _only_token(words: NDArray[np.int32]) -> int:
    """Return the only token that a mask allows, or -1 if it allows none or several."""
    if np.count_nonzero(words) != 1:
        return -1
    place = int(words.astype(np.bool_).argmax())
    word = int(words[place]) & 0xFFFFFFFF
    return -1 if word & (word - 1) else place * 32 + word.bit_length() - 1


def _is_allowed(words: NDArray[np.int32], token_id: int) -> bool:
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _allow(words: NDArray[np.int32], token_id: int) -> None:
    words.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
