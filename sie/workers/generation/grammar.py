"""Turns a grammar's text of a known kind into a matcher over one model's vocabulary, within limits.

llguidance does the work.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal, SieError
from sie.values.generate import JSON_SPACE
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
    verbose_errors=False,  # verbose ones show the parser's insides
    initial_lexer_fuel=100_000,  # a tenth of the default, which lets one mask take seconds, for which every stream waits
)
_TOO_COMPLEX: Final = "lexer error"
"""How the library's words begin where a regular expression reaches a limit behind its first token."""
_MAX_THREADS: Final = 4
"""For the masks of a step: more are over before they have begun."""


class GrammarMatcher:
    """How far one choice has followed its grammar; a `Matcher`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, spellings: Spellings) -> None:
        """Take the tokenizer's vocab_size, which may be larger than the model's."""
        self._matcher = matcher
        self._spellings = spellings
        self._words = np.empty(-(-vocab_size // 32), np.int32)

    def fill_mask(self, allowed: NDArray[np.int32]) -> None:
        """Write which tokens may come next; asked again, the same. Raises BadRequest when the grammar is too complex.

        Behind a complete text the only one is an end of text.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        error = self._mend(self._words)
        if error is not None:
            raise error
        allowed[:] = self._words[: len(allowed)]

    def consume(self, token_id: int) -> None:
        """Take the token that was chosen. Raises BadRequest as `fill_mask` does, Internal for one that was not allowed."""
        if not self._matcher.consume_tokens(self._spellings.spell(self._matcher, token_id)):
            problem = _problem_of(self._matcher)
            if problem.startswith(_TOO_COMPLEX):
                raise BadRequest(f"grammar: {problem}")
            raise Internal(f"token {token_id} does not follow the grammar: {problem}")

    def fork(self) -> GrammarMatcher:
        """Return another one that has come as far; it costs next to nothing, compiling may take seconds."""
        return GrammarMatcher(self._matcher.deep_copy(), len(self._words) * 32, self._spellings)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-text token may follow."""
        return self._matcher.is_stopped()

    @staticmethod
    def fill_masks(matchers: Sequence[Matcher], words: NDArray[np.int32]) -> list[SieError | None]:
        """Write the masks of several matchers of one model at once, on several threads (`masks.FillMasks`).

        No two of them are the same. The interpreter lock is free meanwhile.
        """
        own = [matcher for matcher in matchers if isinstance(matcher, GrammarMatcher)]
        assert len(own) == len(matchers)
        width = len(own[0]._words)
        # A tokenizer with more tokens than its model has wider masks.
        found = words if width == words.shape[1] else np.empty((len(own), width), np.int32)
        _executor().unsafe_compute_mask_ptr(
            [(matcher._matcher, row) for row, matcher in enumerate(own)], found.ctypes.data, width * 4, len(own)
        )
        errors = [matcher._mend(row) for matcher, row in zip(own, found, strict=True)]
        if found is not words:
            words[:] = found[:, : words.shape[1]]
        return errors

    def _mend(self, words: NDArray[np.int32]) -> SieError | None:
        """Make the library's mask the whole truth; return what kept it from making one."""
        if self._matcher.is_error():
            return BadRequest(f"grammar: {_problem_of(self._matcher)}")
        self._spellings.mend(self._matcher, words)
        return None


class GrammarCompiler:
    """The grammars of one model. Used from any thread."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._read: tuple[LLTokenizer, Spellings] | None = None
        self._lock = threading.Lock()

    def compile(self, kind: str, text: str, vocab_size: int) -> Matcher:
        """Return a fresh matcher over the first vocab_size tokens. Raises BadRequest for a grammar that is none."""
        if kind not in _FORMS:
            raise BadRequest(f"grammar kind {kind!r} is not one of {', '.join(_FORMS)}")
        try:
            grammar = _FORMS[kind](text)
            vocabulary, spellings = self._vocabulary(vocab_size)
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise BadRequest(f"grammar: {error}") from error
        if matcher.is_error():
            raise BadRequest(f"grammar: {_problem_of(matcher)}")
        return GrammarMatcher(matcher, vocabulary.vocab_size, spellings)

    def read_vocabulary(self, vocab_size: int) -> None:
        """Read the tokens before a grammar asks for them: of 262,144 it takes seconds, which a request should not wait."""
        self._vocabulary(vocab_size)

    def _vocabulary(self, vocab_size: int) -> tuple[LLTokenizer, Spellings]:
        with self._lock:
            if self._read is None:
                tokenizer = _read_tokenizer(self._card, vocab_size)
                self._read = tokenizer, read_spellings(self._card, tokenizer)
            return self._read


@functools.cache
def _executor() -> LLExecutor:
    """Return this process's threads for masks: half of its cores at most, as a forward pass runs on the same ones."""
    return LLExecutor(min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2)))


def _problem_of(matcher: LLMatcher) -> str:
    """Return what is wrong, without the library's view of its own insides."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "nothing that it allows can follow" if text.startswith("NoExtension") else text


def _read_tokenizer(card: ModelCard, vocab_size: int) -> LLTokenizer:
    """Return the model's tokenizer as llguidance has it, of at least vocab_size tokens. Raises BadRequest."""
    rule = card.generate
    assert rule is not None
    ends = list(rule.eos_token_ids) or None
    with reading(card.tokenizer_file, "llguidance"):
        try:
            return LLTokenizer(card.tokenizer_file, n_vocab=vocab_size, eos_token=ends)
        except ValueError:  # it may have tokens that the model has not
            try:
                return LLTokenizer(card.tokenizer_file, eos_token=ends)
            except ValueError as error:
                raise BadRequest(f"model '{card.id}' cannot follow a grammar: {error}") from error
