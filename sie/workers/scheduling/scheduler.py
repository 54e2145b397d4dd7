"""Plans the next step. Pure: no clock, no torch, no I/O; the same state gives the same step.

There are no timers. Whenever the device is free, the loop asks for a step from the items that wait then. So a lone item
starts at once, and batches form by themselves while the device is busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.workers.scheduling.ceilings import Ceiling
from sie.workers.scheduling.queue_policy import order_by_policy
from sie.workers.scheduling.waiting import Budget, Refused, Step, WaitingItem
from sie.workers.scheduling.waiting_queue import WaitingQueue, count_items, taken_parts

OVERTAKING: Final = 3
"""Work that may overtake an item, in multiples of its own.

0 would be the order of arrival, in which a query waits for every document before it. The more, the longer a long text
waits where there is always a short one (docs/decisions/053).
"""


class State:
    """All waiting items, by model in order of arrival, and the service that each model received.

    served_ns is the time of a model's steps, not their tokens: a token of one model may take a hundred times as long as
    another's. A model that starts to wait again begins at least where the last served model stood before its step. So
    an idle model saves up no time, and a busy one whose queue is empty during its step loses none. Source: start-time
    fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996.
    """

    def __init__(self) -> None:
        self.queues: dict[str, WaitingQueue] = {}
        self.active: dict[str, str] = {}
        """Models with a step to run that they plan themselves, by the name under which its time is counted."""
        self.served_ns: dict[str, int] = {}
        self.ceilings: dict[str, Ceiling] = {}
        """The most tokens in a step of each model that ran out of memory."""
        self.max_tokens: dict[str, float] = {}
        """The most tokens in a step of each model whose steps took too long (`sie.workers.scheduling.pace`)."""
        self._arrived: dict[str, int] = {}
        """Tokens of each model that ever arrived."""
        self._start_ns = 0

    def __bool__(self) -> bool:
        return bool(self.queues or self.active)

    def activate(self, model: str) -> None:
        """Let a model compete for a step that it plans itself, in addition to its queued items."""
        name = own_name(model)
        if name not in self.active:
            self._begin_service(name)
            self.active[name] = model

    def deactivate(self, model: str) -> None:
        """Undo `activate`."""
        self.active.pop(own_name(model), None)

    def add(self, model: str, item: WaitingItem) -> None:
        """Append an item to its model's queue."""
        queue = self.queues.get(model)
        if queue is None:
            self._add_queue(model)
            queue = self.queues[model]
        item.work_before = self._arrived.get(model, 0)
        self._arrived[model] = item.work_before + item.num_tokens
        queue.append(item)

    def _add_queue(self, model: str) -> None:
        self._begin_service(model)
        self.queues[model] = WaitingQueue()

    def _begin_service(self, name: str) -> None:
        self.served_ns[name] = max(self.served_ns.get(name, 0), self._start_ns)

    def remove(self, step: Step) -> None:
        """Remove a step's items from the queue."""
        queue = self.queues[step.model]
        leaving = step.items
        if step.expired or step.refused:
            leaving = [*leaving, *step.expired, *[refused.item for refused in step.refused]]
        if count_items(leaving) == len(queue):
            del self.queues[step.model]
        else:
            queue.remove(leaving)

    def charge(self, model: str, took_ns: int) -> None:
        """Add the time of a model's step. Items of the step that did not run cost nothing."""
        self._start_ns = self.served_ns[model]
        self.served_ns[model] += took_ns

    def requeue(self, model: str, items: list[WaitingItem]) -> None:
        """Put items back at the front of the queue, in order, because there was no capacity for their reply."""
        if model not in self.queues:
            self._add_queue(model)
        self.queues[model].put_back(items)

    def drop_where(self, is_gone: Callable[[Any], bool]) -> list[WaitingItem]:
        """Remove and return the items whose request is gone, because its frontend died."""
        gone: list[WaitingItem] = []
        for model, queue in list(self.queues.items()):
            gone.extend(item for item in queue if is_gone(item.request))
            kept = [item for item in queue if not is_gone(item.request)]
            if kept:
                self.queues[model] = WaitingQueue(kept)
            else:
                del self.queues[model]
        return gone


def own_name(model: str) -> str:
    """Return the name that counts the time of steps a model plans itself. Model ids have no spaces, so it is unique."""
    return f"{model} own"


def plan_step(state: State, budget: Budget, now_ns: int) -> Step | None:
    """Choose the next step, or None if nothing waits. Changes nothing: `State.remove` applies the step.

    The least served model goes next. Of its oldest items, those past their deadline are returned as expired. The rest
    run together if they fit. Otherwise items older than max_age_ns go first in order of arrival, then all others by
    `_order_by_turn`: a short text's wait is short, and a long text's wait grows with its length only.
    """
    if state.active:
        model = min((*state.queues, *state.active), key=state.served_ns.__getitem__)
        if model in state.active:
            return Step(state.active[model], [], 0, [], is_own=True)
    elif not state.queues:
        return None
    else:
        model = min(state.queues, key=state.served_ns.__getitem__)
    if state.ceilings and model in state.ceilings:
        max_tokens = min(budget.max_tokens, state.ceilings[model].max_tokens(now_ns))
        budget = msgspec.structs.replace(budget, max_tokens=max_tokens)
    if model in state.max_tokens and state.max_tokens[model] < budget.max_tokens:
        budget = msgspec.structs.replace(budget, max_tokens=int(state.max_tokens[model]))
    queue = state.queues[model]
    refused: list[Refused] = []
    if queue.head.policy is None:
        window = queue.oldest(budget.window_items)
    else:
        ordered, refused = order_by_policy(queue, now_ns)
        window = ordered[: budget.window_items]
    expired = [item for item in window if item.deadline_ns <= now_ns]
    live = [item for item in window if item.deadline_ns > now_ns] if expired else window
    if live and live[0].batch_key is not None and not live[0].alone:
        chosen = _choose_by_key(live, budget.max_items, _max_tokens_by_key(state, budget, model))
    else:
        chosen = _choose(live, budget, now_ns) if live else []
    return Step(model, chosen, sum([item.num_tokens for item in chosen]), expired, refused)


