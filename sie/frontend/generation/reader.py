"""Turns a worker's records into the events that dialects write. Pure.

record ─► token decoder ─► stop filter ─► parser ─► events, of one choice
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast

from sie.frontend.generation.parsers import OutputParser, ParserFactory, Piece, Reasoning, Text
from sie.frontend.generation.prompt_reader import PromptReader, text_of
from sie.frontend.generation.stops import StopFilter
from sie.frontend.generation.vocabulary import Vocabulary
from sie.values.generate import (
    Finished,
    FinishReason,
    GenerateEvent,
    LogprobText,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    TokenRecord,
    ToolCall,
    ToolCallDelta,
)

_REASONS: Final = frozenset({"stop", "length"})


class ChoiceReader:
    """Reads the records of one choice. number: the choice number in its events.

    A stop string ends the choice only if its last character comes after min_tokens tokens.
    """

    def __init__(
        self, number: int, vocabulary: Vocabulary, stops: Sequence[str], parser: OutputParser, min_tokens: int = 0
    ) -> None:
        self.number = number
        self.num_tokens = 0
        """Tokens of the answer, up to the one that completed a stop string."""
        self.num_reasoning_tokens = 0
        self.is_finished = False
        self._vocabulary = vocabulary
        self._decoder = vocabulary.decoder(parser.markers)
        self._stops = StopFilter(stops)
        self._min_tokens = min_tokens
        self._parser = parser
        self._num_calls = 0
        self._num_decoded = 0
        self._num_passed = 0
        self._logprobs: deque[tuple[int, LogprobText]] = deque()
        """The logprobs of tokens whose text was not passed on yet, each with the number of characters before it."""

    def read(self, record: TokenRecord) -> list[GenerateEvent]:
        """Return the events of a record; none once the choice is finished."""
        events: list[GenerateEvent] = []
        for position, token_id in enumerate(record.token_ids):
            if self.is_finished:
                return events
            logprob = record.logprobs[position] if position < len(record.logprobs) else None
            events += self._read_token(token_id, logprob)
        if record.finish and not self.is_finished:
            events += self._finish(record.finish)
        return events

    def _read_token(self, token_id: int, logprob: TokenLogprob | None) -> list[GenerateEvent]:
        self.num_tokens += 1
        if logprob is not None:
            self._logprobs.append((self._num_decoded, self._logprob(token_id, logprob)))
        text = self._decoder.push(token_id)
        self._num_decoded += len(text)
        passed = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
        events = self._pass_on(self._parser.push(passed), len(passed)) if passed else []
        if self._stops.found is not None:
            events += self._end("stop")
        return events

    def _finish(self, reason: str) -> list[GenerateEvent]:
        """End with the worker's reason. The text held back until now may still contain a stop string."""
        rest = self._decoder.flush()
        self._num_decoded += len(rest)
        passed = self._stops.push(rest, may_end=self.num_tokens > self._min_tokens)
        if self._stops.found is None:
            passed += self._stops.flush()
        events = self._pass_on(self._parser.push(passed), len(passed)) if passed else []
        is_stop = self._stops.found is not None or reason not in _REASONS
        return events + self._end("stop" if is_stop else cast("FinishReason", reason))

    def _end(self, reason: FinishReason) -> list[GenerateEvent]:
        is_cut = reason == "length" or self._stops.found is not None
        events = self._pass_on(self._parser.flush(is_cut=is_cut), 0)
        if self._stops.found is None:
            self._num_passed = self._num_decoded + 1
        if left := self._take_logprobs():
            events.append(TextDelta(self.number, "", left))
        self.is_finished = True
        if self._num_calls:
            reason = "tool_calls" if reason == "stop" else reason
        return [*events, Finished(self.number, reason, self._stops.found)]

    def _pass_on(self, pieces: Sequence[Piece], num_chars: int) -> list[GenerateEvent]:
        self._num_passed += num_chars
        events: list[GenerateEvent] = []
        for piece in pieces:
            if isinstance(piece, Text):
                events.append(TextDelta(self.number, piece.text, self._take_logprobs()))
            elif isinstance(piece, Reasoning):
                self.num_reasoning_tokens = self.num_tokens if piece.text else self.num_reasoning_tokens
                logprobs = self._take_logprobs()
                if piece.text or logprobs:
                    events.append(ReasoningDelta(self.number, piece.text, logprobs))
            else:
                events.append(self._call(piece))
        return events

    def _call(self, call: ToolCall) -> ToolCallDelta:
        self._num_calls += 1
        return ToolCallDelta(self.number, self._num_calls - 1, call)

    def _take_logprobs(self) -> tuple[LogprobText, ...]:
        """Return the logprobs of the tokens that began in the text passed on so far."""
        taken: list[LogprobText] = []
        while self._logprobs and self._logprobs[0][0] < self._num_passed:
            taken.append(self._logprobs.popleft()[1])
        return tuple(taken)

    def _logprob(self, token_id: int, logprob: TokenLogprob) -> LogprobText:
        top = tuple(self._named(other, value) for other, value in logprob.top)
        return self._named(token_id, logprob.logprob, top)

    def _named(self, token_id: int, value: float, top: tuple[LogprobText, ...] = ()) -> LogprobText:
        raw = self._vocabulary.token_bytes(token_id)
        return LogprobText(text=text_of(raw), raw=raw, logprob=value, top=top)


class Reader:
    """Reads the records of one prompt's choices, which have numbers from first_number on.

    make_prompt: makes the reader of the prompt's own logprobs, if the request wants them.
    """

    def __init__(
        self, num_choices: int, vocabulary: Vocabulary, stops: Sequence[str], parsers: ParserFactory,
        *, first_number: int = 0, make_prompt: Callable[[], PromptReader] | None = None, min_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.choices = [
            ChoiceReader(first_number + choice, vocabulary, stops, parsers(), min_tokens)
            for choice in range(num_choices)
        ]
        self.num_cached = 0
        self._prompt = make_prompt() if make_prompt is not None else None

    def read(self, record: TokenRecord) -> list[GenerateEvent]:
        """Return the events of a checked record. Raises Internal if it does not match the request."""
        self.num_cached = max(self.num_cached, record.num_cached)
        if self._prompt is None:
            return self.choices[record.choice].read(record)
        if record.prompt is not None:
            self._prompt.read(record.prompt)
            return []
        scored = self._prompt.finish()
        self._prompt = None
        return [scored, *self.choices[record.choice].read(record)]

    @property
    def is_finished(self) -> bool:
        """Whether every choice is finished."""
        return all(choice.is_finished for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all answers."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)
