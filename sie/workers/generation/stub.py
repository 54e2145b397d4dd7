"""Runs a stub that generates: it repeats its prompt, from paged memory that holds tokens.

`sie.catalog.stub` defines the rule. The stub reads the prompt from its blocks, as a model reads keys and values, so
that a wrong block shows in the text. Never imports torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sie.catalog.stub import END_OF_TEXT, scripted_answer
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal
from sie.values.generate import TokenLogprob
from sie.workers.device.faults import DeviceLostError
from sie.workers.model_api import Chosen, Draw, Matcher, Scored, Slot
from sie.workers.runners.stub_faults import StubFaults

_VOCABULARY: Final = END_OF_TEXT + 1
_LN2: Final = math.log(2.0)
_LOGPROBS: Final = -_LN2 * np.arange(1, _VOCABULARY + 1)
"""Log probability of a token by its distance from the expected token."""


class StubGenerator:
    """Continues prompts with themselves, after the delays of the stub's options.

    Building it takes the card's `load_ms`.
    """

    dtype = "float32"

    def __init__(self, card: ModelCard, block_tokens: int, slot: int = 0) -> None:
        """Take a stub's card; slot is the worker's slot."""
        if card.stub is None:
            raise Internal(f"model {card.id!r} is not a stub")
        self.card = card
        self.block_tokens = block_tokens
        self.num_blocks = card.stub.blocks
        self.restart_length = 0
        self.vocab_size = _VOCABULARY
        self.memory_bytes = card.stub.memory_mb << 20
        self._options = card.stub
        self._faults = StubFaults(card.stub, slot) if card.stub.has_faults else None
        self._memory = np.full((self.num_blocks, block_tokens), -1, np.int32)
        time.sleep(card.stub.load_ms / 1e3)
        if self._faults is not None:
            self._faults.load()

    def run_step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Sequence[tuple[Chosen, ...]]:
        """Return the tokens that each slot's draws chose; sleep `latency_ms`, and `per_token_us` for each token."""
        for source, target in copies:
            self._memory[target] = self._memory[source]
        for slot in slots:
            positions = np.arange(slot.start, slot.start + len(slot.token_ids))
            blocks = np.asarray(slot.blocks)[positions // self.block_tokens]
            self._memory[blocks, positions % self.block_tokens] = slot.token_ids
        read = [self._read(slot) if slot.draws or self._faults is not None else None for slot in slots]
        if self._faults is not None:
            self._faults.step([_bytes_of(ids) for ids in read if ids is not None])
        self._spend(sum(len(slot.token_ids) for slot in slots))
        for slot in slots:
            if slot.scored is not None:
                _score(slot.scored, int(self._memory[slot.blocks[0], 0]))
        return [
            tuple(_choose(draw, ids, is_scripted=self._options.scripted) for draw in slot.draws)
            if ids is not None
            else ()
            for slot, ids in zip(slots, read, strict=True)
        ]

    def least_length(self, length: int) -> int:
        """Return 0: nothing here is rotated."""
        del length
        return 0

    def prepare_grammars(self) -> None:
        """Do nothing: a stub has no vocabulary to read."""

    def compile_grammar(self, kind: str, text: str) -> Matcher:
        """Return a matcher of the grammar's literal text, for any kind, after `grammar_ms`; a scripted stub is free."""
        time.sleep(self._options.grammar_ms / 1e3)
        if self._options.scripted:
            return FreeMatcher()
        if not text.strip():
            raise BadRequest(f"the {kind} grammar is blank")
        return LiteralMatcher(text.encode())

    def _read(self, slot: Slot) -> NDArray[np.int32]:
        """Return the ids (t,) of a slot's sequence up to the end of the slot."""
        end = slot.start + len(slot.token_ids)
        num_blocks = -(-end // self.block_tokens)
        return self._memory[list(slot.blocks[:num_blocks])].reshape(-1)[:end]

    def _spend(self, num_tokens: int) -> None:
        options = self._options
        if 0 < options.lost_tokens < num_tokens:
            raise DeviceLostError(f"CUDA error: unspecified launch failure (a stub's step of {num_tokens} tokens)")
        if 0 < options.oom_tokens < num_tokens:
            raise MemoryError(f"a stub's step of {num_tokens} tokens, over oom_tokens")
        time.sleep(options.latency_ms / 1e3 + num_tokens * options.per_token_us / 1e6)


class LiteralMatcher:
    """Follows one text to its end."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._num_taken = 0

    def fill_mask(self, allowed: NDArray[np.int32]) -> None:
        """Allow only the text's next byte, or the end of text after its last byte."""
        token_id = END_OF_TEXT if self.is_complete else self._text[self._num_taken]
        allowed[:] = 0
        allowed.view(np.uint32)[token_id >> 5] = 1 << (token_id & 31)

    def consume(self, token_id: int) -> None:
        """Advance to the next byte. Raises Internal if the token is not that byte."""
        if self.is_complete or self._text[self._num_taken] != token_id:
            raise Internal(f"token {token_id} does not follow the grammar")
        self._num_taken += 1

    def fork(self) -> LiteralMatcher:
        """Return a copy at the same position."""
        other = LiteralMatcher(self._text)
        other._num_taken = self._num_taken
        return other

    @property
    def is_complete(self) -> bool:
        """Whether the whole text has been consumed."""
        return self._num_taken == len(self._text)


class FreeMatcher:
    """Allows every token."""

    is_complete = False

    def fill_mask(self, allowed: NDArray[np.int32]) -> None:
        """Allow all."""
        allowed[:] = -1

    def consume(self, token_id: int) -> None:
        """Take any token."""

    def fork(self) -> FreeMatcher:
        """Return itself: it has no state."""
        return self


def _bytes_of(ids: NDArray[np.int32]) -> bytes:
    return ids[(ids >= 0) & (ids < END_OF_TEXT)].astype(np.uint8).tobytes()


def _score(scored: Scored, first_id: int) -> None:
    """Score each token as if the prompt ended before it: the expected token is then the prompt's first, from memory."""
    ranks = np.arange(scored.top.shape[1])
    scored.own[:] = _LOGPROBS[(scored.targets - first_id) % _VOCABULARY]
    scored.top_ids[:] = (first_id + ranks) % _VOCABULARY
    scored.top[:] = _LOGPROBS[ranks]


def _expected(draw: Draw, ids: NDArray[np.int32], *, is_scripted: bool) -> int:
    """Return the token that comes after ids (t,)."""
    num_prompt = draw.num_prompt
    number = len(ids) - num_prompt
    if is_scripted:
        answer = scripted_answer(_bytes_of(ids[:num_prompt]))
        return answer[number] if number < len(answer) else END_OF_TEXT
    ends = number == num_prompt and END_OF_TEXT not in draw.forbidden
    return END_OF_TEXT if ends else int(ids[(draw.choice + number) % num_prompt])


def _choose(draw: Draw, ids: NDArray[np.int32], *, is_scripted: bool) -> Chosen:
    """Return the token after ids (t,) for a draw."""
    expected = _expected(draw, ids, is_scripted=is_scripted)
    logprobs = np.roll(_LOGPROBS, expected)
    scores = logprobs.copy()
    for token_id, bias in draw.sampling.logit_bias:
        scores[token_id] += bias
    scores[list(draw.forbidden)] = -np.inf
    if draw.matcher is not None:
        allowed = np.empty(-(-_VOCABULARY // 32), np.int32)
        draw.matcher.fill_mask(allowed)
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:_VOCABULARY]
        scores[bits == 0] = -np.inf
    token_id = int(scores.argmax())
    if draw.logprobs is None:
        return Chosen(token_id)
    top = tuple(((expected + rank) % _VOCABULARY, float(_LOGPROBS[rank])) for rank in range(draw.logprobs))
    return Chosen(token_id, TokenLogprob(float(logprobs[token_id]), top))
