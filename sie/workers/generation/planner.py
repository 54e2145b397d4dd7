"""Decides what the next step of a generating model runs, and which blocks its sequences have. Pure: no clock, no torch.

Every choice whose prompt has been read decodes in each step. Prefill chunks run beside them, up to a token budget. Half
of it goes to the shortest prompts, so that a short prompt does not wait for a long one. The rest goes to the oldest, so
that none waits for ever. A model whose encoder reads prompts gets each prompt in one step. A sequence is admitted when there are free blocks for all its tokens, plus one for each choice
that then runs. When a decoding choice finds no block, the newest sequence is preempted: its blocks are released, and
its tokens are read again later. So the oldest always runs to its end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from sie.workers.generation.kv import BlockPool, block_key
from sie.workers.generation.sequences import Job, Part, Sequence


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on every step of a model."""

    block_tokens: int
    max_prefills: int
    """Most prefill chunks in a step."""
    is_sharing: bool = True
    """Whether sequences with equal beginnings share blocks."""
    max_scored: int = 1 << 30
    """Most prompt tokens that a step scores."""
    is_whole: bool = False
    """Whether a prompt is read in one step, even if it is over the step's budget."""
    max_tokens: int = 1 << 62
    """Most tokens of a sequence."""


class Plan(NamedTuple):
    """One step: its parts, and the blocks (from, to) to copy first. Copies are planned again until `Planner.begin`."""

    parts: list[Part]
    copies: list[tuple[int, int]]


