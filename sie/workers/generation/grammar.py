"""Compiles a grammar of a known kind into a matcher over one model's vocabulary, within limits, with llguidance."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal, SieError
from sie.values.generate import GRAMMAR, JSON_SPACE
from sie.workers.generation.tags import Spellings, read_spellings
from sie.workers.model_api import Matcher
from sie.workers.stall_notices import reading

_FORMS: dict[str, Any] = {
    "json_schema": functools.partial(LLMatcher.grammar_from_json_schema, defaults={"whitespace_pattern": JSON_SPACE}),
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
    "llguidance": str,
}
_LIMITS = LLParserLimits(
    verbose_errors=False,  # verbose errors show the parser's internals
    initial_lexer_fuel=100_000,  # a tenth of the default, with which one mask can delay every stream by seconds
    # A fifth of the default, for the same reason. An object of 495 optional properties needs over 7,000 items, and one
    # of more has too many for the limit of a row.
    step_max_items=10_000,
)
_TOO_COMPLEX: Final = "lexer error"
"""The start of the library's message when a regular expression reaches a limit after its first token."""
_START_S: Final = 3.0
"""Before the vocabulary is read beside steps: frontends read their tokenizers then, and other workers import torch."""
_MAX_THREADS: Final = 4
"""For the masks of a step: they are done before more threads could start."""


class GrammarMatcher:
    """Follows one choice through its grammar; a `Matcher`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, spellings: Spellings) -> None:
        """Take the tokenizer's vocab_size, which may be larger than the model's."""
        self._matcher = matcher
        self._spellings = spellings
        self._words = np.empty(-(-vocab_size // 32), np.int32)

    def fill_mask(self, allowed: NDArray[np.int32]) -> None:
        """Write the mask of the tokens that may come next. Raises BadRequest when the grammar is too complex.

        A repeated call gives the same mask. After a complete text only an end-of-text token may follow.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        error = self._mend(self._words)
        if error is not None:
            raise error
        allowed[:] = self._words[: len(allowed)]

    def consume(self, token_id: int) -> None:
        """Take the chosen token. Raises BadRequest as `fill_mask` does, Internal for a token that was not allowed."""
        if not self._matcher.consume_tokens(self._spellings.spell(self._matcher, token_id)):
            problem = _problem_of(self._matcher)
            if problem.startswith(_TOO_COMPLEX):
                raise refused(problem)
            raise Internal(f"token {token_id} does not follow the grammar: {problem}")

    def fork(self) -> GrammarMatcher:
        """Return a copy at the same position. A copy costs almost nothing, while compiling may take seconds."""
        return GrammarMatcher(self._matcher.deep_copy(), len(self._words) * 32, self._spellings)

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-text token may follow."""
        return self._matcher.is_stopped()

    @staticmethod
    def fill_masks(matchers: Sequence[Matcher], words: NDArray[np.int32]) -> list[SieError | None]:
        """Write the masks of several matchers of one model at once, on several threads (`masks.FillMasks`).

        All matchers must differ. The interpreter lock is released meanwhile.
        """
        own = [matcher for matcher in matchers if isinstance(matcher, GrammarMatcher)]
        assert len(own) == len(matchers)
        width = len(own[0]._words)
        # A tokenizer that has more tokens than its model gives wider masks.
        found = words if width == words.shape[1] else np.empty((len(own), width), np.int32)
        _executor().unsafe_compute_mask_ptr(
            [(matcher._matcher, row) for row, matcher in enumerate(own)], found.ctypes.data, width * 4, len(own)
        )
        errors = [matcher._mend(row) for matcher, row in zip(own, found, strict=True)]
        if found is not words:
            words[:] = found[:, : words.shape[1]]
        return errors

    def _mend(self, words: NDArray[np.int32]) -> SieError | None:
        """Correct the library's mask, or return the error that kept it from making one."""
        if self._matcher.is_error():
            return refused(_problem_of(self._matcher))
        self._spellings.mend(self._matcher, words)
        return None


class GrammarCompiler:
    """Compiles the grammars of one model. Used from any thread."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._read: tuple[LLTokenizer, Spellings] | None = None
        self._lock = threading.Lock()

    def compile(self, kind: str, text: str, vocab_size: int) -> Matcher:
        """Return a fresh matcher over the first vocab_size tokens. Raises BadRequest for an invalid grammar."""
        if kind not in _FORMS:
            raise BadRequest(f"grammar kind {kind!r} is not one of {', '.join(_FORMS)}")
        try:
            grammar = _FORMS[kind](text)
            vocabulary, spellings = self._vocabulary(vocab_size)
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise refused(str(error)) from error
        if matcher.is_error():
            raise refused(_problem_of(matcher))
        return GrammarMatcher(matcher, vocabulary.vocab_size, spellings)

    def read_vocabulary(self, vocab_size: int) -> None:
        """Read the tokens, unless they were read before."""
        self._vocabulary(vocab_size)

    def start_reading(self, vocab_size: int) -> None:
        """Read the tokens on a thread of their own soon: 262,144 take three seconds, and the model can answer before.

        A grammar that comes earlier reads them at once.
        """
        reading = threading.Timer(_START_S, self._try_reading, (vocab_size,))
        reading.name, reading.daemon = "read-vocabulary", True
        with suppress(RuntimeError):  # for example a thread limit: the first grammar reads them
            reading.start()

    def _try_reading(self, vocab_size: int) -> None:
        with suppress(BadRequest):  # a request with a grammar will get the error
            self._vocabulary(vocab_size)

    def _vocabulary(self, vocab_size: int) -> tuple[LLTokenizer, Spellings]:
        with self._lock:
            if self._read is None:
                tokenizer = _read_tokenizer(self._card, vocab_size)
                self._read = tokenizer, read_spellings(self._card, tokenizer)
            return self._read


@functools.cache
def _executor() -> LLExecutor:
    """Return this process's mask threads: at most half of its cores, as a forward pass runs on the same cores."""
    return LLExecutor(min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2)))


def refused(problem: str) -> BadRequest:
    """Return the error for a grammar. The frontend knows by which field the client gave it."""
    return BadRequest(f"{GRAMMAR}: {problem}", extras={"param": GRAMMAR})


def _problem_of(matcher: LLMatcher) -> str:
    """Return the matcher's error text, without the library's internals."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "no token can follow" if text.startswith("NoExtension") else text


def _read_tokenizer(card: ModelCard, vocab_size: int) -> LLTokenizer:
    """Return the model's tokenizer in llguidance's form, with at least vocab_size tokens. Raises BadRequest."""
    rule = card.generate
    assert rule is not None
    ends = list(rule.eos_token_ids) or None
    with reading(card.tokenizer_file, "llguidance"):
        try:
            return LLTokenizer(card.tokenizer_file, n_vocab=vocab_size, eos_token=ends)
        except ValueError:  # the tokenizer may have more tokens than the model
            try:
                return LLTokenizer(card.tokenizer_file, eos_token=ends)
            except ValueError as error:
                raise BadRequest(f"model '{card.id}' cannot follow a grammar: {error}") from error
