"""The work of a step of a generating model, and the owners of blocks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sie.values.generate import GenerateTask
from sie.workers.generation.kv import BlockPool
from sie.workers.generation.planner import Limits, Plan, Planner, share_budget, whole_prompts
from sie.workers.generation.sequences import Job, Sequence, Tokens

BLOCK = 4


class Books:
    """A planner whose steps always succeed and give token 7; `prefill` and `sequences` bound them."""

    def __init__(
        self, num_blocks: int = 100, *, prefill: int = 16, sequences: int = 64, is_sharing: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.planner = Planner(self.pool, Limits(block_tokens=BLOCK, max_prefills=8, is_sharing=is_sharing))
        self.prefill = prefill
        self.sequences = sequences
        self._num_jobs = 0

    def add(self, prompt: int | list[int], *, is_alone: bool = False, **task: object) -> Sequence:
        """Add a prompt of so many tokens, each unlike all others, or of these."""
        self._num_jobs += 1
        ids = [1000 * self._num_jobs + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        job = Job(SimpleNamespace(), GenerateTask(100, **task), len(ids), number=self._num_jobs, eos_token_ids=(),
                  is_alone=is_alone)  # fmt: skip
        sequence = Sequence(job, 0, Tokens(np.array(ids, np.int32)))
        self.planner.add(sequence)
        return sequence

    def plan(self) -> Plan:
        plan = self.planner.plan(self.prefill, self.sequences)
        assert plan is not None
        return plan

    def step(self) -> dict[tuple[int, int], int]:
        """Run a step; return the tokens that ran, by age."""
        plan = self.plan()
        ran = {part.sequence.age: part.count for part in plan.parts}
        self.planner.begin(plan)
        for part in plan.parts:
            sequence = part.sequence
            self.planner.advance(part)
            if part.is_last:
                forks = [self.planner.fork(sequence, choice) for choice in range(1, sequence.num_choices)]
                sequence.job.is_proven = not sequence.is_first
                sequence.is_first = False
                for choice in (sequence, *forks):
                    choice.tokens.append(7)
        return ran


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "max_parts", "counts"),
    [
        ([], 8, 4, []),
        ([20], 8, 4, [8]),
        ([3], 8, 4, [3]),
        ([20, 20], 8, 4, [8, 0]),
        ([20, 3], 8, 4, [5, 3]),
        ([100, 50, 2, 3], 8, 4, [4, 0, 2, 2]),
        ([2, 50], 8, 4, [2, 6]),
        ([5, 5, 5], 1, 4, [1, 0, 0]),
        ([1, 1, 1, 1], 8, 2, [1, 1, 0, 0]),
        ([30, 1, 1], 8, 1, [8, 0, 0]),
    ],
)
def test_budget_is_shared_between_the_oldest_and_the_shortest(
    lengths: list[int], max_tokens: int, max_parts: int, counts: list[int]
) -> None:
    assert share_budget(lengths, max_tokens, max_parts) == counts


@pytest.mark.parametrize(
    ("lengths", "max_parts", "counts"),
    [([], 4, []), ([20, 3], 4, [20, 0]), ([3, 20, 5], 4, [3, 0, 5]), ([3, 3, 2], 2, [3, 3, 0])],
)
def test_prompts_for_an_encoder_run_whole_or_not(lengths: list[int], max_parts: int, counts: list[int]) -> None:
    assert whole_prompts(lengths, 8, max_parts) == counts


def test_every_running_choice_decodes_beside_the_parts_of_a_long_prompt() -> None:
    books = Books(prefill=16)
    books.add(3)
    books.add(5)
    assert books.step() == {(1, 0): 3, (2, 0): 5}
    books.add(40)
    for _ in range(2):
        assert books.step() == {(1, 0): 1, (2, 0): 1, (3, 0): 16}
    assert books.step() == {(1, 0): 1, (2, 0): 1, (3, 0): 8}
    assert books.step() == {(1, 0): 1, (2, 0): 1, (3, 0): 1}


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    books = Books(prefill=16)
    books.add(200)
    books.step()
    books.add(6)
    assert books.step() == {(1, 0): 10, (2, 0): 6}


def test_admission_waits_for_blocks_and_nobody_passes_the_one_in_front() -> None:
    books = Books(num_blocks=10)
    first = books.add(16)
    large, small = books.add(24), books.add(2)
    books.step()
    assert (first.num_computed, large.blocks, small.blocks) == (16, [], [])
    books.planner.remove(first)
    books.step()
    assert (len(large.blocks), len(small.blocks)) == (6, 1)


def test_admission_counts_the_cached_blocks_that_a_prompt_takes_up_again() -> None:
    books = Books(num_blocks=6)
    first = books.add(list(range(9)))
    books.step()
    books.planner.remove(first)
    running = books.add(3)
    books.step()
    again = books.add(list(range(16)))
    books.step()
    assert (books.pool.num_free, again.blocks) == (5, []), "2 cached and 2 more leave no block for each of two choices"
    books.planner.remove(running)
    books.step()
    assert len(again.blocks) == 4


def test_number_of_running_choices_is_limited() -> None:
    books = Books(sequences=3)
    for _ in range(3):
        books.add(2, num_choices=2)
    books.step()
    assert len(books.planner.running) == 2
    assert len(books.planner.waiting) == 2


def test_request_of_more_choices_than_may_run_does_so_by_itself() -> None:
    books = Books(sequences=2)
    books.add(2, num_choices=4)
    books.add(2)
    books.step()
    assert [sequence.age for sequence in books.planner.running] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_newest_goes_back_when_blocks_run_out_and_the_oldest_never() -> None:
    books = Books(num_blocks=8, is_sharing=False)
    oldest, middle, newest = (books.add(4) for _ in range(3))
    preempted: list[Sequence] = []
    while len(oldest.tokens) < 30:
        books.step()
        preempted += [sequence for sequence in books.planner.waiting if sequence not in preempted]
    assert preempted == [newest, middle]
    assert (oldest.num_left, len(oldest.blocks)) == (1, 8)
    books.planner.remove(oldest)
    assert next(iter(books.step())) == middle.age, "the older one is read again first"


def test_all_get_to_their_end_over_a_thousand_steps_of_too_little_room() -> None:
    books = Books(num_blocks=6)
    ended: list[int] = []
    for number in range(1000):
        if number < 300 and len(books.planner.waiting) < 4:
            books.add(1 + number % 9)
        if not (books.planner.running or books.planner.waiting):
            break
        books.step()
        for sequence in [found for found in books.planner.running if found.num_generated >= 12]:
            books.planner.remove(sequence)
            ended.append(sequence.age[0])
        assert len(books.planner.waiting) < 10
    assert books.pool.num_used == 0
    assert sorted(ended) == list(range(1, len(ended) + 1))
    assert books.planner.num_preempted > 10


def test_choices_share_their_prompt_and_copy_only_the_block_that_they_go_on_in() -> None:
    books = Books(prefill=100)
    books.add(10, num_choices=3)
    books.step()
    assert books.pool.num_used == 3
    plan = books.plan()
    shared, copied = books.planner.running[0].blocks[:2], [sequence.blocks[2] for sequence in books.planner.running]
    assert all(sequence.blocks[:2] == shared for sequence in books.planner.running)
    assert len(set(copied)) == 3
    # The last one has the block to itself by then.
    assert plan.copies == [(copied[2], copied[0]), (copied[2], copied[1])]
    assert books.pool.num_used == 5


def test_choices_of_a_prompt_of_whole_blocks_copy_nothing() -> None:
    books = Books()
    books.add(8, num_choices=2)
    books.step()
    assert books.plan().copies == []
    assert books.pool.num_used == 4


def test_copies_come_again_until_they_were_made() -> None:
    books = Books()
    books.add(3, num_choices=2)
    books.step()
    plan = books.plan()
    assert books.plan().copies == plan.copies != []
    books.planner.begin(plan)
    assert books.plan().copies == []


def test_choice_that_goes_before_its_copy_was_made_leaves_no_hold_behind() -> None:
    books = Books(is_sharing=False)
    books.add(3, num_choices=2)
    books.step()
    ((_, target),) = books.plan().copies
    copied, other = sorted(books.planner.running, key=lambda sequence: target not in sequence.blocks)
    books.planner.remove(copied)
    assert books.pool.num_used == 1
    assert books.plan().copies == []
    books.planner.remove(other)
    assert books.pool.num_used == 0


def test_step_of_one_alone_makes_no_copy_for_others_and_ends_none() -> None:
    books = Books()
    books.add(3, num_choices=2)
    books.step()
    books.add(6, is_alone=True)
    forked = books.plan()  # as if it had found no memory: its copy is still to be made
    alone = books.plan()
    assert {part.sequence.age[0] for part in alone.parts} == {2}
    assert alone.copies == []
    books.planner.begin(alone)
    again = books.plan()
    assert {part.sequence.age[0] for part in again.parts} == {1}
    assert again.copies == forked.copies != []


def test_prompt_begins_with_the_blocks_of_an_equal_one() -> None:
    books = Books(prefill=100)
    prompt = list(range(10))
    first = books.add(prompt)
    books.step()
    same, longer, other = books.add(prompt), books.add([*prompt, 7, 8, 9]), books.add([1, *prompt])
    assert books.step() == {(1, 0): 1, (2, 0): 2, (3, 0): 13 - 8, (4, 0): 11}
    assert same.blocks[:2] == longer.blocks[:2] == first.blocks[:2]
    assert other.blocks[0] not in first.blocks
    assert [sequence.job.num_cached for sequence in (first, same, longer, other)] == [0, 8, 8, 0]
    assert (books.planner.num_lookups, books.planner.num_hits) == (4, 2)


def test_blocks_are_found_after_their_sequence_has_ended() -> None:
    books = Books(prefill=100)
    first = books.add(list(range(9)))
    books.step()
    books.planner.remove(first)
    assert books.pool.num_used == 0
    books.add(list(range(9)))
    assert books.step() == {(2, 0): 1}


def test_last_token_of_a_prompt_always_runs() -> None:
    books = Books(prefill=100)
    books.add(list(range(8)))
    books.step()
    same = books.add(list(range(8)))
    assert books.step()[2, 0] == 4
    assert same.job.num_cached == 4


def test_answer_is_found_by_the_prompt_that_continues_it() -> None:
    books = Books(prefill=100)
    first = books.add([1, 2, 3])
    for _ in range(6):
        books.step()
    books.planner.remove(first)
    books.add([1, 2, 3, 7, 7, 7, 7, 7, 9])
    assert books.step() == {(2, 0): 1}


def test_what_a_prompt_wrote_before_it_was_sent_back_is_no_hit_of_its_own() -> None:
    books = Books(prefill=8)
    prompt = books.add(20)
    books.step()
    prompt.job.started_ns = 1
    books.planner.preempt(prompt)
    books.step()
    assert (prompt.num_computed, prompt.job.num_cached) == (16, 0)


def test_prompts_of_another_salt_share_nothing() -> None:
    books = Books(prefill=100)
    books.add(list(range(9)), salt=b"a")
    books.step()
    books.add(list(range(9)), salt=b"b")
    assert books.step() == {(1, 0): 1, (2, 0): 9}


def test_nothing_is_shared_where_it_is_turned_off() -> None:
    books = Books(prefill=100, is_sharing=False)
    books.add(list(range(9)))
    books.step()
    books.add(list(range(9)))
    assert books.step() == {(1, 0): 1, (2, 0): 9}
    assert books.pool.num_cached == 0


def test_what_must_be_alone_gets_every_other_step_until_it_is_proven() -> None:
    books = Books(prefill=8)
    books.add(2)
    books.step()
    books.add(12, is_alone=True)
    assert books.step() == {(1, 0): 1}, "it is admitted"
    assert [books.step() for _ in range(5)] == [{(2, 0): 8}, {(1, 0): 1}, {(2, 0): 4}, {(1, 0): 1}, {(2, 0): 1}]
    assert books.step() == {(1, 0): 1, (2, 0): 1}


def test_what_must_be_alone_runs_at_once_where_nothing_else_does() -> None:
    books = Books(prefill=8)
    books.add(12, is_alone=True)
    assert [books.step() for _ in range(3)] == [{(1, 0): 8}, {(1, 0): 4}, {(1, 0): 1}]


def test_nothing_to_run_gives_no_plan() -> None:
    books = Books()
    assert books.planner.plan(16, 64) is None
