"""Opens the tokenizer files of a model, and adapts the library's tokenizer to its card. Reads no text."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import tokenizers

from sie.frontend.inputs.guarded_tokenizer import GuardedTokenizer
from sie.frontend.inputs.text_bounds import GrowthError, max_chars
from sie.frontend.inputs.text_rules import RulesError, rules_to_try
from sie.native.preempt import preempted
from sie.runtime.ends_of_work import ENDS_OF_WORK
from sie.values.card import ModelCard
from sie.values.errors import Internal


def open_tokenizer(
    card: ModelCard, path: str, limit: int | None, loop: asyncio.AbstractEventLoop | None
) -> tokenizers.Tokenizer:
    """Return a file's tokenizer without padding, and truncated only at limit, on the card's side.

    With the event loop of a server, rules that may take long are guarded. Raises Internal for a file that cannot be used.
    """
    try:
        with preempted("tokenizers"):
            tokenizer = tokenizers.Tokenizer.from_file(path)
    except ENDS_OF_WORK:
        raise
    except BaseException as exc:  # bare Exception for a missing and for a malformed file, and panics of the library
        raise Internal(f"Model '{card.id}' has no readable tokenizer") from exc
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if limit is not None:
        tokenizer.enable_truncation(limit, direction=card.truncation_side)  # pyright: ignore[reportUnknownMemberType]  # untyped
    tokenizer.encode_special_tokens = card.splits_special_tokens
    try:
        rules = rules_to_try(tokenizer)
    except RulesError as error:
        raise _unusable(card, error) from None
    if not rules or loop is None:
        return tokenizer
    return cast("tokenizers.Tokenizer", GuardedTokenizer(card.id, tokenizer, rules, loop))


def _unusable(card: ModelCard, error: Exception) -> Internal:
    return Internal(f"Model '{card.id}' has a tokenizer that cannot be used: {error}")


def own_pool(tokenizer: tokenizers.Tokenizer) -> ThreadPoolExecutor | None:
    """Return the thread on which all texts of a guarded tokenizer must be read; None for any other tokenizer."""
    return cast("Any", tokenizer).pool if isinstance(cast("object", tokenizer), GuardedTokenizer) else None


def filler_of(card: ModelCard, tokenizer: tokenizers.Tokenizer) -> list[int] | None:
    """Return a list of padding ids of the card's length, or None without padding. Raises Internal for an unknown token."""
    padding = card.padding
    if padding is None:
        return None
    token_id = tokenizer.token_to_id(padding.token)
    if token_id is None:
        raise Internal(f"Model '{card.id}' has a tokenizer that does not know its padding token {padding.token!r}")
    return [token_id] * padding.length


def most_chars(card: ModelCard, tokenizer: tokenizers.Tokenizer) -> int:
    """Return the most characters that may be read of one text. Raises Internal for a tokenizer without a bound."""
    try:
        return max_chars(tokenizer)
    except GrowthError as error:
        raise _unusable(card, error) from None


def with_marker(tokenizer: tokenizers.Tokenizer, prefix: str) -> tokenizers.Tokenizer:
    """Make the tokenizer read a prefix's marker as one token, if the vocabulary has it.

    Otherwise `[unused0] ` would be split, and a lowercasing normaliser would hide `[Q] `. A marker outside the
    vocabulary stays ordinary text. Source: sentence_transformers 6.2 multi_vector_encoder/model.py.
    """
    words = prefix.split(None, 1)
    for marker in (prefix, words[0]) if words else ():
        if tokenizer.token_to_id(marker) is None:
            continue
        if tokenizer.encode(marker, add_special_tokens=False).tokens != [marker]:
            token = tokenizers.AddedToken(marker, normalized=False, special=True)
            tokenizer.add_special_tokens([token])  # pyright: ignore[reportUnknownMemberType]  # untyped
        break
    return tokenizer
