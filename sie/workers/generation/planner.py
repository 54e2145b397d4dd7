"""Decides what the next step of a generating model runs, and which blocks its sequences have. Pure: no clock, no torch.

Every choice whose prompt has been read decodes in each step. Beside them run parts of prompts, up to a budget: half of it
is for the shortest, so that a short prompt does not wait for a long one, and the rest for the oldest, so that no one
waits for ever. A sequence is admitted when there are free blocks for all of its tokens and a block for each choice that
is then running. When a decoding choice finds no block, the newest sequence goes back to wait: its blocks are let go, and
later its tokens are read again. So the oldest always runs to its end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from sie.workers.generation.kv import BlockPool, block_key
from sie.workers.generation.sequences import Job, Sequence


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all of a model's steps."""

    block_tokens: int
    max_prefills: int
    """Most prompts of which a step runs a part."""
    is_sharing: bool = True
    """Whether blocks of equal beginnings are shared."""
    max_scored: int = 1 << 30
    """Most tokens of prompts that a step judges."""


class Part(NamedTuple):
    """The next `count` tokens of a sequence. is_last: there are no more, so that a token is drawn."""

    sequence: Sequence
    count: int
    is_last: bool


class Plan(NamedTuple):
    """What one step runs: parts, and their blocks to copy (from, to) before. Copies come again until `Planner.copied`."""

    parts: list[Part]
    copies: list[tuple[int, int]]


