"""Holds the engines of one worker: routes each request to its engine, and answers the step loop for all of them.

A model with something to run is active in the scheduler's state. There it competes for its next step by the device time
that it has used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from sie.config.generation_settings import GPU_PREFILL_TOKENS
from sie.config.settings import Settings
from sie.metrics import definitions
from sie.native import team
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong, SieError
from sie.values.generate import MAX_CHOICES, MAX_PROMPT_LOGPROBS, GenerateTask
from sie.workers.generation.grammars import Compiled, Compiler
from sie.workers.generation.model_engine import Ended, Engine, EngineLimits
from sie.workers.generation.sequences import Job
from sie.workers.generation.step import Begin, StepSize
from sie.workers.generation.step_metrics import GenerationMetrics
from sie.workers.model_api import GenerateRunner, Runner
from sie.workers.requests.worker_request import Link, Request
from sie.workers.scheduling.pace import Pace
from sie.workers.scheduling.scheduler import State, own_name
from sie.workers.telemetry import WorkerMetrics

_CPU_PREFILL_TOKENS = 256
"""A chunk of this size delays running streams on a CPU by about a few steps."""
_CPU_LONE_PREFILL_TOKENS = 512
"""Without a stream to delay: one read and unpacking of the weights serves twice as many tokens."""
_decoder = msgspec.msgpack.Decoder(GenerateTask)

Announce = Callable[[int, Collection[tuple[int, int]]], object]
"""Takes the time limit of a forward pass in nanoseconds, and the (frontend, request id) of each suspect."""


class UnderWay(NamedTuple):
    """The time limit of the steps under way in nanoseconds, and the (frontend, request id) of each suspect."""

    allowed_ns: int
    suspects: Collection[tuple[int, int]]


class Generators:
    """The generating models of one worker."""

    def __init__(
        self,
        settings: Settings,
        *,
        device: str,
        state: State,
        metrics: WorkerMetrics,
        max_suspects: int,
        announce: Announce,
        ask_for_memory: Callable[[str], None],
    ) -> None:
        """Call announce before each forward pass, with at most max_suspects requests."""
        generation = settings.generation
        self._limits = EngineLimits(
            max_sequences=generation.max_sequences,
            max_prefill_tokens=generation.max_prefill_tokens
            or (_CPU_PREFILL_TOKENS if device == "cpu" else GPU_PREFILL_TOKENS),
            max_lone_prefill_tokens=_CPU_LONE_PREFILL_TOKENS
            if device == "cpu" and not generation.max_prefill_tokens
            else 0,
            token_gap_ns=int(generation.token_gap_ms * 1e6),
            first_token_ns=int(generation.first_token_ms * 1e6),
            max_context_tokens=generation.max_context_tokens,
            # The suspects of a step are in their prompt or in the first step after it. On a GPU two steps are under way.
            max_prefills=max(1, max_suspects // (2 if device == "cpu" else 3)),
            is_sharing=generation.prefix_cache,
            prompt_logits_bytes=generation.prompt_logits_bytes,
            oom_retry_after_s=settings.limits.oom_retry_after_s,
        )
        self._max_suspects = max_suspects
        self._state = state
        self._worker_metrics = metrics
        self._announce = announce
        self._ask_for_memory = ask_for_memory
        self._compiler = Compiler(generation.grammar_timeout_s)
        self.event_fd = self._compiler.event_fd
        """Readable: call `collect`."""
        self._pace = Pace({})
        self._num_jobs = 0
        self._short: set[str] = set()
        """Models whose last step ran out of memory."""
        self._metrics: dict[str, GenerationMetrics] = {}
        self.engines: dict[str, Engine] = {}
        """By model. Empty if no generating model is loaded, so that other work in the loop has no extra cost."""

    @property
    def is_unsent(self) -> bool:
        """Whether output waits for room or credit."""
        return any(engine.is_unsent for engine in self.engines.values())

    def is_busy(self, model: str) -> bool:
        """Whether a model has unanswered requests, or a step under way."""
        engine = self.engines.get(model)
        return engine is not None and bool(engine.jobs or engine.has_begun)

    @property
    def under_way(self) -> UnderWay | None:
        """The step that was launched and is not read, or None; only one model has one."""
        for model, engine in self.engines.items():
            if (step := engine.under_way) is not None:
                return self._allowance(model, step)
        return None

    def add(self, runner: Runner) -> Engine | None:
        """Return a new engine for a loaded model, and publish its metrics from now on; None if it does not generate."""
        if not isinstance(runner, GenerateRunner):
            return None
        model = runner.card.id
        engine = self.engines[model] = Engine(runner, self._limits)
        self._metrics[model] = GenerationMetrics(self._worker_metrics.page, engine)
        return engine

    def accept(self, request: Request, runner: Runner, now_ns: int) -> None:
        """Take a request to generate; answer it with an error if it is invalid."""
        engine = self.engines.get(runner.card.id) or self.add(runner)
        if engine is None:
            request.fail(BadRequest(f"Model '{runner.card.id}' does not generate text"))
            return
        try:
            job = self._job(request, engine, now_ns)
        except SieError as error:
            request.fail(error)
            return
        engine.add(job)
        if job.task.grammar:
            self._compiler.add(job, engine.runner, self._start)
        else:
            self._start(job, [])

    def _job(self, request: Request, engine: Engine, now_ns: int) -> Job:
        """Return the job that a request asks for. Raises BadRequest."""
        card = engine.runner.card
        assert card.generate is not None
        self._num_jobs += 1
        task, prompt = read_task(request, card), request.inputs[0]
        start_id = card.generate.decoder_start_id
        limit = engine.max_tokens - (start_id is not None)
        if len(prompt) + min(1, task.max_tokens) > limit:
            raise InputTooLong(
                f"Model '{card.id}': a prompt of {len(prompt)} tokens leaves no room for an answer within "
                f"{limit} tokens",
                code="CONTEXT_LENGTH_EXCEEDED",
            )
        return Job(
            request, task, len(prompt), number=self._num_jobs, eos_token_ids=card.generate.eos_token_ids,
            bans=card.generate.bans, decoder_start_id=start_id, is_alone=request.is_alone, arrived_ns=now_ns,
        )  # fmt: skip

    def _start(self, job: Job, compiled: Compiled) -> None:
        if job.request.ended:  # cancelled while its grammar was compiled
            return
        engine = self.engines[job.request.header.model]
        if isinstance(compiled, SieError):
            engine.fail(job, compiled)
        else:
            engine.start(job, compiled)
        self._update_active(engine)

    def collect(self) -> None:
        """Start the sequences whose grammars have been compiled."""
        self._compiler.collect(time.monotonic_ns())

    def tend(self, now_ns: int) -> None:
        """Apply the frontends' cancellations and stops, and send waiting output; about a microsecond a request."""
        if self._compiler:
            self._compiler.tend(now_ns)
        for engine in self.engines.values():
            if engine.jobs:
                engine.tend(now_ns)
                self._update_active(engine)

    def step(self, model: str) -> None:
        """Run one step of a model, if it still has something to run, or begin it ahead (`Engine.step`).

        The step of another model that was begun is read first. Raises DeviceLostError.
        """
        self.settle(but=model)
        ooms: list[bool] = []
        ended = self._turn(
            model, lambda engine: engine.step(time.monotonic_ns, lambda step: self._begin(model, step), ooms.append)
        )
        if ended is not None:
            self._count_oom(model, ooms)

    def settle(self, *, but: str = "") -> None:
        """Read the step that was begun, unless it is this model's. Raises DeviceLostError."""
        for model, engine in self.engines.items():
            if engine.has_begun and model != but:
                self._turn(model, lambda own: own.settle(time.monotonic_ns))

    def _turn(self, model: str, run: Callable[[Engine], Ended | None]) -> Ended | None:
        """Let an engine work, and measure it; return the step that has ended."""
        engine = self.engines[model]
        started_ns, before_ns = time.monotonic_ns(), team.saved_ns()
        ended = run(engine)
        self._update_active(engine)
        now_ns = time.monotonic_ns()
        self._state.charge(own_name(model), now_ns - started_ns)
        if ended is not None:
            size, took_ns = ended.size, now_ns - ended.began_ns
            self._learn(model, size, took_ns + team.saved_ns() - before_ns)  # the next step may have no lent cores
            self._metrics[model].observe_step(took_ns / 1e9)
            self._worker_metrics.observe_step(took_ns / 1e9, size.num_tokens)
            self._worker_metrics.observe_batch(model, size.num_sequences, size.num_tokens, took_ns / 1e9)
        if engine.num_non_finite:
            self._worker_metrics.count_non_finite(model, engine.num_non_finite)
            engine.num_non_finite = 0
        return ended

    def drop(self, link: Link) -> None:
        """Remove the requests of a frontend that is gone."""
        for engine in self.engines.values():
            engine.drop(link)
            self._update_active(engine)

    def forget(self, model: str) -> None:
        """Remove an unloaded model, which must not be busy."""
        self.engines.pop(model, None)
        self._metrics.pop(model, None)

    def _update_active(self, engine: Engine) -> None:
        """Activate a model in the scheduler exactly while it has a step to run."""
        model = engine.runner.card.id
        if engine.can_run:
            self._state.activate(model)
        else:
            self._state.deactivate(model)
        self._metrics[model].publish()

    def _begin(self, model: str, step: Begin) -> None:
        self._announce(*self._allowance(model, step))

    def _allowance(self, model: str, step: Begin) -> UnderWay:
        """Return a step's time: it reads the weights once for any number of choices, plus a time for each prompt token."""
        decode_ns = self._pace.allowed_ns(_decode(model), step.num_steps)
        allowed_ns = decode_ns + self._pace.allowed_ns(model, step.size.num_prefill)
        return UnderWay(allowed_ns, list(step.suspects)[: self._max_suspects])

    def _learn(self, model: str, size: StepSize, took_ns: int) -> None:
        if size.num_prefill:
            self._pace.record(model, size.num_prefill, took_ns)
        else:
            self._pace.record(_decode(model), 1, took_ns)

    def _count_oom(self, model: str, ooms: list[bool]) -> None:
        """Count each pass that ran out of memory (ooms: whether a request failed), or the first success after it."""
        count = self._worker_metrics.count_oom
        for is_lost in ooms:
            for family in (definitions.OOM_ATTEMPTED, definitions.OOM_CACHE_CLEARS):
                count(family, model)
            count(definitions.OOM_FAILED if is_lost else definitions.OOM_SPLITS, model)
            self._ask_for_memory(model)
        if any(not is_lost for is_lost in ooms):
            self._short.add(model)
        elif model in self._short:
            self._short.discard(model)
            count(definitions.OOM_SUCCEEDED, model)


