"""Runs one generating model: each job from its request to its end, one step at a time.

The planner decides what runs, the runner computes it, and `step` recovers from failures. If the runner can, the next step
is launched before the tokens of the one before are read (docs/decisions/085): at most two are under way. `token_sender`
sends the tokens; nothing here waits for a frontend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple, cast

import msgspec

from sie.runtime.logs import get_logger
from sie.values.errors import BadRequest, Internal, NonFinite, ResourceExhausted, SieError
from sie.workers.device.faults import raise_if_lost
from sie.workers.generation.kv import BlockPool
from sie.workers.generation.planner import Limits, Plan, Planner
from sie.workers.generation.sequences import Job, Part, Sequence, Tokens
from sie.workers.generation.step import Begin, Begun, StepSize, run_parts, try_launch
from sie.workers.generation.token_sender import TokenSender
from sie.workers.model_api import AheadGenerateRunner, Chosen, GenerateRunner, Matcher, SlotResult
from sie.workers.requests.worker_request import Link
from sie.workers.scheduling.ceilings import Ceiling, lower_ceiling
from sie.workers.scheduling.pace import Pace

_log = get_logger(__name__)
_LEAST_CHUNK: Final = 16
"""Prompt tokens that cost a step little more than one does. A smaller chunk would delay its prompt for nothing."""
REASONS: Final = ("stop", "length", "stopped", "cancelled", "failed")
"""How choices end. `stopped`: the frontend found a stop string."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one model's engine, from the settings and the worker's device."""

    max_sequences: int
    max_prefill_tokens: int
    max_lone_prefill_tokens: int = 0
    """Limit for a step in which no choice decodes; 0: `max_prefill_tokens`."""
    token_gap_ns: int = 0
    """Time of a step with prompts beside running choices, towards which the chunks of prompts are sized; 0: they are not."""
    first_token_ns: int = 0
    """Wait for a first token after which chunks have their full size again."""
    max_context_tokens: int = 0
    """0: the card's limit."""
    max_prefills: int = 1024
    is_sharing: bool = True
    prompt_logits_bytes: int = 1 << 26
    """Memory for the logits that score prompt tokens in a step, in float32."""
    oom_retry_after_s: int = 5


class Ended(NamedTuple):
    """A step that has ended: its size, and since when the device has worked on it alone."""

    size: StepSize
    began_ns: int


