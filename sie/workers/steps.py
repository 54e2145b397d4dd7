"""Runs the forward passes of one worker, answers them, and publishes what runs.

A runner on a GPU can begin a step and give its outputs later (`sie.workers.model_api.AheadRunner`). Then the host reads and
answers a step, and plans the next one, while the device computes: at most two steps are under way, and they end in
order. The loop decides when to begin ahead; everything else here is the same with one step under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from sie.config.settings import Settings
from sie.native import team
from sie.runtime import failpoints
from sie.shm.inflight import InflightPage
from sie.values.card import ModelCard
from sie.values.errors import NonFinite, SieError
from sie.workers.model_api import Runner, StepOutputs
from sie.workers.operations import begin_again, forward, launch, take_unfinished
from sie.workers.recovery import Recovery
from sie.workers.requests.reply_writer import ReplyWriter
from sie.workers.scheduling.pace import Pace
from sie.workers.scheduling.scheduler import State
from sie.workers.scheduling.waiting import WaitingItem
from sie.workers.scheduling.waiting_queue import count_items
from sie.workers.telemetry import WorkerMetrics
from sie.workers.tensor_statistics import TensorStatistics, compute_times

_IDLE_ALLOWED_NS = 350_000_000
"""Allowed time of an iteration without a step: over the idle wait, but hangs show within watchdog_s + 0.5 s."""


class _Begun(NamedTuple):
    """A step under way."""

    runner: Runner
    card: ModelCard
    items: list[WaitingItem]
    num_tokens: int
    running: Collection[tuple[int, int]]
    """The entry of each of its requests on the in-flight page."""
    began_ns: int
    outputs: Callable[[], StepOutputs]
    """Waits for the device."""


class Steps:
    """The forward passes of one worker."""

    def __init__(
        self,
        settings: Settings,
        *,
        page: InflightPage,
        state: State,
        replies: ReplyWriter,
        metrics: WorkerMetrics,
        tensors: TensorStatistics,
        is_cpu: bool,
        flush: Callable[[], None],
        ask_for_memory: Callable[[str], None],
    ) -> None:
        """Take the parts of the loop; flush sends the queued replies, ask_for_memory(model) asks to evict another model."""
        self._page = page
        self._state = state
        self._replies = replies
        self._metrics = metrics
        self._tensors = tensors
        self._flush = flush
        self._recovery = Recovery(
            self._attempt,
            ceilings=state.ceilings,
            metrics=metrics,
            retry_after_s=settings.limits.oom_retry_after_s,
            ask_for_memory=ask_for_memory,
        )
        self._pace = Pace(state.max_tokens, int(settings.scheduler.max_step_ms * 1e6))
        # On a busy machine every CPU step takes longer, whatever its size, so its processor time counts there.
        self._busy_ns = time.thread_time_ns if is_cpu else time.monotonic_ns
        self._begun: _Begun | None = None
        self._num_steps = self._ended_ns = 0

    # --- the steps ------------------------------------------------------------------------------------------------

    @property
    def begun_model(self) -> str | None:
        """The model of the step that was begun and is not answered, or None."""
        return None if self._begun is None else self._begun.card.id

    def run(self, runner: Runner, card: ModelCard, items: list[WaitingItem]) -> None:
        """Run one step and answer it; or only begin it, if its runner can, and answer the one begun before.

        Raises DeviceLostError.
        """
        if items[0].alone or not getattr(runner, "works_ahead", False):
            self.settle()
            self._run_whole(runner, card, items)
            return
        num_tokens = _count_tokens(items)
        running = _entries(items)
        began_ns = self._announce(self._pace.allowed_ns(card.id, num_tokens), running, num_tokens)
        try:
            outputs = launch(runner, items)
        except Exception as error:
            self.settle()
            self._recover_launch(runner, card, items, error)
            return
        if outputs is None:
            self.settle()
            self._run_whole(runner, card, items)
            return
        before, self._begun = self._begun, _Begun(runner, card, items, num_tokens, running, began_ns, outputs)
        if before is not None:
            self._finish(before)

    def _recover_launch(self, runner: Runner, card: ModelCard, items: list[WaitingItem], error: Exception) -> None:
        """Recover a step that could not begin; its model pays for the time."""
        began_ns = time.monotonic_ns()
        self._recovery.recover(runner, card, items, error)
        ended_ns = time.monotonic_ns()
        self.publish(ended_ns)
        num_tokens, took_ns = _count_tokens(items), ended_ns - began_ns
        self._measure(card, items, num_tokens, took_ns)
        self._learn(card, num_tokens, took_ns, took_ns, is_usual=False)

    def settle(self) -> None:
        """Answer the step that was begun, if there is one: nothing is under way afterwards. Raises DeviceLostError."""
        before, self._begun = self._begun, None
        if before is not None:
            self._finish(before)

    def _finish(self, begun: _Begun) -> None:
        """Wait for a step and answer it. Its requests stay on the page until it is answered."""
        runner, card, items, num_tokens, _, began_ns, outputs = begun
        is_usual = True
        try:
            found = outputs()
            # The device computed the step before until then.
            began_ns = max(began_ns, self._ended_ns)
            self._ended_ns = time.monotonic_ns()
            self._answer(card, items, found, began_ns)
        except Exception as error:
            is_usual = False
            self._recovery.recover(runner, card, items, error)
        ended_ns = time.monotonic_ns()
        self.publish(ended_ns)
        self._measure(card, items, num_tokens, ended_ns - began_ns)
        self._learn(card, num_tokens, ended_ns - began_ns, ended_ns - began_ns, is_usual=is_usual)

    def _run_whole(self, runner: Runner, card: ModelCard, items: list[WaitingItem]) -> None:
        num_tokens = _count_tokens(items)
        started_ns, started_busy_ns, before_ns = time.monotonic_ns(), self._busy_ns(), team.saved_ns()
        is_usual = True
        try:
            self._forward(runner, card, items, num_tokens)
        except Exception as error:
            is_usual = False
            begin_again(items)
            self._recovery.recover(runner, card, items, error)
        # Skipped if an error ends the worker: its page must still name the running step.
        ended_ns = time.monotonic_ns()
        self.publish(ended_ns)
        self._measure(card, items, num_tokens, ended_ns - started_ns)
        if card.tensor is not None:
            for item in items:
                if item.request.has_failed:
                    self._tensors.observe_failure(card.id, item, ended_ns)
        saved_ns = team.saved_ns() - before_ns  # the next step may have no lent cores
        busy_ns = self._busy_ns() - started_busy_ns + saved_ns
        self._learn(card, num_tokens, ended_ns - started_ns + saved_ns, busy_ns, is_usual=is_usual)

    def _attempt(self, runner: Runner, card: ModelCard, items: list[WaitingItem]) -> None:
        """Run items of a failed step once more. Raises the runner's errors."""
        self._forward(runner, card, items, _count_tokens(items))

    def _forward(self, runner: Runner, card: ModelCard, items: list[WaitingItem], num_tokens: int) -> None:
        """Run one forward pass and answer it. Raises the runner's errors."""
        started_ns = self._announce(self._pace.allowed_ns(card.id, num_tokens), _entries(items), num_tokens)
        self._answer(card, items, forward(runner, items), started_ns)

    def _answer(self, card: ModelCard, items: list[WaitingItem], outputs: StepOutputs, began_ns: int) -> None:
        """Answer a forward pass. Raises the errors of outputs that cannot be answered."""
        ran_ns = time.monotonic_ns() - began_ns
        self._replies.put(card, items, outputs, ran_ns)
        if outputs.generated is not None:
            self._fail(card, items, outputs.generated)
            if unfinished := take_unfinished(items, outputs.generated):
                self._state.requeue(card.id, unfinished)
        self._flush()
        if outputs.tensors is not None:
            times = compute_times(outputs.tensors, ran_ns, time.monotonic_ns() - began_ns)
            self._tensors.observe_step(card.id, items, times, began_ns)

    def _fail(self, card: ModelCard, items: list[WaitingItem], found: Sequence[object]) -> None:
        """Fail the requests of the items that got an error instead of an answer."""
        for item, error in zip(items, found, strict=True):
            if isinstance(error, SieError) and not item.request.ended:
                item.request.fail(error)
                if isinstance(error, NonFinite):
                    self._metrics.count_non_finite(card.id, 1)

    def _learn(self, card: ModelCard, num_tokens: int, took_ns: int, busy_ns: int, *, is_usual: bool) -> None:
        """Learn a model's pace from a step. A failed one's time would make the next allowance far too long."""
        if is_usual:
            self._pace.record(card.id, num_tokens, took_ns)
        self._pace.adapt(card.id, num_tokens, busy_ns)

    def _measure(self, card: ModelCard, items: list[WaitingItem], num_tokens: int, took_ns: int) -> None:
        self._state.charge(card.id, took_ns)
        num_rows = count_items(items) if card.tensor is None else sum(item.num_rows for item in items)
        self._metrics.observe_step(took_ns / 1e9, num_tokens)
        self._metrics.observe_batch(card.id, num_rows, num_tokens, took_ns / 1e9)

    # --- the in-flight page ---------------------------------------------------------------------------------------

    def publish(self, now_ns: int, own: tuple[int, Collection[tuple[int, int]]] | None = None) -> None:
        """Publish that the loop runs, and the step under way. A worker that hangs between steps must be detected, too.

        own is a step under way that its model planned itself: its time allowance and its requests.
        """
        begun = self._begun
        if own is not None:
            allowed_ns, running = own
            self._page.write(self._num_steps, now_ns, _IDLE_ALLOWED_NS + allowed_ns, "step", running)
            return
        if begun is None:
            self._page.write(self._num_steps, now_ns, _IDLE_ALLOWED_NS, "idle")
            return
        allowed_ns = _IDLE_ALLOWED_NS + self._pace.allowed_ns(begun.card.id, begun.num_tokens)
        self._page.write(self._num_steps, now_ns, allowed_ns, "step", begun.running, num_tokens=begun.num_tokens)

    def announce(self, allowed_ns: int, running: Collection[tuple[int, int]]) -> None:
        """Publish a step that its model planned itself, with the one that it began before; no other is under way."""
        self._announce(allowed_ns, running, 0)

    def _announce(self, allowed_ns: int, running: Collection[tuple[int, int]], num_tokens: int) -> int:
        """Publish the next step, its time allowance and its requests (the suspects of a death). Return the time.

        A step that was begun before counts, too: the device computes it first, and either may end the worker.
        """
        begun = self._begun
        if begun is not None:
            allowed_ns += self._pace.allowed_ns(begun.card.id, begun.num_tokens)
            running = {*running, *begun.running}
            num_tokens += begun.num_tokens
        self._num_steps += 1
        started_ns = time.monotonic_ns()
        self._page.write(self._num_steps, started_ns, allowed_ns, "step", running, num_tokens=num_tokens)
        failpoints.reach("worker.before_step")
        return started_ns


def _count_tokens(items: list[WaitingItem]) -> int:
    return sum([item.num_tokens for item in items])


def _entries(items: list[WaitingItem]) -> Collection[tuple[int, int]]:
    """Return the entry of each request, in order."""
    return {id(item.request): item.request.inflight_entry for item in items}.values()
