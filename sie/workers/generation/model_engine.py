"""Runs one generating model: each job from its request to its end, one step at a time.

The planner decides what runs, the runner computes it, and `step` recovers from failures. Nothing here waits: unsent
tokens stay in their sequence, and the next frame carries everything since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import msgspec

from sie.runtime.logs import get_logger
from sie.shm.extent import begin_extent
from sie.values.errors import BadRequest, Internal, NonFinite, ResourceExhausted, SieError
from sie.values.generate import GenerateTotals, TokenFrame
from sie.values.work_bytes import extent_bytes
from sie.workers.generation.kv import BlockPool
from sie.workers.generation.planner import Limits, Part, Planner
from sie.workers.generation.sequences import Job, Sequence, Tokens
from sie.workers.generation.step import StepSize, run_parts
from sie.workers.generation.token_frames import note_sent, take_records
from sie.workers.model_api import Chosen, GenerateRunner, Matcher
from sie.workers.requests.worker_request import Link
from sie.workers.scheduling.ceilings import Ceiling, lower_ceiling
from sie.workers.scheduling.pace import Pace

_log = get_logger(__name__)
_to_msgpack = msgspec.msgpack.Encoder().encode
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


class Begin(NamedTuple):
    """Announces a step before it runs."""

    size: StepSize
    suspects: Collection[tuple[int, int]]
    """(frontend, request id) of each request to blame if the worker dies in this step."""


class Engine:
    """The jobs of one model. now_ns is CLOCK_MONOTONIC."""

    def __init__(self, runner: GenerateRunner, limits: EngineLimits) -> None:
        rule = runner.card.generate
        assert rule is not None
        self.runner = runner
        self.limits = limits
        pool_tokens = runner.num_blocks * runner.block_tokens
        self.max_tokens = min(limits.max_context_tokens or rule.context_length, rule.context_length, pool_tokens)
        """Most tokens of a prompt and its answer together."""
        self.planner = Planner(
            BlockPool(runner.num_blocks),
            Limits(
                block_tokens=runner.block_tokens,
                max_prefills=limits.max_prefills,
                is_sharing=limits.is_sharing,
                max_scored=max(1, limits.prompt_logits_bytes // (4 * runner.vocab_size)),
            ),
        )
        self.jobs: list[Job] = []
        """All jobs with an unanswered request, oldest first. A job is not planned before its grammar is compiled."""
        self.num_ended: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Ended choices by reason."""
        self.num_prompt_tokens = self.num_generated = 0
        self.num_non_finite = 0
        """Sequences that failed because a value was not finite."""
        self._chunks: dict[str, float] = {}
        self._chunk_pace = Pace(self._chunks, limits.token_gap_ns)
        self._prefill_ceiling: Ceiling | None = None
        self._sequence_ceiling: Ceiling | None = None
        self._unsent: dict[Link, dict[Job, None]] = {}
        """Jobs with something to send, by their link."""

    @property
    def can_run(self) -> bool:
        """Whether `step` has something to run."""
        return bool(self.planner.running or self.planner.waiting)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for blocks, or for their grammar."""
        compiling = sum(job.task.num_choices for job in self.jobs if not job.sequences and not job.first_token_ns)
        return compiling + sum(sequence.num_choices for sequence in self.planner.waiting)

    @property
    def is_unsent(self) -> bool:
        """Whether output waits for room or credit."""
        return bool(self._unsent)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Take a job; the planner sees it only after `start`."""
        self.jobs.append(job)

    def start(self, job: Job, matchers: list[Matcher]) -> None:
        """Queue a job's prompt for its first step. matchers is empty or has one for each choice."""
        job.matchers = matchers
        prompt = Tokens(job.request.inputs[0])
        sequence = Sequence(job, 0, prompt, self.runner.least_length(len(prompt)))
        job.sequences.append(sequence)
        self.planner.add(sequence)

    def fail(self, job: Job, error: SieError) -> None:
        """Answer a job with an error, and drop its unsent output."""
        self._forget(job, "failed")
        job.request.fail(error)

    def drop(self, link: Link) -> None:
        """Remove the jobs of a frontend that is gone."""
        self._unsent.pop(link, None)
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
        unsent = self._unsent.get(job.request.link)
        if unsent is not None:
            unsent.pop(job, None)

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
        self.send()

    def _stop(self, sequence: Sequence) -> None:
        """End a choice that its frontend has stopped, without a record to say so."""
        if not sequence.finish:
            self.planner.remove(sequence)
            self._count("stopped")
        sequence.job.sequences.remove(sequence)
        self._mark_unsent(sequence.job)

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(
        self, now_ns: Callable[[], int], begin: Callable[[Begin], None], on_oom: Callable[[bool], None]
    ) -> StepSize | None:
        """Run one step and return its size, or None if there is nothing to run. Call `tend` right before it.

        begin is called before each forward pass. on_oom is called after each one that ran out of memory, with True if a
        request failed because of it. Raises DeviceLostError when the device is lost.
        """
        now = now_ns()
        plan = self.planner.plan(
            _capped(self._max_prefill_tokens(now), self._prefill_ceiling, now),
            _capped(self.limits.max_sequences, self._sequence_ceiling, now),
        )
        if plan is None:
            return None
        for part in plan.parts:
            part.sequence.job.started_ns = part.sequence.job.started_ns or now
        size = StepSize.of(plan.parts)
        results = run_parts(self.runner, plan, begin=lambda parts: begin(Begin(StepSize.of(parts), _suspects(parts))))
        if results is None:
            on_oom(self._shrink(plan.parts, size.num_prefill, now_ns()))
        else:
            self.planner.copied(plan)
            started_ns, now = now, now_ns()
            if size.num_decode:
                self._chunk_pace.adapt("", size.num_prefill, now - started_ns)
            for part, result in zip(plan.parts, results, strict=True):
                if not part.sequence.job.request.ended:
                    self._apply(part, result, now)
        self.send()
        return size

    def _max_prefill_tokens(self, now_ns: int) -> int:
        """Return the most prompt tokens that the next step may have."""
        limits, running = self.limits, self.planner.running
        if not any(sequence.num_left == 1 for sequence in running):
            return limits.max_lone_prefill_tokens or limits.max_prefill_tokens
        reading = [sequence.job for sequence in running if sequence.num_left > 1 and not sequence.job.first_token_ns]
        is_late = any(now_ns - job.arrived_ns > limits.first_token_ns for job in reading)
        chunk = limits.max_prefill_tokens if is_late else int(self._chunks.get("", limits.max_prefill_tokens))
        return min(limits.max_prefill_tokens, max(chunk, _LEAST_CHUNK))

    def _apply(self, part: Part, result: tuple[Chosen, ...] | SieError, now_ns: int) -> None:
        sequence, job = part.sequence, part.sequence.job
        if isinstance(result, SieError):
            self.num_non_finite += isinstance(result, NonFinite)
            self.fail(job, result)
            return
        if job.scores is not None:
            job.scores.note_read(sequence.num_computed + part.count)
        self.planner.advance(part)
        if not sequence.num_generated:
            self.num_prompt_tokens += part.count
        if not part.is_last:
            return
        job.is_proven = not sequence.is_first
        job.last_token_ns = now_ns
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
        self._mark_unsent(job)

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
        if num_prefill > 1:
            self._prefill_ceiling = lower_ceiling(self._prefill_ceiling, num_prefill, now_ns)
        elif len(parts) > 1:
            self._sequence_ceiling = lower_ceiling(self._sequence_ceiling, len(parts), now_ns)
            for part in sorted(parts, key=lambda part: part.sequence.age)[self._sequence_ceiling.num_tokens :]:
                self.planner.preempt(part.sequence)
        else:
            text = f"Model '{self.runner.card.id}': no memory for a step of one token"
            self.fail(parts[0].sequence.job, ResourceExhausted(text, retry_after_s=self.limits.oom_retry_after_s))
            return True
        return False

    # --- output ---------------------------------------------------------------------------------------------------

    def _mark_unsent(self, job: Job) -> None:
        self._unsent.setdefault(job.request.link, {})[job] = None

    def send(self) -> None:
        """Send all waiting output, a frame for each frontend; without room or credit it keeps waiting."""
        for link in list(self._unsent):
            self._send(link)

    def _send(self, link: Link) -> None:
        jobs = self._unsent[link]
        if not self._try_frames(link, jobs):
            return
        for job in list(jobs):
            if job.sequences or self._try_end(job):
                del jobs[job]
        if not jobs:
            del self._unsent[link]

    def _try_frames(self, link: Link, jobs: Collection[Job]) -> bool:
        """Send all unsent tokens of these jobs to a frontend; return False if room or credit runs out."""
        while True:
            records, is_all = take_records(jobs)
            if records:
                header = _to_msgpack(TokenFrame(tuple([record for _, record in records])))
                nbytes = extent_bytes(len(header), 0)
                lease = link.lease(nbytes)
                if lease is None:
                    return False
                begin_extent(lease.view, header)
                if not link.try_tokens(lease, nbytes):
                    return False
                for sequence, record in records:
                    note_sent(sequence, record)
            if is_all:
                return True

    def _try_end(self, job: Job) -> bool:
        """Send the terminal reply of a job whose choices have all ended; return False without room."""
        totals = GenerateTotals(
            job.num_cached,
            job.num_generated,
            job.started_ns,
            job.first_token_ns - job.started_ns,
            job.last_token_ns - job.first_token_ns,
        )
        # ORDER: after the last record of each choice; the frontend forgets the request when it reads this.
        if not job.request.try_end(_to_msgpack(totals)):
            return False
        self.jobs.remove(job)
        return True


def _capped(limit: int, ceiling: Ceiling | None, now_ns: int) -> int:
    return limit if ceiling is None else min(limit, ceiling.max_tokens(now_ns))


def _suspects(parts: Collection[Part]) -> Collection[tuple[int, int]]:
    """Return the requests that have not yet survived a decode step: only these can have harmed a step."""
    jobs = {part.sequence.job.number: part.sequence.job for part in parts}
    return [job.request.inflight_entry for job in jobs.values() if not job.is_proven]
