"""Holds a running request to generate: a job, and a sequence of tokens for each of its choices. Pure.

A job starts with one sequence, its prompt, which draws the first token of every choice. Then each choice has its own
sequence. `Job.request` is opaque here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.values.generate import GenerateTask, TokenBans, TokenLogprob
from sie.workers.generation.kv import first_key
from sie.workers.generation.prompt_scores import PromptScores
from sie.workers.model_api import Draw, Matcher, Scored, Seen
from sie.workers.runners.repeated_ngrams import followers

_LEAST_CAPACITY = 32
_NO_BANS = TokenBans()


class Tokens:
    """The token ids of one sequence, which only grows."""

    __slots__ = ("_ids", "_length")

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        """Start with a copy of token_ids (t,)."""
        self._length = len(token_ids)
        self._ids = np.empty(self._length + _LEAST_CAPACITY, np.int32)
        self._ids[: self._length] = token_ids

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Append one token id."""
        if self._length == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
        self._ids[self._length] = token_id
        self._length += 1

    def view(self, start: int, end: int) -> NDArray[np.int32]:
        """Return a view of the ids at positions start to end - 1, valid until the next `append`."""
        return self._ids[start : min(end, self._length)]


class SeenTokens:
    """The distinct tokens of one sequence with their counts. Reading them costs time for the new tokens alone."""

    __slots__ = ("_counts", "_ids", "_num_read", "_places")

    def __init__(self, start: int = 0) -> None:
        """Count the tokens from position start on."""
        self._num_read = start
        self._ids, self._counts = Tokens(np.empty(0, np.int32)), Tokens(np.empty(0, np.int32))
        self._places: dict[int, int] = {}

    def read(self, tokens: Tokens) -> Seen:
        """Return views of what the sequence has, valid until the next read. Its tokens only grow between reads."""
        new = tokens.view(self._num_read, len(tokens))
        if not self._places:
            ids, counts = np.unique(new, return_counts=True)
            self._ids, self._counts = Tokens(ids), Tokens(counts.astype(np.int32))
            self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        else:
            for token_id in new.tolist():
                self._count(token_id)
        self._num_read = len(tokens)
        return Seen(self._ids.view(0, len(self._ids)), self._counts.view(0, len(self._counts)))

    def _count(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts.view(place, place + 1)[0] += 1

    def copy(self) -> SeenTokens:
        """Return a copy for another sequence with the same beginning."""
        other = SeenTokens(self._num_read)
        other._ids = Tokens(self._ids.view(0, len(self._ids)))
        other._counts = Tokens(self._counts.view(0, len(self._counts)))
        other._places = dict(self._places)
        return other


class Job:
    """One request to generate. A lower number is older."""

    __slots__ = (
        "arrived_ns", "bans", "decoder_start_id", "first_token_ns", "forbidden", "forbidden_early", "is_alone", "is_proven", "is_redrawn", "matchers", "num_cached",
        "num_encoded", "num_generated", "num_prompt", "number", "request", "scores", "sequences", "started_ns", "stops", "task",
    )  # fmt: skip

    def __init__(
        self,
        request: Any,
        task: GenerateTask,
        num_prompt: int,
        *,
        number: int,
        eos_token_ids: tuple[int, ...],
        bans: TokenBans = _NO_BANS,
        decoder_start_id: int | None = None,
        is_alone: bool = False,
        arrived_ns: int = 0,
    ) -> None:
        """Take a prompt's length; the token decoder_start_id, if any, becomes its last."""
        self.request = request
        self.arrived_ns = arrived_ns
        self.task = task
        self.decoder_start_id = decoder_start_id
        self.num_encoded = 0 if decoder_start_id is None else num_prompt
        """First tokens of the prompt, which an encoder reads; penalties do not count them."""
        self.num_prompt = num_prompt + (decoder_start_id is not None)
        self.number = number
        self.is_alone = is_alone
        """Whether its request was running when a worker died: until it is proven, it shares no step."""
        self.is_proven = False
        """Whether it has survived a decode step: until then its request is a suspect if the worker dies."""
        self.is_redrawn = False
        """Whether a step that had begun ahead could not give its token: from then on it runs in steps that do not."""
        ends = () if task.ignore_eos else eos_token_ids
        self.stops = frozenset((*ends, *task.stop_token_ids))
        self.bans = bans
        self.forbidden = tuple((set(eos_token_ids) - self.stops).union(bans.always))
        self.forbidden_early = tuple(self.stops.union(eos_token_ids, bans.always))
        """Tokens that no choice may have among its first `min_tokens`."""
        self.scores = None if task.prompt_logprobs is None else PromptScores(num_prompt, task.prompt_logprobs)
        self.matchers: list[Matcher] = []
        """One for each choice, once its grammar, if any, is compiled."""
        self.sequences: list[Sequence] = []
        """Its sequences that still run or have unsent output."""
        self.num_cached = self.num_generated = 0
        self.started_ns = self.first_token_ns = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether its draws depend on the tokens before."""
        sampling = self.task.sampling
        return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)

    @property
    def must_be_alone(self) -> bool:
        """Whether it shares no step."""
        return self.is_alone and not self.is_proven

    @property
    def needs_host(self) -> bool:
        """Whether the host must see a token before the next one can be drawn, as for a grammar and to count tokens."""
        return bool(self.matchers) or self.counts_tokens or self.bans.depend_on_text or self.is_redrawn

    def banned(self, tokens: Tokens, position: int) -> tuple[int, ...]:
        """Return what the checkpoint forbids at this position after these tokens, besides what it always forbids."""
        bans = self.bans
        first = bans.first if position == self.num_prompt else ()
        if not bans.depend_on_text:
            return first
        ids = tokens.view(self.num_encoded, len(tokens))
        return (*first, *_completing(bans.sequences, ids), *followers(ids, bans.ngram_size))

    def choice_draw(self, choice: int, position: int, seen: Seen | None, banned: tuple[int, ...]) -> Draw:
        """Return the draw of a choice's next token, at this position, after these tokens and without those banned."""
        task = self.task
        is_early = position < self.num_prompt + task.min_tokens
        forbidden = self.forbidden_early if is_early else self.forbidden
        return Draw(
            task.sampling,
            choice,
            position,
            seen,
            forbidden + banned,
            task.logprobs,
            self.matchers[choice] if self.matchers else None,
            self.num_prompt,
        )


class Sequence:
    """One choice of a job. Until the prompt has been read, the first choice represents all."""

    __slots__ = (
        "age", "begun", "blocks", "choice", "finish", "first_key", "is_first", "job", "keys", "logprobs", "num_computed",
        "num_sent", "num_unsent", "rotary_length", "seen", "tokens",
    )  # fmt: skip

    def __init__(self, job: Job, choice: int, tokens: Tokens, rotary_length: int = 0) -> None:
        """Start with a prompt, whose positions have the rotary factors of rotary_length (`Slot`)."""
        self.job = job
        self.choice = choice
        self.age = (job.number, choice)
        """A smaller age is older; younger sequences wait for older ones."""
        self.tokens = tokens
        self.seen = SeenTokens(job.num_encoded)
        self.blocks: list[int] = []
        self.rotate_as(rotary_length)
        self.num_computed = 0
        """Number of positions whose keys and values are in its blocks, or will be after the steps under way."""
        self.begun: list[Part] = []
        """Its parts of the steps under way, oldest first. A step counts only while its part is here."""
        self.num_sent = self.num_unsent = 0
        """Sent and unsent tokens of the answer."""
        self.logprobs: list[TokenLogprob] = []
        """Of the unsent tokens, if requested."""
        self.finish = ""
        self.is_first = choice == 0
        """Whether its next draw is for all choices, since it holds the prompt."""

    def rotate_as(self, rotary_length: int) -> None:
        """Take the rotary factors of another length. The keys and values computed before become invalid."""
        self.rotary_length = rotary_length
        self.first_key = first_key(self.job.task.salt, rotary_length)
        self.keys: list[bytes] = []
        """Keys of its full blocks, as far as they were needed."""

    @property
    def num_left(self) -> int:
        """Tokens that must be read before the next draw, with those that steps under way draw."""
        return len(self.tokens) - self.num_computed + (self.num_drawing if self.begun else 0)  # asked often

    @property
    def num_drawing(self) -> int:
        """Tokens that steps under way draw."""
        return sum([part.is_last for part in self.begun]) if self.begun else 0

    @property
    def num_choices(self) -> int:
        """Choices that it represents."""
        return self.job.task.num_choices if self.is_first else 1

    @property
    def num_generated(self) -> int:
        """Tokens of its answer."""
        return len(self.tokens) - self.job.num_prompt

    @property
    def max_shared(self) -> int:
        """Most leading tokens that may be shared instead of run: not the last, nor unscored ones of a scored prompt."""
        scores = self.job.scores
        return len(self.tokens) - 1 if scores is None else min(len(self.tokens) - 1, scores.num_known)

    def scored(self, count: int) -> Scored | None:
        """Return the prompt tokens to score while the next `count` tokens are read."""
        job = self.job
        if job.scores is None:
            return None
        return job.scores.wanted(self.tokens.view(0, job.num_prompt), self.num_computed, count)

    def draws(self) -> tuple[Draw, ...]:
        """Return the draws after its last token, known or not; empty if the request only reads the prompt."""
        job = self.job
        if not job.task.max_tokens:
            return ()
        seen = self.seen.read(self.tokens) if job.counts_tokens else None
        choices = range(job.task.num_choices) if self.is_first else (self.choice,)
        position = len(self.tokens) + self.num_drawing
        banned = job.banned(self.tokens, position)
        return tuple([job.choice_draw(choice, position, seen, banned) for choice in choices])

    def fork(self, choice: int) -> Sequence:
        """Return another choice of the same prompt, with the same blocks; the caller must `hold` them."""
        other = Sequence(self.job, choice, Tokens(self.tokens.view(0, len(self.tokens))), self.rotary_length)
        other.seen = self.seen.copy()
        other.blocks = list(self.blocks)
        other.keys = list(self.keys)
        other.num_computed = self.num_computed
        return other


class Part(NamedTuple):
    """The next `count` tokens of a sequence, from position start on. is_last: no more follow, so a token is drawn."""

    sequence: Sequence
    count: int
    is_last: bool
    start: int

    @property
    def is_current(self) -> bool:
        """Whether its result counts: its sequence has not ended, and has kept its blocks, since the step was launched."""
        begun = self.sequence.begun
        return bool(begun) and begun[0] is self


def _completing(sequences: Collection[tuple[int, ...]], ids: NDArray[np.int32]) -> list[int]:
    """Return the last token of each sequence whose other tokens are the last of ids (t,)."""
    last = tuple(ids[-max(map(len, sequences), default=1) :].tolist())
    return [end for *begun, end in sequences if last[-len(begun) :] == tuple(begun)]
