"""A generating model's requests from their prompt to their end, in a rig without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sie.catalog.stub import END_OF_TEXT
from sie.values.errors import Internal, NonFinite, ResourceExhausted
from sie.values.generate import Sampling
from sie.workers.device.faults import DeviceLostError
from sie.workers.generation.token_frames import take_records
from sie.workers.model_api import Slot
from tests.unit.workers.generation_rig import EngineRig, Frontend, echo

PROMPT = list(b"a prompt that is a little longer than a few blocks")
LN2 = 0.6931471805599453


def run_one(prompt: list[int] = PROMPT, options: str = "blocks=64", **task: object):
    rig = EngineRig(options)
    answer = rig.submit(prompt, **task)
    rig.run()
    rig.assert_all_given_back()
    return answer


# --- how a choice ends -------------------------------------------------------------------------------------------------


def test_end_of_text_ends_a_choice_and_is_not_sent() -> None:
    answer = run_one()
    assert (answer.tokens, answer.finish) == ([echo(PROMPT)], ["stop"])
    assert answer.totals is not None
    assert answer.totals.num_generated == len(PROMPT)


def test_ignored_end_of_text_goes_on_to_the_last_token() -> None:
    answer = run_one(ignore_eos=True, max_tokens=70)
    assert (answer.tokens, answer.finish) == ([echo(PROMPT, count=70)], ["length"])


def test_stop_token_ends_a_choice_also_where_the_end_is_ignored() -> None:
    answer = run_one(list(b"abc.def"), stop_token_ids=(ord("."),), ignore_eos=True)
    assert (bytes(answer.tokens[0]), answer.finish) == (b"abc", ["stop"])


def test_nothing_ends_a_choice_before_its_fewest_tokens() -> None:
    answer = run_one(min_tokens=len(PROMPT) + 1, num_choices=2)
    assert all(len(tokens) >= len(PROMPT) + 1 for tokens in answer.tokens)
    assert [tokens[: len(PROMPT)] for tokens in answer.tokens] == [list(PROMPT), [*PROMPT[1:], PROMPT[0]]]
    exact = run_one(min_tokens=len(PROMPT))
    assert (exact.tokens, exact.finish) == ([echo(PROMPT)], ["stop"])


def test_stop_token_is_not_chosen_before_the_fewest_tokens() -> None:
    answer = run_one(list(b"abc.def"), stop_token_ids=(ord("."),), ignore_eos=True, min_tokens=5, max_tokens=20)
    assert (len(answer.tokens[0]), ord(".") in answer.tokens[0], answer.finish) == (10, False, ["stop"])


def test_complete_grammar_ends_a_choice_before_its_fewest_tokens() -> None:
    answer = run_one(grammar_kind="regex", grammar="yes", min_tokens=9)
    assert (bytes(answer.tokens[0]), answer.finish) == (b"yes", ["stop"])


def test_end_at_the_last_token_that_may_come_is_a_stop() -> None:
    assert run_one(list(b"abc"), max_tokens=4).finish == ["stop"]
    assert run_one(list(b"abc"), max_tokens=3).finish == ["length"]


@pytest.mark.parametrize(("options", "most"), [("max_tokens=40", 40), ("blocks=5", 40), ("blocks=5,max_tokens=30", 30)])
def test_context_and_pool_end_a_choice(options: str, most: int) -> None:
    answer = run_one(list(b"0123456789"), options, ignore_eos=True)
    assert (len(answer.tokens[0]), answer.finish) == (most - 10, ["length"])


def test_each_choice_has_its_own_tokens_and_end() -> None:
    answer = run_one(list(b"abc.def"), num_choices=3, stop_token_ids=(ord("."),))
    assert [bytes(tokens) for tokens in answer.tokens] == [b"abc", b"bc", b"c"]
    assert answer.finish == ["stop"] * 3


def test_bias_reaches_the_draw() -> None:
    sampling = Sampling(temperature=0.0, logit_bias=((ord("x"), 1000.0),))
    assert bytes(run_one(list(b"abc"), sampling=sampling, max_tokens=5).tokens[0]) == b"xxxxx"


def test_logprobs_come_one_for_each_token() -> None:
    answer = run_one(list(b"abc"), logprobs=2)
    assert [entry.top[0][0] for entry in answer.logprobs[0]] == list(b"abc")
    for entry in answer.logprobs[0]:
        assert entry.logprob == pytest.approx(-LN2)
        assert [logprob for _, logprob in entry.top] == pytest.approx([-LN2, -2 * LN2])


def test_grammar_binds_every_choice_and_ends_it_when_it_is_complete() -> None:
    answer = run_one(grammar_kind="regex", grammar="yes", num_choices=1, ignore_eos=True)
    assert (bytes(answer.tokens[0]), answer.finish) == (b"yes", ["stop"])


def test_matcher_that_fails_costs_only_its_own_request() -> None:
    rig = EngineRig()
    broken = rig.submit(PROMPT, grammar_kind="regex", grammar="yes", sampling=Sampling(temperature=0.0))
    rig.engine.jobs[0].matchers[0].consume(ord("y"))  # as if it had taken a token that was never chosen
    rig.engine.jobs[0].matchers[0].fill_mask = lambda allowed: allowed.fill(-1)  # type: ignore[method-assign]
    fine = rig.submit(PROMPT)
    rig.run()
    assert isinstance(broken.error, Internal)
    assert fine.tokens == [echo(PROMPT)]
    rig.assert_all_given_back()


# --- what runs beside what ---------------------------------------------------------------------------------------------


def test_sixteen_streams_make_progress_together() -> None:
    rig = EngineRig("blocks=256")
    answers = [rig.submit(PROMPT, ignore_eos=True, max_tokens=100) for _ in range(16)]
    rig.step(40)
    counts = [len(answer.tokens[0]) for answer in answers]
    assert min(counts) > 20
    assert max(counts) - min(counts) <= 16 * len(PROMPT) // 64 + 1


def test_long_prompt_stalls_no_running_stream() -> None:
    rig = EngineRig("blocks=512,max_tokens=4096", max_prefill_tokens=64)
    stream = rig.submit(b"stream", ignore_eos=True, max_tokens=1000)
    rig.step(5)
    long = rig.submit([65 + i % 26 for i in range(2000)], max_tokens=5)
    while not long.tokens[0]:
        before = len(stream.tokens[0])
        rig.step()
        assert len(stream.tokens[0]) == before + 1
    assert all(size.num_prefill <= 64 for size in rig.sizes)


def test_prompt_is_read_in_larger_parts_while_no_choice_decodes() -> None:
    rig = EngineRig("blocks=512,max_tokens=4096", max_prefill_tokens=64, max_lone_prefill_tokens=128)
    rig.submit([65 + i % 26 for i in range(300)], ignore_eos=True, max_tokens=1000)
    rig.step(3)
    other = rig.submit([97 + i % 26 for i in range(300)], max_tokens=5)
    while not other.tokens[0]:
        rig.step()
    assert [size.num_prefill for size in rig.sizes] == [128, 128, 44, 64, 64, 64, 64, 44]


def timed_rig(**limits: Any) -> EngineRig:
    """Return an engine whose steps take 20 ms, and a millisecond for each token."""
    rig = EngineRig("blocks=400", max_prefill_tokens=256, **limits)
    run_step = rig.runner.run_step

    def take_time(slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> object:
        rig.now_ns += (20 + sum(len(slot.token_ids) for slot in slots)) * 1_000_000
        return run_step(slots, copies)

    rig.runner.run_step = take_time
    return rig


def test_prompts_delay_running_streams_as_long_as_set() -> None:
    rig = timed_rig(token_gap_ns=100_000_000, first_token_ns=10**12)
    stream = rig.submit(b"stream", ignore_eos=True)
    rig.step()
    rig.submit(bytes(2000), max_tokens=1)
    rig.step(10)
    assert [size.num_prefill for size in rig.sizes[1:4]] == [256, 128, 85]
    assert all(76 <= size.num_prefill <= 80 for size in rig.sizes[4:])
    assert len(stream.tokens[0]) == 11


def test_a_prompt_that_waited_longer_than_set_is_read_in_whole_parts_again() -> None:
    rig = timed_rig(token_gap_ns=10_000_000, first_token_ns=1_000_000_000)
    rig.submit(b"stream", ignore_eos=True)
    rig.step()
    begun_ns = rig.now_ns
    answer = rig.submit(bytes(1500), max_tokens=1)
    while not answer.tokens[0]:
        rig.step()
    parts = [size.num_prefill for size in rig.sizes[1:] if size.num_prefill]
    assert parts[:6] == [256, 128, 64, 32, 16, 16], "the step of one token takes too long already"
    assert parts[-2] == 256
    assert rig.now_ns - begun_ns < 3_000_000_000


def test_equal_prompt_is_read_from_the_cache_and_says_so() -> None:
    rig = EngineRig()
    first = rig.submit(PROMPT)
    rig.run()
    second = rig.submit(PROMPT)
    rig.run()
    assert (first.num_cached, second.num_cached) == (0, 48)
    assert second.totals is not None
    assert second.totals.num_cached == 48
    assert second.tokens == first.tokens


def test_an_answer_tells_when_its_first_step_began() -> None:
    rig = EngineRig(max_prefill_tokens=10)
    answer = rig.submit(list(b"x" * 30))
    rig.run()
    assert answer.totals is not None
    assert answer.totals.started_ns == 1_000_001


# --- what frontends ask for meanwhile ----------------------------------------------------------------------------------


def test_cancelled_request_gives_its_blocks_back_before_the_next_step() -> None:
    rig = EngineRig()
    answer, other = rig.submit(PROMPT, num_choices=4, ignore_eos=True), rig.submit(b"other", ignore_eos=True)
    rig.step(5)
    rig.frontend.cancel(1)
    rig.step()
    assert answer.is_cancelled
    assert rig.num_used == 2
    assert len(other.tokens[0]) > 3


def test_prompt_that_is_cancelled_before_its_turn_never_runs() -> None:
    rig = EngineRig(max_sequences=1)
    rig.submit(b"first", ignore_eos=True, max_tokens=20)
    second = rig.submit(PROMPT)
    rig.step(2)
    rig.frontend.cancel(2)
    rig.run()
    assert second.is_cancelled
    assert all(size.num_prefill <= 5 for size in rig.sizes)
    rig.assert_all_given_back()


def test_stopped_choice_gives_its_blocks_back_and_the_others_go_on() -> None:
    rig = EngineRig()
    answer = rig.submit(PROMPT, num_choices=2)
    rig.step(10)
    before = rig.num_used
    rig.frontend.stop(1, 1)
    rig.step()
    num_stopped = len(answer.tokens[1])
    assert rig.num_used < before
    rig.run()
    assert answer.tokens[0] == echo(PROMPT)
    assert (len(answer.tokens[1]), answer.finish) == (num_stopped, ["stop", ""])
    assert answer.totals is not None
    rig.assert_all_given_back()


def test_request_whose_choices_were_all_stopped_ends_with_its_totals() -> None:
    rig = EngineRig()
    answer = rig.submit(PROMPT, num_choices=2, ignore_eos=True)
    rig.step(10)
    rig.frontend.stop(1, 0)
    rig.frontend.stop(1, 1)
    rig.step()
    assert answer.totals is not None
    rig.assert_all_given_back()


def test_deadline_bounds_the_time_to_the_first_token_and_no_more() -> None:
    rig = EngineRig(max_sequences=1)
    first = rig.submit(PROMPT, deadline_ns=3_000_000, ignore_eos=True, max_tokens=60)
    second = rig.submit(PROMPT, deadline_ns=20_000_000)
    rig.step(30)
    assert len(first.tokens[0]) > 20
    assert second.is_cancelled
    rig.run()
    assert first.finish == ["length"]


def test_requests_of_a_frontend_that_is_gone_are_forgotten() -> None:
    rig = EngineRig()
    gone = Frontend(slot=1)
    gone.credit = 0
    rig.submit(PROMPT, frontend=gone, num_choices=3)
    rig.submit(PROMPT, frontend=gone)
    stays = rig.submit(PROMPT)
    rig.step(4)
    rig.engine.drop(gone)
    rig.run()
    assert stays.tokens == [echo(PROMPT)]
    rig.assert_all_given_back()


# --- what goes out -----------------------------------------------------------------------------------------------------


def test_one_frame_a_step_carries_all_choices() -> None:
    rig = EngineRig()
    for _ in range(5):
        rig.submit(b"abcdef", num_choices=2, ignore_eos=True)
    rig.step(4)
    assert rig.frontend.answers.num_frames == 4


def test_without_credit_the_next_frame_carries_everything_since() -> None:
    rig = EngineRig()
    answer = rig.submit(PROMPT)
    rig.step(3)
    rig.frontend.credit = 0
    rig.run()
    assert rig.engine.is_unsent
    assert rig.num_used == 0, "what has ended holds no blocks, sent or not"
    assert len(answer.tokens[0]) == 3
    rig.frontend.credit = 1
    rig.step()
    assert (answer.tokens, answer.finish) == ([echo(PROMPT)], ["stop"])
    assert answer.totals is not None
    rig.assert_all_given_back()


def test_frontend_without_room_holds_up_nobody_else() -> None:
    rig = EngineRig()
    full = Frontend(slot=1, memory_bytes=1 << 12)
    full.fill()
    late, other = rig.submit(PROMPT, frontend=full), rig.submit(PROMPT)
    rig.run()
    assert other.totals is not None
    assert late.tokens == [[]]
    full.empty()
    rig.step()
    assert late.tokens == [echo(PROMPT)]
    assert late.totals is not None


def test_what_waited_long_goes_out_in_pieces_of_bounded_size() -> None:
    rig = EngineRig("blocks=128,max_tokens=500")
    rig.frontend.credit = 0
    answer = rig.submit(b"abc", ignore_eos=True, logprobs=20, num_choices=2)
    rig.step(300)
    (job,) = rig.engine.jobs
    ((sequence, record),), is_all = take_records([job], max_bytes=1000)
    assert not is_all
    assert sequence.num_unsent > len(record.token_ids) == (1000 - 48) // (5 + 13 + 15 * 20)
    rig.frontend.credit = float("inf")
    rig.step()
    assert rig.frontend.answers.num_frames > 2
    rig.run()
    assert [len(tokens) for tokens in answer.tokens] == [497, 497]


# --- when a step fails -------------------------------------------------------------------------------------------------


def test_only_unproven_requests_are_suspects() -> None:
    rig = EngineRig(max_prefill_tokens=40)
    rig.submit(PROMPT, ignore_eos=True, num_choices=2)
    rig.step(5)
    suspects = [[request_id for _, request_id in begun.suspects] for begun in rig.begun]
    assert suspects == [[1], [1], [1], [], []], "two parts of its prompt, its first decode step, no more"
    rig.submit(b"x")
    rig.step()
    assert [list(begun.suspects) for begun in rig.begun[5:]] == [[(0, 2)]]


def test_request_that_breaks_its_step_leaves_its_neighbours_alone() -> None:
    rig = EngineRig()
    first = rig.submit(PROMPT, num_choices=3)
    rig.step(4)
    rig.runner.faults += [(RuntimeError("secret detail"), True), (RuntimeError("secret detail"), False)]
    second = rig.submit(b"second")
    rig.run()
    errors = [answer.error for answer in (first, second) if answer.error is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], Internal)
    assert "secret" not in str(errors[0])
    assert second.tokens == [list(b"second")]
    rig.assert_all_given_back()


def test_part_that_runs_again_by_itself_makes_its_own_copy_alone() -> None:
    rig = EngineRig()
    rig.submit(PROMPT, num_choices=3)
    rig.step()
    seen: list[list[tuple[int, int]]] = []
    run_step = rig.runner.run_step

    def watch(slots, copies):
        seen.append(list(copies))
        return run_step(slots, copies)

    rig.runner.run_step = watch
    rig.runner.faults.append((RuntimeError("broken"), True))
    rig.step()
    together, *apart = seen
    assert len(together) == 2
    # A copy that came again would overwrite what its choice has written since.
    assert [len(copies) for copies in apart] == [1, 1, 0]
    assert sorted(copy for copies in apart for copy in copies) == sorted(together)


def test_value_that_is_not_finite_fails_its_own_request_and_is_counted() -> None:
    rig = EngineRig()
    answer = rig.submit(b"a")
    rig.runner.faults.append((NonFinite("not a number"), True))
    rig.run()
    assert isinstance(answer.error, NonFinite)
    assert rig.engine.num_non_finite == 1


def test_prompt_is_read_in_smaller_parts_where_there_is_no_memory_for_large_ones() -> None:
    rig = EngineRig("blocks=64,oom_tokens=20", max_prefill_tokens=200)
    prompt = PROMPT * 3
    answer = rig.submit(prompt)
    rig.run()
    assert answer.tokens == [echo(prompt)]
    assert rig.ooms == [False] * 3
    assert max(length for step in rig.runner.lengths[-40:] for length in step) <= 20


def test_fewer_choices_run_where_there_is_no_memory_for_all() -> None:
    rig = EngineRig("blocks=128,oom_tokens=5", max_prefill_tokens=4)
    answers = [rig.submit(PROMPT[:20]) for _ in range(8)]
    rig.run()
    assert all(answer.tokens == [echo(PROMPT[:20])] for answer in answers)
    assert rig.ooms
    assert not any(rig.ooms)


def test_only_a_request_without_memory_for_one_token_is_given_up() -> None:
    rig = EngineRig()
    lost = rig.submit(b"a")
    rig.runner.faults.append((MemoryError("none"), False))
    rig.step()
    assert isinstance(lost.error, ResourceExhausted)
    assert lost.error.retry_after_s == 5
    assert rig.ooms == [True]
    rig.assert_all_given_back()


def test_lost_device_ends_the_engine() -> None:
    rig = EngineRig("lost_tokens=10")
    rig.submit(PROMPT)
    with pytest.raises(DeviceLostError):
        rig.step()


def test_token_that_ends_a_text_is_not_forbidden_where_it_is_a_stop_token() -> None:
    answer = run_one(list(b"abc"), ignore_eos=True, stop_token_ids=(END_OF_TEXT,))
    assert (bytes(answer.tokens[0]), answer.finish) == (b"abc", ["stop"])
