"""Cuts pairs of texts to a number of tokens as the tokenizers library does it, without the memory that it takes.

Source: tokenizers 0.22, `truncate_encodings` with LongestFirst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import tokenizers

from sie.values.card import Side

Cuts = dict[int, int]
"""Maps the number of each item that was cut to the most tokens that the model reads of it. Functions add to it."""
_MAX_COUNTED_CHARS: Final = 1 << 18
"""All tokens of a longer text are not counted, to find out whether it is the longer one of a pair."""


class Lengths:
    """The token counts of whole texts of which only the beginnings are encoded: a query, at place 0, and its documents."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._known: dict[int, float] = {}

    def any_is_cut(self, heads: Sequence[str]) -> bool:
        """Return whether any of the first texts is longer than its head, its encoded beginning."""
        return any(len(head) < len(text) for head, text in zip(heads, self._texts, strict=False))

    def of(self, place: int, head: str, num_tokens: int) -> float:
        """Return the number of tokens of a whole text, whose head has num_tokens. For an immense text it is an estimate."""
        text = self._texts[place]
        if len(head) == len(text):
            return num_tokens
        if place not in self._known:
            if len(text) > _MAX_COUNTED_CHARS:
                self._known[place] = num_tokens * len(text) / len(head)
            else:
                [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
                self._known[place] = _count_whole(encoding)
        return self._known[place]


def cut_pairs(
    tokenizer: tokenizers.Tokenizer,
    query: str,
    documents: Sequence[str],
    limit: int,
    cuts: Cuts,
    *,
    lengths: Lengths | None = None,
    side: Side = "right",
) -> list[tokenizers.Encoding]:
    """Return the encodings of pairs with at most limit tokens, special ones included, cut as the library does it.

    If both texts of a pair are cut and the room is odd, the text that was longer when whole keeps one token more. lengths
    knows the whole lengths of texts that are given here only in part. Texts lose tokens on the given side. cuts gets the
    documents whose pairs were cut. Raises the library's TypeError for a text that is not valid Unicode.
    """
    lengths = lengths or Lengths(tokenizer, [query, *documents])
    room = limit - tokenizer.num_special_tokens_to_add(True)
    pairs: list[tokenizers.Encoding] = []
    whole_query, *encoded = tokenizer.encode_batch_fast([query, *documents], add_special_tokens=False)
    query_tokens = _count_whole(whole_query)
    for index, document in enumerate(encoded):
        head = tokenizers.Encoding.merge([whole_query], growing_offsets=False)  # a copy: it is cut in place
        document_tokens = _count_whole(document)
        shorter, longer = sorted((query_tokens, document_tokens))
        if shorter + longer > room:
            cuts[index] = limit
        longer = min(longer, max(shorter, room - shorter))
        is_head_longer = query_tokens > document_tokens
        if shorter + longer > room:
            shorter, longer = room // 2, room - room // 2
            if shorter < longer:
                wholes = lengths.of(0, query, query_tokens), lengths.of(index + 1, documents[index], document_tokens)
                is_head_longer = wholes[0] > wholes[1]
        cut_tokens(head, longer if is_head_longer else shorter, side)
        cut_tokens(document, shorter if is_head_longer else longer, side)
        pairs.append(tokenizer.post_process(head, document))
    return pairs


def cut_tokens(encoding: tokenizers.Encoding, num_tokens: int, side: Side) -> None:
    """Cut a text's tokens on a side, in place, to be joined with another text's by `post_process`.

    The library keeps all that it cuts off in pieces of num_tokens, and joins each with each piece of the other text.
    Only one token is cut off in the second call, and the pieces of the first are dropped.
    """
    encoding.truncate(num_tokens + 1, direction=side)
    encoding.truncate(num_tokens, direction=side)


def _count_whole(encoding: tokenizers.Encoding) -> int:
    """Return the number of tokens of a text, including those cut off by the tokenizer's limit."""
    return len(encoding) + sum(map(len, encoding.overflowing))
