"""Steps of generation that begin before the one before has been read, with a stub that computes them when they are read."""

from __future__ import annotations

from typing import Any

import pytest

from sie.values.generate import Sampling
from sie.workers.device.faults import DeviceLostError
from sie.workers.model_api import Slot
from tests.unit.workers.generation_rig import AheadStub, EngineRig, echo, make_card


class Ahead(EngineRig):
    """A rig whose runner computes steps when they are read."""

    runner: AheadStub

    def __init__(self, options: str = "blocks=64", *, block_tokens: int = 8, **limits: Any) -> None:
        super().__init__(runner=AheadStub(make_card(options), block_tokens), **limits)


def test_every_step_but_the_first_begins_behind_one_that_is_not_read() -> None:
    rig = Ahead()
    answers = [rig.submit(b"abcdef", ignore_eos=True, max_tokens=20) for _ in range(3)]
    rig.run()
    assert [answer.tokens[0] for answer in answers] == [echo(b"abcdef", count=20)] * 3
    assert (rig.runner.num_launched, rig.runner.num_behind) == (20, 19)
    assert sum(map(sum, rig.runner.lengths)) == 3 * (6 + 19), "nothing runs behind a last token"
    rig.assert_all_given_back()


def test_a_prompt_joins_the_steps_under_way() -> None:
    rig = Ahead(max_prefill_tokens=4)
    first = rig.submit(b"abcdef", ignore_eos=True, max_tokens=30)
    rig.step(5)
    second = rig.submit(b"0123456789", num_choices=2)
    rig.run()
    assert first.tokens == [echo(b"abcdef", count=30)]
    assert second.tokens == [echo(b"0123456789"), echo(b"0123456789", 1)]
    assert rig.runner.num_behind == rig.runner.num_launched - 1


def test_the_token_behind_an_end_is_thrown_away_and_shared_with_nobody() -> None:
    rig = Ahead(block_tokens=5)
    answer = rig.submit(b"abcdefg")
    rig.run()
    assert (answer.tokens, answer.finish) == ([echo(b"abcdefg")], ["stop"])
    assert rig.runner.num_launched == 9, "one behind that of the end, which no one knew of"
    assert rig.engine.planner.pool.num_cached == 2, "of three blocks, that token has filled the last"
    rig.assert_all_given_back()


@pytest.mark.parametrize("how", ["cancel", "stop", "drop"])
def test_a_request_that_goes_while_its_step_is_under_way_leaves_nothing(how: str) -> None:
    rig = Ahead()
    gone, other = (
        rig.submit(b"abcdef", num_choices=2, ignore_eos=True),
        rig.submit(b"other", ignore_eos=True, max_tokens=30),
    )
    rig.step(5)
    if how == "cancel":
        rig.frontend.cancel(1)
    elif how == "drop":
        rig.engine.jobs[0].request.link = None
        rig.engine.drop(None)  # type: ignore[arg-type]
    else:
        rig.frontend.stop(1, 0)
        rig.frontend.stop(1, 1)
    num_tokens = len(gone.tokens[0])
    rig.run()
    assert len(gone.tokens[0]) == num_tokens
    assert other.tokens == [echo(b"other", count=30)]
    rig.assert_all_given_back()


@pytest.mark.parametrize(
    "task",
    [
        {"grammar_kind": "regex", "grammar": "b" * 12, "sampling": Sampling(temperature=0.0)},
        {"sampling": Sampling(temperature=0.0, frequency_penalty=0.5), "max_tokens": 12},
    ],
)
def test_a_token_that_the_host_must_see_first_stops_the_steps_ahead(task: dict[str, Any]) -> None:
    rig = Ahead()
    answer = rig.submit(b"abcdef", ignore_eos=True, max_tokens=40)
    rig.step(10)
    before = rig.runner.num_launched
    bound = rig.submit(b"b", ignore_eos=True, **task)
    rig.step(8)
    assert rig.runner.num_launched == before
    rig.run()
    assert (answer.tokens, bound.tokens) == ([echo(b"abcdef", count=40)], [list(b"b" * 12)])
    assert rig.runner.num_launched > before


def test_a_draw_that_only_the_host_can_finish_is_made_in_a_step_that_runs_whole() -> None:
    rig = Ahead()
    rig.runner.is_on_host = lambda slot: slot.start == 9  # then its neighbour's is under way, too
    answers = [
        rig.submit(b"abcdef", ignore_eos=True, max_tokens=12),
        rig.submit(b"01234", ignore_eos=True, max_tokens=12),
    ]
    rig.run()
    assert [answer.tokens[0] for answer in answers] == [echo(b"abcdef", count=12), echo(b"01234", count=12)]
    rig.assert_all_given_back()


def test_prompts_are_scored_with_no_other_step_under_way() -> None:
    rig = Ahead()
    rig.submit(b"abcdef", ignore_eos=True, max_tokens=30)
    rig.step(4)
    scored = rig.submit(b"scored", prompt_logprobs=1)
    rig.run()
    assert scored.tokens == [list(b"scored")]
    assert scored.scores is not None