def read_task(request: Request, card: ModelCard) -> GenerateTask:
    """Return the task of a request. Raises BadRequest if the model cannot serve it, even if a frontend accepted it."""
    prompt = request.inputs[0]
    if request.header.num_items != 1 or prompt.dtype != "<i4" or not len(prompt):
        raise BadRequest("prompt must be one sequence of at least one token")
    try:
        task = _decoder.decode(request.header.task)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest("the request is not a generation request") from error
    if task.max_tokens < 0:
        raise BadRequest(f"max_tokens is {task.max_tokens}, but must be at least 0")
    if task.prompt_logprobs is not None and card.is_encoder_decoder:
        raise BadRequest("prompt_logprobs is not served by a model whose encoder reads the prompt")
    if task.prompt_logprobs is not None and not 0 <= task.prompt_logprobs <= MAX_PROMPT_LOGPROBS:
        raise BadRequest(f"prompt_logprobs is {task.prompt_logprobs}, but must be 0 to {MAX_PROMPT_LOGPROBS}")
    if not 1 <= task.num_choices <= MAX_CHOICES:
        raise BadRequest(f"n is {task.num_choices}, but must be 1 to {MAX_CHOICES}")
    # An id outside the vocabulary triggers a GPU assertion, and the process then loses its device.
    vocab_size = card.vocab_size or 1 << 31
    biased = [token_id for token_id, _ in task.sampling.logit_bias]
    for name, least, most in (
        ("prompt", int(prompt.min()), int(prompt.max())),
        ("logit_bias", min(biased, default=0), max(biased, default=0)),
    ):
        if least < 0 or most >= vocab_size:
            wrong = least if least < 0 else most
            raise BadRequest(f"{name}: token {wrong} is not in the vocabulary of {vocab_size} tokens")
    return task


def _decode(model: str) -> str:
    return f"{model} decode"