class Planner:
    """Schedules the sequences of one model, and assigns its blocks."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """`waiting` and `running` are sorted, oldest first."""
        self.num_preempted = self.num_lookups = self.num_hits = 0
        self._was_alone = False
        self._copies: dict[int, int] = {}
        """Source block by the target that it must be copied to, until a step has made the copy."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=_age)

    def fork(self, sequence: Sequence, choice: int) -> Sequence:
        """Add another choice to a prompt that has just been read; both share the prompt's blocks."""
        other = sequence.fork(choice)
        for block in other.blocks:
            self.pool.hold(block)
        insort(self.running, other, key=_age)
        return other

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence, and release its blocks."""
        self._let_go(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def begin(self, plan: Plan) -> None:
        """Note that a step was launched, so that the next one can be planned: its copies are made, its parts run."""
        for part in plan.parts:
            part.sequence.begun.append(part)
            part.sequence.num_computed += part.count
        self.pool.let_go([self._copies.pop(target) for _, target in plan.copies])

    def advance(self, part: Part) -> None:
        """Note that a current part has run: the blocks that it filled can be shared from now on."""
        sequence = part.sequence
        del sequence.begun[0]
        if self.limits.is_sharing:
            block_tokens = self.limits.block_tokens
            for index in range(part.start // block_tokens, (part.start + part.count) // block_tokens):
                self.pool.enter(sequence.blocks[index], self._key(sequence, index))

    def undo(self, part: Part) -> None:
        """Reset a sequence to the start of a part of the current step, which then runs again. Later parts under way do not count."""
        part.sequence.begun.clear()
        part.sequence.num_computed = part.start

    def can_plan_ahead(self) -> bool:
        """Return whether a step can be planned while one is under way: not while a job must run alone."""
        return not any(
            sequence.job.must_be_alone for sequences in (self.running, self.waiting) for sequence in sequences
        )

    def plan(self, max_prefill_tokens: int, max_sequences: int) -> Plan | None:
        """Return the next step, with at most max_prefill_tokens prompt tokens, or None when nothing can run.

        At most max_sequences choices run at once. A request with more choices runs by itself. A job that must run alone
        gets every other step, so that other sequences progress while its long prompt is read.
        """
        for turn in ("others", "alone") if self._was_alone else ("alone", "others", "alone"):
            alone = next((sequence.job for sequence in self.running if sequence.job.must_be_alone), None)
            if turn == "alone" and alone is None:
                continue
            admitted = self._admit(max_sequences) if turn == "others" else ()
            parts = self._compose(alone if turn == "alone" else None, max_prefill_tokens, admitted)
            if parts:
                self._was_alone = turn == "alone"
                return Plan(parts, self._copies_of(parts))
        return None

    def _copies_of(self, parts: Collection[Part]) -> list[tuple[int, int]]:
        """Return the copies that these parts need. Other copies wait: a failed step may cost only its own requests."""
        if not self._copies:
            return []
        size = self.limits.block_tokens
        begun = {part.sequence.blocks[part.sequence.num_computed // size] for part in parts}
        return [(source, target) for target, source in self._copies.items() if target in begun]

    def _compose(self, alone: Job | None, max_prefill_tokens: int, admitted: Collection[Sequence]) -> list[Part]:
        """Return the parts of a step: of the one job `alone`, or of all jobs that may share a step."""
        parts: list[Part] = []
        for sequence in list(self.running):
            # No blocks: an older sequence has just taken them.
            if sequence.num_left != 1 or not sequence.blocks or not _is_turn(sequence.job, alone):
                continue
            if sequence.begun and self._may_end(sequence):
                continue
            if sequence not in admitted and self._make_room(sequence):
                parts.append(Part(sequence, 1, True, sequence.num_computed))
        reading = [
            sequence
            for sequence in self.running
            if (sequence.num_left > 1 or sequence in admitted) and _is_turn(sequence.job, alone)
        ]
        share = whole_prompts if self.limits.is_whole else share_budget
        counts = share([sequence.num_left for sequence in reading], max_prefill_tokens, self.limits.max_prefills)
        num_scored = 0
        for sequence, planned in zip(reading, counts, strict=True):
            count, scores = planned, sequence.job.scores
            if scores is not None:
                count = scores.limit(sequence.num_computed, planned, self.limits.max_scored - num_scored)
                num_scored += scores.count_rows(sequence.num_computed, count)
            if count:
                parts.append(Part(sequence, count, count == sequence.num_left, sequence.num_computed))
        return parts

    def _may_end(self, sequence: Sequence) -> bool:
        """Return whether a step under way draws a sequence's last token, by its length, or a token for each choice."""
        if not sequence.num_drawing:
            return False
        length, job = len(sequence.tokens) + 1, sequence.job
        is_last = length - job.num_prompt >= job.task.max_tokens or length >= self.limits.max_tokens
        return is_last or sequence.num_choices > 1

    def _make_room(self, sequence: Sequence) -> bool:
        """Give a sequence its own block for its next position; return False if it was preempted itself."""
        index = sequence.num_computed // self.limits.block_tokens
        is_new = index == len(sequence.blocks)
        while is_new or self._is_shared(sequence.blocks[index]):
            block = self.pool.allocate()
            if block is None:
                newest = self.running[-1]
                self.preempt(newest)
                if newest is sequence:
                    return False
                continue
            if is_new:
                sequence.blocks.append(block)
                return True
            source, sequence.blocks[index] = sequence.blocks[index], block
            # The sequence's hold on the source passes to the copy, which may wait until a step succeeds.
            self._copies[block] = source
        return True

    def _is_shared(self, block: int) -> bool:
        """Tell whether a block has other holders than one sequence and the pending copies of the block."""
        holders = self.pool.num_holders(block)
        return holders > 1 and holders - sum(source == block for source in self._copies.values()) > 1

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue, and release its blocks."""
        self._let_go(sequence)
        self.running.remove(sequence)
        self.add(sequence)
        self.num_preempted += 1

    def restart(self, sequence: Sequence, rotary_length: int) -> None:
        """Queue a running sequence to be read again from its beginning, with the rotary factors of another length."""
        self._let_go(sequence)
        self.running.remove(sequence)
        sequence.rotate_as(rotary_length)
        self.add(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        for block in sequence.blocks if self._copies else ():
            if block in self._copies:
                self.pool.let_go((self._copies.pop(block),))
        self.pool.let_go_sequence(sequence.blocks)
        sequence.begun.clear()
        sequence.blocks = []
        sequence.num_computed = 0

    def _admit(self, max_sequences: int) -> list[Sequence]:
        """Start waiting sequences in order, while there is room. No sequence overtakes another."""
        admitted: list[Sequence] = []
        num_running = sum(sequence.num_choices for sequence in self.running) if self.waiting else 0
        while self.waiting:
            sequence = self.waiting[0]
            num_after = num_running + sequence.num_choices
            if self.running and num_after > max_sequences:
                break
            if not self._try_hold_all(sequence, num_after if self.running else 0):
                break
            num_running = num_after
            admitted.append(self.waiting.pop(0))
            insort(self.running, sequence, key=_age)
        return admitted

    def _try_hold_all(self, sequence: Sequence, num_spare: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, or none. Blocks of a known beginning are shared."""
        block_tokens = self.limits.block_tokens
        shared = self._find_shared(sequence)
        num_needed = -(-len(sequence.tokens) // block_tokens) - len(shared)
        num_revived = sum(not self.pool.num_holders(block) for block in shared)
        if self.pool.num_free < num_needed + num_revived + num_spare:
            return False
        for block in shared:
            self.pool.hold(block)
        fresh = [self.pool.allocate() for _ in range(num_needed)]
        sequence.blocks = [*shared, *(block for block in fresh if block is not None)]
        sequence.num_computed = len(shared) * block_tokens
        self.num_lookups += 1
        self.num_hits += bool(shared)
        if not sequence.job.started_ns:  # after that it finds its own blocks
            sequence.job.num_cached = sequence.num_computed
        return True

    def _find_shared(self, sequence: Sequence) -> list[int]:
        """Return the longest run of shareable blocks that hold a sequence's beginning."""
        if not self.limits.is_sharing:
            return []
        found: list[int] = []
        for index in range(sequence.max_shared // self.limits.block_tokens):
            block = self.pool.find(self._key(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Return the key of a sequence's full block, after computing the keys of earlier blocks."""
        keys, size = sequence.keys, self.limits.block_tokens
        while len(keys) <= index:
            start = len(keys) * size
            before = keys[-1] if keys else sequence.first_key
            keys.append(block_key(before, sequence.tokens.view(start, start + size).tobytes()))
        return keys[index]


def share_budget(lengths: list[int], max_tokens: int, max_parts: int) -> list[int]:
    """Return how many tokens of each prompt run: half of max_tokens for the shortest, the rest for the oldest.

    lengths are the prompts' remaining tokens, oldest first; at most max_parts prompts get tokens.
    """
    counts = [0] * len(lengths)
    by_age = range(len(lengths))
    # The oldest prompt comes first, so that max_parts cannot leave it out.
    _give(counts, lengths, by_age[:1], max_tokens - max_tokens // 2, max_parts)
    _give(counts, lengths, sorted(by_age, key=lengths.__getitem__), max_tokens // 2, max_parts)
    _give(counts, lengths, by_age, max_tokens - sum(counts), max_parts)
    return counts


def whole_prompts(lengths: list[int], max_tokens: int, max_parts: int) -> list[int]:
    """Return how many tokens of each prompt run: all of the oldest, and all or none of each other. As `share_budget`."""
    counts = [0] * len(lengths)
    left = max(max_tokens, lengths[0]) if lengths else 0
    for index, length in enumerate(lengths):
        if length <= left and max_parts:
            counts[index] = length
            left -= length
            max_parts -= 1
    return counts


def _give(counts: list[int], lengths: list[int], order: Iterable[int], budget: int, max_parts: int) -> None:
    """Raise each sequence's count to its length, in this order, until the budget is spent.

    At most max_parts sequences get any.
    """
    num_parts = len(counts) - counts.count(0)
    for index in order:
        if not counts[index] and num_parts == max_parts:
            continue
        count = min(budget, lengths[index] - counts[index])
        num_parts += not counts[index] and count > 0
        counts[index] += count
        budget -= count


def _is_turn(job: Job, alone: Job | None) -> bool:
    return job is alone if alone is not None else not job.must_be_alone


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