def test_a_suspect_runs_with_no_other_step_under_way() -> None:
    rig = Ahead()
    other = rig.submit(b"abcdef", ignore_eos=True, max_tokens=60)
    rig.step(4)
    suspect = rig.submit(b"suspect", is_alone=True)
    rig.step(30)
    assert not other.is_over
    assert suspect.tokens == [list(b"suspect")]
    own = [begun for begun in rig.begun if (0, 2) in begun.suspects]
    assert [(begun.num_steps, len(begun.suspects), begun.size.num_tokens) for begun in own] == [(1, 1, 7), (1, 1, 1)]
    rig.run()


def test_both_steps_under_way_are_announced() -> None:
    rig = Ahead()
    rig.submit(b"first", ignore_eos=True)
    rig.step()
    rig.submit(b"second", ignore_eos=True)
    rig.step(3)
    first, both, third, last = rig.begun
    assert (first.num_steps, list(first.suspects), first.size.num_prefill) == (1, [(0, 1)], 5)
    assert (both.num_steps, sorted(both.suspects), both.size.num_prefill) == (2, [(0, 1), (0, 2)], 11)
    assert sorted(third.suspects) == [(0, 1), (0, 2)]
    assert list(last.suspects) == [(0, 2)], "the first request has survived a step in which it decoded"
    assert rig.engine.under_way is not None
    assert not rig.engine.under_way.suspects


def test_a_step_that_finds_no_memory_to_begin_runs_whole() -> None:
    rig = Ahead()
    answers = [rig.submit(b"abcdef", ignore_eos=True, max_tokens=12) for _ in range(2)]
    rig.step(4)
    rig.runner.launch_faults += [MemoryError("none left")] * 2
    rig.run()
    assert [answer.tokens[0] for answer in answers] == [echo(b"abcdef", count=12)] * 2
    assert rig.ooms == []
    assert rig.runner.launch_faults == []


def test_a_step_that_cannot_be_read_runs_again() -> None:
    rig = Ahead()
    answers = [rig.submit(b"abcdef", ignore_eos=True, max_tokens=12) for _ in range(2)]
    rig.step(4)
    rig.runner.faults.append((RuntimeError("broken"), True))
    rig.run()
    assert [answer.tokens[0] for answer in answers] == [echo(b"abcdef", count=12)] * 2
    rig.assert_all_given_back()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_lost_device_ends_the_engine(is_read: bool) -> None:
    rig = Ahead()
    rig.submit(b"abcdef", ignore_eos=True)
    rig.step(3)
    lost = DeviceLostError("lost")
    if is_read:
        rig.runner.faults.append((lost, True))
    else:
        rig.runner.launch_faults.append(lost)
    with pytest.raises(DeviceLostError):
        rig.step()


def test_a_sequence_that_is_preempted_draws_its_token_under_way_again() -> None:
    rig = Ahead("blocks=6", block_tokens=4)
    answers = [rig.submit(b"abcd", ignore_eos=True, max_tokens=16) for _ in range(3)]
    rig.run()
    assert [answer.tokens[0] for answer in answers] == [echo(b"abcd", count=16)] * 3
    assert rig.engine.planner.num_preempted
    assert rig.runner.num_behind
    rig.assert_all_given_back()


def test_a_slot_names_the_draw_that_gives_its_token() -> None:
    rig = Ahead()
    seen: list[Slot] = []
    launch = rig.runner.launch_step
    rig.runner.launch_step = lambda slots, copies=(): (seen.extend(slots), launch(slots, copies))[1]  # type: ignore[method-assign]
    rig.submit(b"abcdefg", ignore_eos=True, max_tokens=4)
    rig.run()
    assert [(slot.start, slot.drawn, slot.draws[0].position) for slot in seen] == [
        (0, None, 7), (7, 0, 8), (8, 0, 9), (9, 0, 10)
    ]  # fmt: skip


def test_draws_before_it_in_the_step_count_for_the_place_of_a_draw() -> None:
    rig = Ahead(max_prefill_tokens=5)
    rig.submit(b"ab", num_choices=2, max_tokens=3, ignore_eos=True)
    answer, _ = (rig.submit(prompt, max_tokens=3, ignore_eos=True) for prompt in (b"cd", b"efghijkl"))
    seen: list[list[int | None]] = []
    launch = rig.runner.launch_step
    rig.runner.launch_step = lambda slots, copies=(): (
        seen.append([slot.drawn for slot in slots]),
        launch(slots, copies),
    )[1]  # type: ignore[method-assign]
    rig.run()
    assert seen[:2] == [[None, None, None], [2, None]]
    assert answer.tokens == [echo(b"cd", count=3)]


def test_nothing_runs_beyond_the_context() -> None:
    rig = Ahead("max_tokens=20")
    answer = rig.submit(b"abcdef", ignore_eos=True)
    rig.run()
    assert (len(answer.tokens[0]), answer.finish) == (14, ["length"])
    assert sum(map(sum, rig.runner.lengths)) == 6 + 13
