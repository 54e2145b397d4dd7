"""Turns unsent tokens into records and frames of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sie.values.generate import TokenRecord
from sie.workers.generation.prompt_scores import PromptScores
from sie.workers.generation.sequences import Job, Sequence

MAX_FRAME_BYTES: Final = 1 << 16
_RECORD_BYTES: Final = 48
"""Most bytes of a record without its tokens: ten numbers and a word, as msgpack."""
_TOKEN_BYTES: Final = 5
_LOGPROB_BYTES: Final = 13
_TOP_BYTES: Final = 15


class Taken(NamedTuple):
    """Contents of the next frame. is_all: nothing is left for another frame."""

    records: list[tuple[Sequence, TokenRecord]]
    is_all: bool


def take_records(jobs: Iterable[Job], max_bytes: int = MAX_FRAME_BYTES) -> Taken:
    """Return the contents of these jobs' next frame, at most about max_bytes as msgpack; change nothing."""
    records: list[tuple[Sequence, TokenRecord]] = []
    left = max_bytes
    for job in jobs:
        token_bytes = _token_bytes(job)
        scores = job.scores
        if scores is not None and scores.num_unsent:
            count = min(scores.num_unsent, max(0, left - _RECORD_BYTES) // scores.entry_bytes)
            if count:
                records.append(_prompt_record(job, scores, count))
            if count < scores.num_unsent:
                return Taken(records, is_all=False)
            left -= _RECORD_BYTES + count * scores.entry_bytes
        for sequence in job.sequences:
            wanted = sequence.num_unsent
            if not wanted and not sequence.finish:
                continue
            count = min(wanted, max(0, left - _RECORD_BYTES) // token_bytes)
            if count or not wanted:
                records.append((sequence, _record(sequence, count)))
            if count < wanted:
                return Taken(records, is_all=False)
            left -= _RECORD_BYTES + count * token_bytes
    return Taken(records, is_all=True)


def note_sent(sequence: Sequence, record: TokenRecord) -> None:
    """Note that a record was sent, and remove its sequence if it was the last record."""
    scores = sequence.job.scores
    if scores is not None and record.prompt is not None:
        scores.note_sent(record.prompt)
    sequence.num_sent += len(record.token_ids)
    sequence.num_unsent -= len(record.token_ids)
    del sequence.logprobs[: len(record.logprobs)]
    if record.finish:
        sequence.job.sequences.remove(sequence)


def _prompt_record(job: Job, scores: PromptScores, count: int) -> tuple[Sequence, TokenRecord]:
    """Return a record that has only prompt scores, under the first choice."""
    first = job.sequences[0]
    return first, TokenRecord(job.request.request_id, first.choice, 0, (), prompt=scores.piece(count))


def _record(sequence: Sequence, count: int) -> TokenRecord:
    job, is_all = sequence.job, count == sequence.num_unsent
    start = job.num_prompt + sequence.num_sent
    return TokenRecord(
        job.request.request_id,
        sequence.choice,
        sequence.num_sent,
        tuple(sequence.tokens.view(start, start + count).tolist()),
        sequence.finish if is_all else "",
        job.num_cached,
        tuple(sequence.logprobs[:count]),
    )


def _token_bytes(job: Job) -> int:
    logprobs = job.task.logprobs
    return _TOKEN_BYTES if logprobs is None else _TOKEN_BYTES + _LOGPROB_BYTES + _TOP_BYTES * logprobs
