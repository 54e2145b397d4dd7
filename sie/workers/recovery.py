"""Retries the items of a failed step: in smaller steps if memory ran out, else each request by itself.

A failed step has answered none of its items, so they can run again. A lost device ends the worker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from sie.metrics import definitions
from sie.runtime.logs import get_logger
from sie.values.card import ModelCard
from sie.values.errors import Internal, NonFinite, ResourceExhausted, SieError
from sie.workers.device.faults import forget_frames, is_out_of_memory, raise_if_lost
from sie.workers.device.memory import free_cached
from sie.workers.model_api import Runner
from sie.workers.operations import words_of
from sie.workers.scheduling.ceilings import Ceiling, lower_ceiling
from sie.workers.scheduling.scheduler import by_length
from sie.workers.scheduling.waiting import WaitingItem
from sie.workers.scheduling.waiting_queue import count_items, singles
from sie.workers.telemetry import WorkerMetrics

_log = get_logger(__name__)

Attempt = Callable[[Runner, ModelCard, list[WaitingItem]], None]
"""Runs items in one forward pass and answers them. If it raises, it has answered none of them."""


class Recovery:
    """Recovers one worker's failed steps."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        ceilings: dict[str, Ceiling],
        metrics: WorkerMetrics,
        retry_after_s: int,
        ask_for_memory: Callable[[str], None],
    ) -> None:
        """`ceilings` are the scheduler's, to be lowered; ask_for_memory(model) asks to evict another model."""
        self._attempt = attempt
        self._ceilings = ceilings
        self._metrics = metrics
        self._retry_after_s = retry_after_s
        self.ask_for_memory = ask_for_memory

    def recover(self, runner: Runner, card: ModelCard, items: list[WaitingItem], error: Exception) -> None:
        """Answer the items of a step that raised `error`. Raises DeviceLostError if the device is lost."""
        raise_if_lost(error)
        if is_out_of_memory(error):
            self._split(runner, card, items, error)
        else:
            self._isolate(runner, card, items, error)

    def _isolate(self, runner: Runner, card: ModelCard, items: list[WaitingItem], error: Exception) -> None:
        """Fail a lone request with the error, or try each of several requests by itself."""
        requests = {id(item.request): item.request for item in items}
        alive = [request for request in requests.values() if not request.ended]
        if len(alive) <= 1:
            if not isinstance(error, SieError):
                _log.error("a step of %s failed", card.id, exc_info=error)
                error = Internal(f"internal error during {words_of(items)}")
            if isinstance(error, NonFinite):
                self._metrics.count_non_finite(card.id, count_items(items))
            for request in alive:
                request.fail(error)
            return
        for request in alive:
            own = [item for item in items if item.request is request]
            try:
                self._attempt(runner, card, own)
            except Exception as own_error:
                self.recover(runner, card, own, own_error)

    def _split(self, runner: Runner, card: ModelCard, items: list[WaitingItem], error: Exception) -> None:
        """Run the items in steps of at most half the tokens and half the items of the smallest failed step.

        So at most log2(items) steps of several items fail, plus one for each item that does not fit even alone; its
        request ends with RESOURCE_EXHAUSTED. The shortest items run first, behind their leading items, so that the
        longest ones end up alone.
        """
        self._metrics.count_oom(definitions.OOM_ATTEMPTED, card.id)
        self.ask_for_memory(card.id)
        waiting = deque(sorted(singles(items), key=by_length))
        max_items, max_tokens = self._shrink(card, list(waiting), error)
        num_lost = 0
        while waiting:
            chunk = _take(waiting, max_items, max_tokens)
            if not chunk:
                continue
            try:
                self._attempt(runner, card, chunk)
            except Exception as own_error:
                if not is_out_of_memory(own_error):
                    self.recover(runner, card, chunk, own_error)
                    continue
                max_items, max_tokens = self._shrink(card, chunk, own_error)
                if len(chunk) > 1:
                    waiting.extendleft(reversed(chunk))
                else:
                    num_lost += 1
                    self._give_up(card, chunk[0])
        self._metrics.count_oom(definitions.OOM_FAILED if num_lost else definitions.OOM_SUCCEEDED, card.id)

    def _shrink(self, card: ModelCard, items: list[WaitingItem], error: Exception) -> tuple[int, int]:
        """Free the memory that a failed step still holds. Return the maximum items and tokens of the next steps."""
        forget_frames(error)
        free_cached()
        self._metrics.count_oom(definitions.OOM_CACHE_CLEARS, card.id)
        num_tokens = sum(item.num_tokens for item in items)
        _log.warning("%s: no memory for a step of %d items, %d tokens", card.id, len(items), num_tokens)
        if len(items) > 1:  # one item that is too large alone does not lower the ceiling of batches
            self._metrics.count_oom(definitions.OOM_SPLITS, card.id)
            self._ceilings[card.id] = lower_ceiling(self._ceilings.get(card.id), num_tokens, time.monotonic_ns())
        return max(1, len(items) // 2), max(1, num_tokens // 2)

    def _give_up(self, card: ModelCard, item: WaitingItem) -> None:
        text = f"Model '{card.id}': no memory for an item of {item.num_tokens} tokens, even alone"
        item.request.fail(ResourceExhausted(text, retry_after_s=self._retry_after_s))


def _take(waiting: deque[WaitingItem], max_items: int, max_tokens: int) -> list[WaitingItem]:
    """Take the next items for one step, at least one. Items of ended requests are dropped."""
    chunk: list[WaitingItem] = []
    num_tokens = 0
    while waiting and len(chunk) < max_items:
        num_tokens += waiting[0].num_tokens
        if chunk and num_tokens > max_tokens:
            break
        item = waiting.popleft()
        if item.request.ended:
            num_tokens -= item.num_tokens
        else:
            chunk.append(item)
    return chunk
