"""The scheduler's state against a plain list: nothing lost, nothing twice, every step within its budget and fair."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import event, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sie.workers.scheduling.scheduler import OVERTAKING, State, plan_step
from sie.workers.scheduling.waiting import Budget, WaitingItem
from sie.workers.scheduling.waiting_queue import singles
from tests.property.lives import live, note

_MODELS = ("a", "b", "c")


class SchedulerMachine(RuleBasedStateMachine):
    """`waiting` is what must wait, by item; `parked` are items that a step took and that did not run.

    `led` are requests whose first item leads the others and has not run yet, `was_led` those in which it has.
    """

    @initialize(
        max_tokens=st.integers(1, 40),
        max_items=st.integers(1, 6),
        max_age=st.integers(0, 20),
        window=st.integers(1, 12),
    )
    def start(self, max_tokens: int, max_items: int, max_age: int, window: int) -> None:
        self.budget = Budget(max_tokens=max_tokens, max_items=max_items, max_age_ns=max_age, window_items=window)
        self.state = State()
        self.waiting: dict[int, tuple[str, WaitingItem]] = {}
        self.parked: list[tuple[str, list[WaitingItem]]] = []
        self.led: set[int] = set()
        self.was_led: set[int] = set()
        self.now_ns = 0
        self.num_requests = 0

    @rule(
        model=st.sampled_from(_MODELS),
        sizes=st.lists(st.integers(0, 6) | st.integers(0, 50), min_size=1, max_size=5),
        lifetime=st.integers(1, 60),
        alone=st.sampled_from([False, False, False, True]),
        led=st.booleans(),
    )
    def add(self, model: str, sizes: list[int], lifetime: int, alone: bool, led: bool) -> None:
        request = self.num_requests = self.num_requests + 1
        if led:
            self.led.add(request)
        for index, num_tokens in enumerate(sizes):
            leads = led and index == 0
            item = WaitingItem(request, index, num_tokens, self.now_ns, self.now_ns + lifetime, alone, leads)
            self.state.add(model, item)
            self.waiting[id(item)] = (model, item)

    @rule(elapsed=st.integers(0, 30))
    def pass_time(self, elapsed: int) -> None:
        self.now_ns += elapsed

    @rule(runs=st.sampled_from([True, True, False]))
    def step(self, runs: bool) -> None:
        step = plan_step(self.state, self.budget, self.now_ns)
        assert (step is None) == (not self.waiting)
        if step is None:
            note("nothing to do")
            return
        assert step.items or step.expired, "a step without items would be planned for ever"
        self._check_items(step.items, step.num_tokens)
        assert all(item.deadline_ns <= self.now_ns for item in step.expired)
        assert all(item.deadline_ns > self.now_ns for item in step.items)
        for item in (*step.items, *step.expired):
            model, _ = self.waiting.pop(id(item))  # fails for one that does not wait, or was taken twice
            assert model == step.model
        self.state.remove(step)
        if step.expired:
            note("expired")
        self._check_leaders(step.items, runs)
        if runs:
            self.state.charge(step.model, step.num_tokens)
        elif step.items:
            leaders = {item.request for item in step.items if item.leads}
            followers = self.state.drop_where(leaders.__contains__)
            for item in followers:
                del self.waiting[id(item)]
            self.parked.append((step.model, [*step.items, *followers]))

    def _check_leaders(self, items: list[WaitingItem], runs: bool) -> None:
        there = set()
        for item in items:
            there.update({item.request} if item.leads else ())
            assert item.request not in self.led - there, "an item came before the one that leads it"
        if there and any(item.request in there and not item.leads for item in items):
            note("led in one step")
        if any(item.request in self.was_led for item in items):
            note("led by an earlier step")
        if runs:
            self.led -= there
            self.was_led |= there

    def _check_items(self, items: list[WaitingItem], num_tokens: int) -> None:
        assert num_tokens == sum(item.num_tokens for item in items)
        assert len(items) <= self.budget.max_items
        if num_tokens > self.budget.max_tokens:
            assert len(items) == 1
            note("over the budget")
        if any(item.alone for item in items):
            assert len({item.request for item in items}) == 1
            note("alone")

    @rule()
    def requeue(self) -> None:
        for model, items in self.parked:
            self.state.requeue(model, items)
            self.waiting.update((id(item), (model, item)) for item in items)
            assert list(self.state.queues[model])[: len(items)] == items
            note("put back")
        self.parked.clear()

    @rule(pick=st.integers(0, 6))
    def lose_client(self, pick: int) -> None:
        dropped = self.state.drop_where(lambda request: request % 7 == pick)
        expected = {key for key, (_, item) in self.waiting.items() if item.request % 7 == pick}
        assert len(dropped) == len(expected)
        for item in dropped:
            del self.waiting[id(item)]
        if dropped:
            note("dropped")

    @invariant()
    def what_waits_is_in_its_model_s_queue_once(self) -> None:
        if not hasattr(self, "state"):
            return
        queued = Counter((model, id(item)) for model, queue in self.state.queues.items() for item in queue)
        assert queued == Counter((model, key) for key, (model, _) in self.waiting.items())
        assert all(self.state.queues.values()), "an empty queue would be planned"

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        num_steps = 0
        while (step := plan_step(self.state, self.budget, self.now_ns)) is not None:
            self.state.remove(step)
            num_steps += 1
            assert num_steps <= len(self.waiting), "every step takes at least one item"


def test_scheduler_agrees_with_the_model() -> None:
    live(
        SchedulerMachine, "nothing to do", "expired", "over the budget", "alone", "put back", "dropped",
        "led in one step", "led by an earlier step", lives=200, steps=40,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    turns=st.lists(st.lists(st.integers(0, 60), max_size=6), min_size=1, max_size=40),
    max_tokens=st.integers(1, 80),
    max_items=st.integers(1, 6),
)
def test_work_that_overtakes_an_item_is_bounded_by_its_own(
    turns: list[list[int]], max_tokens: int, max_items: int
) -> None:
    """Whatever arrives, and however long ago: of later items, those that run before an item have less than three times
    its tokens together, or none.
    """
    budget = Budget(max_tokens=max_tokens, max_items=max_items, max_age_ns=1 << 60)
    state = State()
    waiting: list[WaitingItem] = []
    overtaken: list[int] = []
    """By request: the tokens of later ones that ran before it."""
    while turns or waiting:
        for num_tokens in turns.pop() if turns else ():
            item = WaitingItem(len(overtaken), 0, num_tokens, 0, 1)
            overtaken.append(0)
            waiting.append(item)
            state.add("m", item)
        step = plan_step(state, budget, 0)
        if step is None:
            continue
        state.remove(step)
        ran = {item.request for item in step.items}
        waiting = [item for item in waiting if item.request not in ran]
        for item in waiting:
            overtaken[item.request] += sum(one.num_tokens for one in step.items if one.request > item.request)
            assert overtaken[item.request] <= OVERTAKING * item.num_tokens
            if overtaken[item.request]:
                event("overtaken")


class Arrival(NamedTuple):
    """A request that arrives: the tokens of its items, and its fields."""

    sizes: list[int]
    lifetime_ns: int
    alone: bool
    led: bool


_arrivals = st.builds(
    Arrival, st.lists(st.integers(0, 6) | st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60),
    st.sampled_from([False, False, False, False, True]), st.booleans(),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    turns=st.lists(st.tuples(st.lists(_arrivals, max_size=3), st.integers(0, 12)), min_size=1, max_size=12),
    max_tokens=st.integers(1, 120),
    max_items=st.integers(1, 20),
    max_age_ns=st.integers(0, 40),
    window_items=st.integers(1, 40),
)
def test_items_that_wait_together_go_into_the_same_steps_as_items_that_wait_alone(
    turns: list[tuple[list[Arrival], int]], max_tokens: int, max_items: int, max_age_ns: int, window_items: int
) -> None:
    budget = Budget(max_tokens=max_tokens, max_items=max_items, max_age_ns=max_age_ns, window_items=window_items)
    together, apart = State(), State()
    now_ns = num_requests = num_cut = 0
    while turns or apart:
        arrivals, elapsed_ns = turns.pop() if turns else ([], 1)
        now_ns += elapsed_ns
        for arrival in arrivals:
            num_requests += 1
            for item in _waiting(num_requests, arrival, now_ns):
                together.add("m", item)
            for item in _waiting(num_requests, arrival, now_ns):
                for one in singles([item]):
                    apart.add("m", one)
        step, expected = plan_step(together, budget, now_ns), plan_step(apart, budget, now_ns)
        if step is None or expected is None:
            assert step is expected is None
            continue
        assert _rows(step.items) == _rows(expected.items)
        assert _rows(step.expired) == _rows(expected.expired)
        assert step.num_tokens == expected.num_tokens == sum(item.num_tokens for item in step.items)
        num_cut += any(item.part_of is not None for item in step.items)
        together.remove(step)
        apart.remove(expected)
        assert all(item.part_of is None for item in step.items), "from here on each is an item of its own"
        assert [len(queue) for queue in together.queues.values()] == [len(queue) for queue in apart.queues.values()]
    if num_cut:
        event("cut")


def _waiting(request: int, arrival: Arrival, now_ns: int) -> list[WaitingItem]:
    """Return a request's items, all of them together but one that leads."""
    items: list[WaitingItem] = []
    for first, end in ((0, 1), (1, len(arrival.sizes))) if arrival.led else ((0, len(arrival.sizes)),):
        costs = arrival.sizes[first:end]
        if costs:
            item = WaitingItem(request, first, sum(costs), now_ns, now_ns + arrival.lifetime_ns, arrival.alone)
            item.leads = arrival.led and first == 0
            item.num_items, item.costs = len(costs), costs if len(costs) > 1 else ()
            items.append(item)
    return items


def _rows(items: list[WaitingItem]) -> list[tuple[int, int, int]]:
    """Return the request, row and tokens of each item in a fixed order."""
    return sorted((item.request, item.index, item.num_tokens) for item in singles(items))
