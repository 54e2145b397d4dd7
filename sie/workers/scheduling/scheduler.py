"""Decides what the next step runs. Pure: no clock, no torch, no I/O; the same state gives the same step.

There are no timers. Whenever the device is free, the loop asks for a step from what waits at that moment, so a lone
item starts at once and batches form by themselves while the device is busy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from sie.workers.scheduling.ceilings import Ceiling
from sie.workers.scheduling.queue_policy import in_turn
from sie.workers.scheduling.waiting import Budget, Refused, Step, Waiting


class State:
    """All waiting items, by model in order of arrival, and how much each model was served.

    served_ns is the time of its steps: a token of one model takes a hundred times as long as one of another, and models
    that got the same number of tokens would leave nearly all of the time to the slowest. A model that starts to wait again
    begins at least where the last served one stood before its step, so a quiet model does not save up a claim and a busy
    one, whose queue is often empty while its step runs, loses none. Source: start-time fair queueing, Goyal, Vin and
    Cheng, SIGCOMM 1996.
    """

    def __init__(self) -> None:
        self.queues: dict[str, deque[Waiting]] = {}
        self.standing: dict[str, str] = {}
        """Models with a step to run that they decide themselves, by the name under which that time is counted."""
        self.served_ns: dict[str, int] = {}
        self.ceilings: dict[str, Ceiling] = {}
        """Models whose steps found no memory, with the most tokens that a step of theirs may have."""
        self.max_tokens: dict[str, float] = {}
        """Models whose steps took too long, with the most tokens that a step of theirs may have (`sie.workers.scheduling.pace`)."""
        self._start_ns = 0

    def __bool__(self) -> bool:
        return bool(self.queues or self.standing)

    def stand(self, model: str) -> None:
        """Let a model compete for a step that it decides itself, beside its items, if it has any."""
        name = own_name(model)
        if name not in self.standing:
            self._begin_service(name)
            self.standing[name] = model

    def sit(self, model: str) -> None:
        """End what `stand` began."""
        self.standing.pop(own_name(model), None)

    def add(self, model: str, item: Waiting) -> None:
        """Queue one item behind all others of its model."""
        queue = self.queues.get(model)
        if queue is None:
            self._enter(model)
            queue = self.queues[model]
        queue.append(item)

    def _enter(self, model: str) -> None:
        self._begin_service(model)
        self.queues[model] = deque()

    def _begin_service(self, name: str) -> None:
        self.served_ns[name] = max(self.served_ns.get(name, 0), self._start_ns)

    def remove(self, step: Step) -> None:
        """Take a step's items out of the queue."""
        queue = self.queues[step.model]
        if len(step.items) + len(step.expired) + len(step.refused) == len(queue):
            del self.queues[step.model]
            return
        gone = {id(item) for item in step.items}
        gone.update(id(item) for item in step.expired)
        gone.update(id(refused.item) for refused in step.refused)
        kept: list[Waiting] = []
        while gone:
            item = queue.popleft()
            if id(item) in gone:
                gone.discard(id(item))
            else:
                kept.append(item)
        queue.extendleft(reversed(kept))
        if not queue:
            del self.queues[step.model]

    def charge(self, model: str, took_ns: int) -> None:
        """Count the time that a model's step took; items of the step that did not run cost it nothing."""
        self._start_ns = self.served_ns[model]
        self.served_ns[model] += took_ns

    def put_back(self, model: str, items: list[Waiting]) -> None:
        """Return items that could not run (no room for their reply) to the front, in order."""
        if model not in self.queues:
            self._enter(model)
        self.queues[model].extendleft(reversed(items))

    def drop_where(self, is_gone: Callable[[Any], bool]) -> list[Waiting]:
        """Remove and return the items for whose request `is_gone(request)` holds (their client's process died)."""
        gone: list[Waiting] = []
        for model, queue in list(self.queues.items()):
            gone.extend(item for item in queue if is_gone(item.request))
            kept = deque(item for item in queue if not is_gone(item.request))
            if kept:
                self.queues[model] = kept
            else:
                del self.queues[model]
        return gone


def own_name(model: str) -> str:
    """Return the name under which the time of a model's own steps is counted: no id of a model has a space."""
    return f"{model} own"


def plan_step(state: State, budget: Budget, now_ns: int) -> Step | None:
    """Choose the next step, or None when nothing waits. Changes nothing: `State.remove` applies the step.

    The least served model goes next. Of its oldest items those past their deadline are named as expired; the rest
    are taken whole if they fit, else those that waited longer than max_age_ns in order of arrival, then those that lead
    and the shortest, which keeps lengths in a step alike and a short text's wait short.
    """
    if state.standing:
        model = min((*state.queues, *state.standing), key=state.served_ns.__getitem__)
        if model in state.standing:
            return Step(state.standing[model], [], 0, [], is_own=True)
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
    if queue[0].turn is None:
        window = list(islice(queue, budget.window_items))
    else:
        ordered, refused = in_turn(queue, now_ns)
        window = ordered[: budget.window_items]
    expired = [item for item in window if item.deadline_ns <= now_ns]
    live = [item for item in window if item.deadline_ns > now_ns] if expired else window
    if live and live[0].likeness is not None and not live[0].alone:
        chosen = _choose_alike(live, budget.max_items, _max_alike_tokens(state, budget, model))
    else:
        chosen = _choose(live, budget, now_ns) if live else []
    return Step(model, chosen, sum([item.num_tokens for item in chosen]), expired, refused)


def _choose(live: list[Waiting], budget: Budget, now_ns: int) -> list[Waiting]:
    head = live[0]
    if head.alone:
        return _fill([item for item in live if item.request is head.request], budget)
    together = [item for item in live if not item.alone]
    if len(together) <= budget.max_items and sum([item.num_tokens for item in together]) <= budget.max_tokens:
        return together
    overdue_ns = now_ns - budget.max_age_ns
    overdue = [item for item in together if item.arrival_ns < overdue_ns]
    recent = [item for item in together if item.arrival_ns >= overdue_ns]
    recent.sort(key=_by_length)
    return _fill(overdue + recent, budget)


def _max_alike_tokens(state: State, budget: Budget, model: str) -> float:
    """Return the most tokens of a step of alike items: the token budget, made for texts, does not bind these."""
    limit = float(budget.max_tokens) if model in state.ceilings else math.inf
    return min(limit, state.max_tokens.get(model, math.inf))


def _choose_alike(live: list[Waiting], max_items: int, max_tokens: float) -> list[Waiting]:
    """Take the oldest item, and in order those like it while their rows and tokens fit."""
    head = live[0]
    chosen, num_rows, num_tokens = [head], head.num_rows, head.num_tokens
    for item in live[1:]:
        if num_rows >= head.max_rows or len(chosen) == max_items:
            break
        fits = num_rows + item.num_rows <= head.max_rows and num_tokens + item.num_tokens <= max_tokens
        if fits and not item.alone and item.likeness == head.likeness:
            chosen.append(item)
            num_rows += item.num_rows
            num_tokens += item.num_tokens
    return chosen


def _by_length(item: Waiting) -> int:
    return 0 if item.leads else item.num_tokens


def _fill(ordered: list[Waiting], budget: Budget) -> list[Waiting]:
    """Take items in order until the next one does not fit; the first always does."""
    chosen: list[Waiting] = []
    num_tokens = 0
    for item in ordered:
        num_tokens += item.num_tokens
        if chosen and (num_tokens > budget.max_tokens or len(chosen) == budget.max_items):
            break
        chosen.append(item)
    return chosen