class Engine:
    """The jobs of one model. now_ns is CLOCK_MONOTONIC."""

    def __init__(self, runner: GenerateRunner, limits: EngineLimits) -> None:
        rule = runner.card.generate
        assert rule is not None
        self.runner = runner
        self.limits = limits
        is_encoded = rule.is_encoder_decoder
        pool_tokens = runner.num_blocks * runner.block_tokens
        context_length = min(limits.max_context_tokens or rule.context_length, rule.context_length)
        self.max_tokens = min(context_length + is_encoded, pool_tokens)
        """Most tokens of a prompt and its answer together, with the token between them that starts a decoder."""
        self.planner = Planner(
            BlockPool(runner.num_blocks),
            Limits(
                block_tokens=runner.block_tokens,
                max_prefills=limits.max_prefills,
                is_sharing=limits.is_sharing and not is_encoded,  # each key of an encoder depends on the whole prompt
                is_whole=is_encoded,
                max_scored=max(1, limits.prompt_logits_bytes // (4 * runner.vocab_size)),
                max_tokens=self.max_tokens,
            ),
        )
        self.jobs: list[Job] = []
        """All jobs with an unanswered request, oldest first. A job is not planned before its grammar is compiled."""
        self.num_ended: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Ended choices by reason."""
        self.num_prompt_tokens = self.num_generated = 0
        self.num_non_finite = 0
        """Sequences that failed because a value was not finite."""
        self._begun: Begun | None = None
        self._ended_ns = 0
        self._chunks: dict[str, float] = {}
        self._chunk_pace = Pace(self._chunks, limits.token_gap_ns)
        self._prefill_ceiling: Ceiling | None = None
        self._sequence_ceiling: Ceiling | None = None
        self._sender = TokenSender(self.jobs.remove)

    @property
    def can_run(self) -> bool:
        """Whether `step` has something to run or to read."""
        return bool(self.planner.running or self.planner.waiting or self._begun)

    @property
    def has_begun(self) -> bool:
        """Whether a step was launched and is not read."""
        return self._begun is not None

    @property
    def under_way(self) -> Begin | None:
        """The step that was launched and is not read, or None."""
        return None if self._begun is None else Begin.of(self._begun.parts)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for blocks, or for their grammar."""
        compiling = sum(job.task.num_choices for job in self.jobs if not job.sequences and not job.first_token_ns)
        return compiling + sum(sequence.num_choices for sequence in self.planner.waiting)

    @property
    def is_unsent(self) -> bool:
        """Whether output waits for room or credit."""
        return self._sender.is_unsent

    # --- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Take a job; the planner sees it only after `start`."""
        self.jobs.append(job)

    def start(self, job: Job, matchers: list[Matcher]) -> None:
        """Queue a job's prompt for its first step. matchers is empty or has one for each choice."""
        job.matchers = matchers
        prompt = Tokens(job.request.inputs[0])
        if job.decoder_start_id is not None:
            prompt.append(job.decoder_start_id)
        sequence = Sequence(job, 0, prompt, self.runner.least_length(len(prompt)))
        job.sequences.append(sequence)
        self.planner.add(sequence)

    def fail(self, job: Job, error: SieError) -> None:
        """Answer a job with an error, and drop its unsent output."""
        self._forget(job, "failed")
        job.request.fail(error)

    def drop(self, link: Link) -> None:
        """Remove the jobs of a frontend that is gone."""
        self._sender.drop(link)
        for job in [job for job in self.jobs if job.request.link is link]:
            self._forget(job, "cancelled")
            job.request.drop()

    def _cancel(self, job: Job) -> None:
        self._forget(job, "cancelled")
        job.request.cancel()

    def _forget(self, job: Job, reason: str) -> None:
        for sequence in job.sequences:
            if not sequence.finish:
                self.planner.remove(sequence)
                self._count(reason, sequence.num_choices)
        job.sequences.clear()
        self.jobs.remove(job)
        self._sender.forget(job)

    def _count(self, reason: str, count: int = 1) -> None:
        self.num_ended[reason] += count

    def tend(self, now_ns: int) -> None:
        """End the jobs that were cancelled or stopped or missed their deadline; then send the waiting output."""
        for job in list(self.jobs):
            request = job.request
            if request.is_cancelled or (not job.first_token_ns and request.deadline_ns <= now_ns):
                self._cancel(job)
            elif job.first_token_ns:
                for sequence in [found for found in job.sequences if request.is_stopped(found.choice)]:
                    self._stop(sequence)
        self._sender.send()

    def _stop(self, sequence: Sequence) -> None:
        """End a choice that its frontend has stopped, without a record to say so."""
        if not sequence.finish:
            self.planner.remove(sequence)
            self._count("stopped")
        sequence.job.sequences.remove(sequence)
        self._sender.mark(sequence.job)

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(
        self, now_ns: Callable[[], int], begin: Callable[[Begin], None], on_oom: Callable[[bool], None]
    ) -> Ended | None:
        """Run one step; or only launch it, if the runner can, and read the one launched before.

        Return the step that has ended, or None. Call `tend` right before. begin is called before each forward pass.
        on_oom is called after each one that ran out of memory, with True if a request failed because of it. Raises
        DeviceLostError when the device is lost.
        """
        now = now_ns()
        before, self._begun = self._begun, None
        plan = self._plan(now) if before is None or self.planner.can_plan_ahead() else None
        if plan is not None and self._may_begin(plan):
            self._begun = self._launch(plan, before, now, begin)
        if before is not None:
            return self._read(before, now_ns)
        if plan is None or self._begun is not None:
            return None
        return self._run_whole(plan, now, now_ns, begin, on_oom)

    def settle(self, now_ns: Callable[[], int]) -> Ended | None:
        """Read the step that was launched, if there is one: nothing is under way afterwards. Raises DeviceLostError."""
        before, self._begun = self._begun, None
        return None if before is None else self._read(before, now_ns)

    def _plan(self, now_ns: int) -> Plan | None:
        plan = self.planner.plan(
            _capped(self._max_prefill_tokens(now_ns), self._prefill_ceiling, now_ns),
            _capped(self.limits.max_sequences, self._sequence_ceiling, now_ns),
        )
        for part in () if plan is None else plan.parts:
            part.sequence.job.started_ns = part.sequence.job.started_ns or now_ns
        return plan

    def _may_begin(self, plan: Plan) -> bool:
        """Return whether a step may be launched and read later. If not, it runs whole, with no other step under way."""
        return getattr(self.runner, "generates_ahead", False) and not any(_must_run_whole(part) for part in plan.parts)

    def _launch(self, plan: Plan, before: Begun | None, now_ns: int, begin: Callable[[Begin], None]) -> Begun | None:
        announced = Begin.of(plan.parts)
        begin(announced if before is None else announced.behind(Begin.of(before.parts)))
        begun = try_launch(cast("AheadGenerateRunner", self.runner), plan, before, now_ns)
        if begun is not None:
            self.planner.begin(plan)
        return begun

    def _read(self, begun: Begun, now_ns: Callable[[], int]) -> Ended:
        """Wait for the tokens of a step, and take those that still count."""
        began_ns = max(begun.began_ns, self._ended_ns)  # the device computed the step before until then
        try:
            results = begun.read()
        except Exception as error:
            raise_if_lost(error)
            _log.error("the tokens of a step of %s could not be read", self.runner.card.id, exc_info=error)
            self._repeat(begun.parts)
            results = [()] * len(begun.parts)
        self._ended_ns = now_ns()
        return self._take_all(begun.parts, results, began_ns, self._ended_ns)

    def _repeat(self, parts: Collection[Part]) -> None:
        """Let the sequences of a step that could not be read begin again, in steps that run whole."""
        for part in parts:
            if part.is_current:
                part.sequence.job.is_redrawn = True
                self.planner.preempt(part.sequence)

    def _run_whole(
        self, plan: Plan, started_ns: int, now_ns: Callable[[], int], begin: Callable[[Begin], None],
        on_oom: Callable[[bool], None],
    ) -> Ended:  # fmt: skip
        results = run_parts(self.runner, plan, begin)
        if results is not None:
            self.planner.begin(plan)
            return self._take_all(plan.parts, results, started_ns, now_ns())
        size = StepSize.of(plan.parts)
        on_oom(self._shrink(plan.parts, size.num_prefill, now_ns()))
        self._sender.send()
        return Ended(size, started_ns)

    def _take_all(
        self, parts: Collection[Part], results: Collection[SlotResult | None], began_ns: int, ended_ns: int
    ) -> Ended:
        """Take the results of a step that has ended, and send what is new."""
        size = StepSize.of(parts)
        if size.num_decode:
            self._chunk_pace.adapt("", size.num_prefill, ended_ns - began_ns)
        for part, result in zip(parts, results, strict=True):
            if part.is_current:
                self._apply(part, result, ended_ns)
        self._sender.send()
        return Ended(size, began_ns)

    def _max_prefill_tokens(self, now_ns: int) -> int:
        """Return the most prompt tokens that the next step may have."""
        limits, running = self.limits, self.planner.running
        if not any(sequence.num_left == 1 for sequence in running):
            return limits.max_lone_prefill_tokens or limits.max_prefill_tokens
        reading = [sequence.job for sequence in running if sequence.num_left > 1 and not sequence.job.first_token_ns]
        is_late = any(now_ns - job.arrived_ns > limits.first_token_ns for job in reading)
        chunk = limits.max_prefill_tokens if is_late else int(self._chunks.get("", limits.max_prefill_tokens))
        return min(limits.max_prefill_tokens, max(chunk, _LEAST_CHUNK))

    def _apply(self, part: Part, result: SlotResult | None, now_ns: int) -> None:
        sequence, job = part.sequence, part.sequence.job
        if result is None:
            job.is_redrawn = True
            self.planner.undo(part)
            return
        if isinstance(result, SieError):
            self.num_non_finite += isinstance(result, NonFinite)
            self.fail(job, result)
            return
        if job.scores is not None:
            job.scores.note_read(part.start + part.count)
        self.planner.advance(part)
        if not sequence.num_generated:
            self.num_prompt_tokens += part.count
        if not part.is_last:
            return
        job.is_proven = not sequence.is_first
        choices = [sequence]
        if sequence.is_first:
            job.first_token_ns = now_ns
            sequence.is_first = False
            choices += [self.planner.fork(sequence, choice) for choice in range(1, job.task.num_choices)]
            job.sequences[:] = choices
        try:
            if not job.task.max_tokens:
                for choice in choices:
                    self._finish(choice, "length")
            else:
                for choice, chosen in zip(choices, result, strict=True):
                    self._take(choice, chosen)
        except BadRequest as error:
            self.fail(job, error)
            return
        except Exception:  # a matcher is library code that runs on a client's grammar
            _log.exception("a token of %s could not be processed", self.runner.card.id)
            self.fail(job, Internal("internal error during generation"))
            return
        self._sender.mark(job)

    def _take(self, sequence: Sequence, chosen: Chosen) -> None:
        """Add a token to a choice, and end the choice if the token completes it."""
        job, token_id = sequence.job, chosen.token_id
        if token_id in job.stops:
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token_id)
        sequence.num_unsent += 1
        if chosen.logprob is not None:
            sequence.logprobs.append(chosen.logprob)
        job.num_generated += 1
        self.num_generated += 1
        is_complete = False
        if job.matchers:
            matcher = job.matchers[sequence.choice]
            matcher.consume(token_id)
            is_complete = matcher.is_complete
        if is_complete:
            self._finish(sequence, "stop")
        elif sequence.num_generated >= job.task.max_tokens or len(sequence.tokens) >= self.max_tokens:
            self._finish(sequence, "length")
        elif len(sequence.tokens) == self.runner.restart_length:
            self.planner.restart(sequence, self.runner.least_length(len(sequence.tokens)))

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish = reason
        self.planner.remove(sequence)
        self._count(reason)

    def _shrink(self, parts: list[Part], num_prefill: int, now_ns: int) -> bool:
        """Make the next steps smaller than one that ran out of memory; return whether a request failed.

        It first reduces the prompt tokens, then the choices. The newest choices are preempted.
        """
        reading = [part for part in parts if part.count > 1]
        if self.planner.limits.is_whole and len(reading) == 1:
            self._fail_for_memory(reading[0], f"a prompt of {reading[0].count} tokens")
            return True
        if num_prefill > 1:
            self._prefill_ceiling = lower_ceiling(self._prefill_ceiling, num_prefill, now_ns)
        elif len(parts) > 1:
            self._sequence_ceiling = lower_ceiling(self._sequence_ceiling, len(parts), now_ns)
            for part in sorted(parts, key=lambda part: part.sequence.age)[self._sequence_ceiling.num_tokens :]:
                self.planner.preempt(part.sequence)
        else:
            self._fail_for_memory(parts[0], "a step of one token")
            return True
        return False

    def _fail_for_memory(self, part: Part, step: str) -> None:
        text = f"Model '{self.runner.card.id}': no memory for {step}"
        self.fail(part.sequence.job, ResourceExhausted(text, retry_after_s=self.limits.oom_retry_after_s))


def _capped(limit: int, ceiling: Ceiling | None, now_ns: int) -> int:
    return limit if ceiling is None else min(limit, ceiling.max_tokens(now_ns))


def _must_run_whole(part: Part) -> bool:
    """Return whether a part scores its prompt, or draws a token that the host must see before the next one."""
    job = part.sequence.job
    is_scored = job.scores is not None and not job.first_token_ns
    return is_scored or (part.is_last and job.needs_host)