class Planner:
    """The sequences of one model, and its books of blocks."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both oldest first."""
        self.num_preempted = self.num_lookups = self.num_hits = 0
        self._was_alone = False
        self._copies: dict[int, int] = {}
        """Blocks by the block that is to be copied to them: until a step with them has run."""

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        insort(self.waiting, sequence, key=_age)

    def fork(self, sequence: Sequence, choice: int) -> Sequence:
        """Add another choice behind a prompt that has just been read; it shares its blocks."""
        other = sequence.fork(choice)
        for block in other.blocks:
            self.pool.hold(block)
        insort(self.running, other, key=_age)
        return other

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and let its blocks go."""
        self._let_go(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def copied(self, plan: Plan) -> None:
        """Note that the copies of a plan were made, or that those whom they were for have failed."""
        self.pool.let_go([self._copies.pop(target) for _, target in plan.copies])

    def advance(self, part: Part) -> None:
        """Note that a part has run: what it filled can be shared from now on."""
        sequence = part.sequence
        before, sequence.num_computed = sequence.num_computed, sequence.num_computed + part.count
        if self.limits.is_sharing:
            block_tokens = self.limits.block_tokens
            for index in range(before // block_tokens, sequence.num_computed // block_tokens):
                self.pool.enter(sequence.blocks[index], self._key(sequence, index))

    def plan(self, max_prefill_tokens: int, max_sequences: int) -> Plan | None:
        """Choose the next step, with at most so many tokens of prompts; None when nothing can run.

        At most max_sequences choices run at once; a request of more does so by itself. What must be alone gets every other step: the neighbours of a prompt that takes many must not stand still.
        """
        for turn in ("others", "alone") if self._was_alone else ("alone", "others", "alone"):
            alone = next((sequence.job for sequence in self.running if _must_be_alone(sequence.job)), None)
            if turn == "alone" and alone is None:
                continue
            admitted = self._admit(max_sequences) if turn == "others" else ()
            parts = self._compose(alone if turn == "alone" else None, max_prefill_tokens, admitted)
            if parts:
                self._was_alone = turn == "alone"
                return Plan(parts, self._copies_of(parts))
        return None

    def _copies_of(self, parts: Collection[Part]) -> list[tuple[int, int]]:
        """Return the copies that parts need; others' wait for their step, as this one's failure may be told of its own."""
        if not self._copies:
            return []
        size = self.limits.block_tokens
        begun = {part.sequence.blocks[part.sequence.num_computed // size] for part in parts}
        return [(source, target) for target, source in self._copies.items() if target in begun]

    def _compose(self, alone: Job | None, max_prefill_tokens: int, admitted: Collection[Sequence]) -> list[Part]:
        """Return the parts of a step: of all but those that must be alone, or of the one job that is."""
        parts: list[Part] = []
        for sequence in list(self.running):
            # Without blocks: an older one has just taken them.
            if sequence.num_left != 1 or not sequence.blocks or not _is_turn(sequence.job, alone):
                continue
            if sequence not in admitted and self._make_room(sequence):
                parts.append(Part(sequence, 1, is_last=True))
        reading = [
            sequence
            for sequence in self.running
            if (sequence.num_left > 1 or sequence in admitted) and _is_turn(sequence.job, alone)
        ]
        counts = share_budget([sequence.num_left for sequence in reading], max_prefill_tokens, self.limits.max_prefills)
        num_scored = 0
        for sequence, planned in zip(reading, counts, strict=True):
            count, scores = planned, sequence.job.scores
            if scores is not None:
                count = scores.limit(sequence.num_computed, planned, self.limits.max_scored - num_scored)
                num_scored += scores.count_rows(sequence.num_computed, count)
            if count:
                parts.append(Part(sequence, count, is_last=count == sequence.num_left))
        return parts

    def _make_room(self, sequence: Sequence) -> bool:
        """Give a sequence a block of its own for its next position; False when it had to go back itself."""
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
            # Its hold on the source passes to the copy, which may have to wait for a step that does not fail.
            self._copies[block] = source
        return True

    def _is_shared(self, block: int) -> bool:
        """Whether a block has holders beside one sequence and the copies that are to be made of it."""
        holders = self.pool.num_holders(block)
        return holders > 1 and holders - sum(source == block for source in self._copies.values()) > 1

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait, without its blocks."""
        self._let_go(sequence)
        self.running.remove(sequence)
        self.add(sequence)
        self.num_preempted += 1

    def restart(self, sequence: Sequence, rotary_length: int) -> None:
        """Let a running sequence be read again from its beginning, with the rotary factors of another length."""
        self._let_go(sequence)
        self.running.remove(sequence)
        sequence.rotate_as(rotary_length)
        self.add(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        for block in sequence.blocks if self._copies else ():
            if block in self._copies:
                self.pool.let_go((self._copies.pop(block),))
        self.pool.let_go_sequence(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

    def _admit(self, max_sequences: int) -> list[Sequence]:
        """Let waiting sequences run, in order, as far as there is room: nobody passes the one in front."""
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
        """Give a waiting sequence blocks for all its tokens, shared as far as it begins like others, or none."""
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
        if not sequence.job.started_ns:  # later it finds what it wrote itself
            sequence.job.num_cached = sequence.num_computed
        return True

    def _find_shared(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold as much of a sequence's beginning as may be shared."""
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
        """Return the key of a sequence's full block; those in front of it have theirs."""
        keys, size = sequence.keys, self.limits.block_tokens
        while len(keys) <= index:
            start = len(keys) * size
            before = keys[-1] if keys else sequence.first_key
            keys.append(block_key(before, sequence.tokens.view(start, start + size).tobytes()))
        return keys[index]


def share_budget(lengths: list[int], max_tokens: int, max_parts: int) -> list[int]:
    """Return how many tokens of each prompt run: half of max_tokens for the shortest, the rest for the first ones.

    lengths are of the prompts' tokens that are left, oldest first; at most max_parts prompts get some.
    """
    counts = [0] * len(lengths)
    by_age = range(len(lengths))
    # The oldest one's part comes first, so that max_parts cannot leave it out.
    _give(counts, lengths, by_age[:1], max_tokens - max_tokens // 2, max_parts)
    _give(counts, lengths, sorted(by_age, key=lengths.__getitem__), max_tokens // 2, max_parts)
    _give(counts, lengths, by_age, max_tokens - sum(counts), max_parts)
    return counts


def _give(counts: list[int], lengths: list[int], order: Iterable[int], budget: int, max_parts: int) -> None:
    """Share out a budget in this order."""
    num_parts = len(counts) - counts.count(0)
    for index in order:
        if not counts[index] and num_parts == max_parts:
            continue
        count = min(budget, lengths[index] - counts[index])
        num_parts += not counts[index] and count > 0
        counts[index] += count
        budget -= count


def _must_be_alone(job: Job) -> bool:
    return job.is_alone and not job.is_proven


def _is_turn(job: Job, alone: Job | None) -> bool:
    return job is alone if alone is not None else not _must_be_alone(job)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