def _choose(live: list[WaitingItem], budget: Budget, now_ns: int) -> list[WaitingItem]:
    head = live[0]
    if head.alone:
        return _fill([item for item in live if item.request is head.request], budget)
    running = [item for item in live if item.is_running and not item.alone]
    if running:
        waiting = [item for item in live if not item.is_running]
        if waiting and waiting[0].alone:
            return running  # its turn comes when they are complete; new ones would put that off for ever
        room = budget.max_items - count_items(running)
        if room <= 0:
            return running
        budget = msgspec.structs.replace(budget, max_items=room)
        return running + _choose_new([item for item in waiting if not item.alone], budget, now_ns)
    return _choose_new([item for item in live if not item.alone], budget, now_ns)


def _choose_new(together: list[WaitingItem], budget: Budget, now_ns: int) -> list[WaitingItem]:
    """Choose among items that may share a step, of which none has begun."""
    num_tokens = sum([item.num_tokens for item in together])
    if num_tokens <= budget.max_tokens and count_items(together) <= budget.max_items:
        return together
    return _fill(together, budget, now_ns - budget.max_age_ns)


def _max_tokens_by_key(state: State, budget: Budget, model: str) -> float:
    """Return the token limit of a step with one batch key; the token budget of texts does not apply."""
    limit = float(budget.max_tokens) if model in state.ceilings else math.inf
    return min(limit, state.max_tokens.get(model, math.inf))


def _choose_by_key(live: list[WaitingItem], max_items: int, max_tokens: float) -> list[WaitingItem]:
    """Take the oldest item, then in order those with the same batch key while their rows and tokens fit."""
    head = live[0]
    chosen, num_rows, num_tokens = [head], head.num_rows, head.num_tokens
    for item in live[1:]:
        if num_rows >= head.max_rows or len(chosen) == max_items:
            break
        fits = num_rows + item.num_rows <= head.max_rows and num_tokens + item.num_tokens <= max_tokens
        if fits and not item.alone and item.batch_key == head.batch_key:
            chosen.append(item)
            num_rows += item.num_rows
            num_tokens += item.num_tokens
    return chosen


def by_length(item: WaitingItem) -> int:
    """Return the sort key that puts leading items first, then the shortest."""
    return 0 if item.leads else item.num_tokens


def _fill(waiting: list[WaitingItem], budget: Budget, overdue_ns: int | None = None) -> list[WaitingItem]:
    """Take items in order until the next one does not fit; the first one always fits.

    The order is that of arrival; or with overdue_ns `_order_by_turn`. The items of a request that are taken together
    stay together.
    """
    counts = np.array([item.num_items for item in waiting])
    costs = np.fromiter(chain.from_iterable([item.costs or (item.num_tokens,) for item in waiting]), np.int64)
    owners, starts = np.repeat(np.arange(len(waiting)), counts), counts.cumsum() - counts
    order = np.arange(len(costs))
    if overdue_ns is not None:
        order = _order_by_turn(waiting, costs, owners, starts, overdue_ns)
    num_fit = int(np.count_nonzero(costs[order].cumsum() <= budget.max_tokens))
    taken = order[: max(1, min(num_fit, budget.max_items))]
    is_taken = np.zeros(len(costs), np.bool_)
    is_taken[taken] = True
    owners_taken: list[int] = owners[taken].tolist()
    num_taken: list[int] = np.bincount(owners_taken).tolist()
    chosen: list[WaitingItem] = []
    for owner in dict.fromkeys(owners_taken):
        item = waiting[owner]
        if num_taken[owner] == item.num_items:
            chosen.append(item)
        else:
            chosen.extend(taken_parts(item, is_taken[starts[owner] : starts[owner] + item.num_items]))
    return chosen


def _order_by_turn(
    waiting: list[WaitingItem],
    costs: NDArray[np.int64],
    owners: NDArray[np.intp],
    starts: NDArray[np.intp],
    overdue_ns: int,
) -> NDArray[np.intp]:
    """Return the order in which shorter items overtake longer ones, by a bounded amount of work.

    costs has the tokens of each item, owners its place in waiting, starts the first item of each place.

    Of the items that arrive after an item of n tokens, those that go before it have at most `OVERTAKING` x n tokens
    together. It needs neither a clock nor the pace. Items of one request keep the leading one first. Those that arrived
    before overdue_ns go first, in order of arrival.
    """
    before = costs.cumsum() - costs
    work_before = before + (np.array([item.work_before for item in waiting]) - before[starts])[owners]
    weights = np.array([0 if item.leads else 1 + OVERTAKING for item in waiting])[owners]
    is_recent = np.array([item.arrival_ns >= overdue_ns for item in waiting])[owners]
    return np.lexsort((np.where(is_recent, work_before + weights * costs, 0), is_recent))
