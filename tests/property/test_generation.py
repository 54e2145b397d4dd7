"""Random sequences of events for generation requests: each choice gets exactly its tokens, in order and once.

The stub reads what it continues from its blocks, so that a block with the wrong contents shows in the text. One stub runs
each step at once, another begins steps ahead and computes them when they are read.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sie.values.errors import Internal, ResourceExhausted
from sie.values.generate import Sampling
from sie.workers.model_api import Slot
from tests.property.lives import live, note
from tests.unit.workers.generation_rig import AheadStub, Answer, EngineRig, Frontend, echo, make_card

_BLOCK = 4


class GenerationMachine(RuleBasedStateMachine):
    """Requests of two frontends, one of which may have no credit or no room for a while."""

    generates_ahead = False

    @initialize(
        blocks=st.integers(3, 9),
        max_sequences=st.integers(1, 6),
        max_prefill=st.integers(1, 24),
        is_sharing=st.sampled_from([True, True, False]),
    )
    def start(self, blocks: int, max_sequences: int, max_prefill: int, is_sharing: bool) -> None:
        self.max_tokens = blocks * _BLOCK
        self.rig = EngineRig(
            f"blocks={blocks}",
            block_tokens=_BLOCK,
            runner=AheadStub(make_card(f"blocks={blocks}"), _BLOCK) if self.generates_ahead else None,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill,
            is_sharing=is_sharing,
        )
        self.frontends = [self.rig.frontend, Frontend(slot=1, memory_bytes=1 << 13)]
        self.asked: list[tuple[Answer, Frontend, int, list[int], dict[str, Any]]] = []
        self.num_broken = self.num_failed = 0
        self.stopped: set[tuple[int, int]] = set()
        self.cancelled: set[int] = set()

    @rule(
        length=st.integers(1, 30),
        salt=st.sampled_from([b"", b"a"]),
        max_tokens=st.integers(1, 40),
        num_choices=st.integers(1, 3),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 3, 25]),
        logprobs=st.sampled_from([None, 0, 2]),
        who=st.integers(0, 1),
        is_alone=st.sampled_from([False, False, True]),
        is_counted=st.sampled_from([False, False, True]),
    )
    def submit(self, length: int, who: int, is_alone: bool, is_counted: bool, **task: Any) -> None:
        # Few different beginnings, so that blocks are shared.
        prompt = [65 + (number * number) % 7 for number in range(min(length, self.max_tokens - 1))]
        frontend = self.frontends[who]
        sampling = Sampling(temperature=0.0, presence_penalty=0.5 * is_counted)  # the stub ignores it
        answer = self.rig.submit(prompt, frontend=frontend, is_alone=is_alone, sampling=sampling, **task)
        self.asked.append((answer, frontend, len(frontend.answers), prompt, task))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.rig.step(count)

    def submit_if_idle(self) -> None:
        """Leave something to cancel or stop: few lives would come to either, and some runs to none."""
        if all(answer.is_over for answer, *_ in self.asked):
            self.submit(
                length=5, who=0, is_alone=False, is_counted=False,
                salt=b"", max_tokens=40, num_choices=2, ignore_eos=True, min_tokens=0, logprobs=None,
            )  # fmt: skip

    @rule(pick=st.integers(0, 100), is_begun=st.booleans())
    def cancel(self, pick: int, is_begun: bool) -> None:
        self.submit_if_idle()
        running = [number for number, (answer, *_) in enumerate(self.asked) if not answer.is_over]
        running = [number for number in running if self.asked[number][0].tokens[0] or not is_begun]
        if running:
            number = running[pick % len(running)]
            _, frontend, request_id, _, _ = self.asked[number]
            note("cancelled", number not in self.cancelled)
            frontend.cancel(request_id)
            self.cancelled.add(number)

    @rule(pick=st.integers(0, 100))
    def stop(self, pick: int) -> None:
        self.submit_if_idle()
        going_on = [
            (number, choice)
            for number, (answer, *_) in enumerate(self.asked)
            for choice, finish in enumerate(answer.finish)
            if not answer.is_over and not finish
        ]
        if going_on:
            number, choice = going_on[pick % len(going_on)]
            _, frontend, request_id, _, _ = self.asked[number]
            note("stopped", (number, choice) not in self.stopped)
            frontend.stop(request_id, choice)
            self.stopped.add((number, choice))

    @rule(credit=st.integers(0, 2), is_full=st.booleans())
    def starve(self, credit: int, is_full: bool) -> None:
        if is_full:
            self.frontends[1].fill()
        else:
            self.frontends[1].credit = credit
        note("no room" if is_full else "no credit")

    @rule(is_memory=st.booleans(), is_late=st.booleans())
    def break_a_step(self, is_memory: bool, is_late: bool) -> None:
        error: Exception = MemoryError("none left") if is_memory else RuntimeError("broken")
        self.rig.runner.faults.append((error, is_late))
        self.num_broken += 1
        note("no memory" if is_memory else "broken")

    @rule()
    def feed(self) -> None:
        self.frontends[1].empty()
        self.frontends[1].credit = float("inf")

    @rule()
    def finish_all(self) -> None:
        self.feed()
        self.rig.run()
        self.rig.step(2)
        for number, (answer, _, _, prompt, task) in enumerate(self.asked):
            self.check(number, answer, prompt, task)
        self.rig.assert_all_given_back()
        assert not self.frontends[1].num_leased
        planner = self.rig.engine.planner
        note("preempted", planner.num_preempted)
        note("shared", planner.num_hits)
        self.asked.clear()
        self.stopped.clear()
        self.cancelled.clear()

    def check(self, number: int, answer: Answer, prompt: list[int], task: dict[str, Any]) -> None:
        if answer.error is not None:
            # Only what failed by itself.
            assert isinstance(answer.error, ResourceExhausted | Internal)
            self.num_failed += 1
            assert self.num_failed <= self.num_broken
            return
        if number in self.cancelled:
            assert answer.is_over
            return
        assert answer.totals is not None
        for choice in range(task["num_choices"]):
            wanted, finish = self.expect(prompt, choice, task)
            if (number, choice) in self.stopped:
                got = answer.tokens[choice]
                assert got == wanted[: len(got)]
            else:
                assert (answer.tokens[choice], answer.finish[choice]) == (wanted, finish)

    def expect(self, prompt: list[int], choice: int, task: dict[str, Any]) -> tuple[list[int], str]:
        most = min(task["max_tokens"], self.max_tokens - len(prompt))
        if task["min_tokens"] <= len(prompt) < most and not task["ignore_eos"]:
            return echo(prompt, choice), "stop"
        return echo(prompt, choice, most), "length"

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.finish_all()

    @invariant()
    def what_came_so_far_is_right(self) -> None:
        for answer, _, _, prompt, _ in getattr(self, "asked", ()):
            for choice, tokens in enumerate(answer.tokens):
                assert tokens == echo(prompt, choice, len(tokens))


class AheadMachine(GenerationMachine):
    """The same with steps that begin before the one before has been read."""

    generates_ahead = True

    @rule()
    def refuse_to_begin(self) -> None:
        self.rig.runner.launch_faults.append(MemoryError("none left"))
        note("not begun")

    @rule(every=st.integers(2, 9))
    def leave_to_the_host(self, every: int) -> None:
        def is_on_host(slot: Slot) -> bool:
            return (slot.start + len(slot.token_ids)) % every == 0 and bool(slot.draws)

        self.rig.runner.is_on_host = is_on_host

    @rule()
    def finish_all(self) -> None:
        super().finish_all()
        note("ahead", self.rig.runner.num_behind)
        self.rig.runner.num_behind = 0


def test_every_choice_gets_its_tokens_once_and_in_order() -> None:
    live(
        GenerationMachine, "preempted", "shared", "cancelled", "stopped", "no room", "no credit", "no memory", "broken",
        lives=80, steps=30, times=5,
    )  # fmt: skip


def test_steps_that_begin_ahead_change_no_token() -> None:
    live(
        AheadMachine, "preempted", "shared", "stopped", "no memory", "broken", "not begun", "ahead",
        lives=60, steps=30, times=5,
    )  # fmt: skip
