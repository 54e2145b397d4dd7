"""Simulate orders of waiting texts on workers that are full: what each order makes of p50, p99 and rate.

It drives `plan_step`, `Pace` and `choose_worker` as they are, with times of steps from a formula instead of a processor. So
the same arguments print the same figures on any machine, and an order can be judged before it is written. Not simulated:
processor time of frontends and clients, neighbours, lent cores that are called back, and the wait of a worker for a frontend.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import click

from bench.contenders import SEED, Load
from bench.report import facts, print_facts, print_table, save
from sie.config.settings import Settings
from sie.frontend.engine.placement import choose_worker, measure_slowness
from sie.loadgen.sample_texts import count_words
from sie.workers.scheduling.pace import Pace
from sie.workers.scheduling.scheduler import OVERTAKING, State, plan_step
from sie.workers.scheduling.waiting import Budget, WaitingItem

_NEVER_NS: Final = 1 << 62
_MS: Final = 1_000_000
_STEP_TOKENS: Final = 1024
_ANSWER_NS: Final = _MS // 2
"""From the end of a step to the next request of its clients at a worker."""
_PACE_TICK_NS: Final = 100 * _MS
_PACE_WEIGHT: Final = 0.05
_TEAM: Final = 1.85
"""A step with the other worker's core is so many times as fast."""
_NOISE: Final = 0.05
_WARM_UP: Final = 0.1
"""Part of a run whose answers do not count."""


class Cost(NamedTuple):
    """The time of a step: so many ms, and so many for each token. speeds: of each worker; the client shares a core."""

    step_ms: float
    token_ms: float
    speeds: tuple[float, ...] = (1.0, 0.93)


class Order(NamedTuple):
    """How the next texts are chosen. overtaking: `_order_by_turn` with another number; below -1 longer texts go first.

    is_shared: all workers take from one queue when they are free. is_one_step: all that waits goes into one step on all
    cores, which takes slowdown times as long as the workers would take.
    """

    name: str
    overtaking: float = OVERTAKING
    max_age_ms: float = Settings().scheduler.max_age_ms
    is_shared: bool = False
    is_one_step: bool = False
    slowdown: float = 1.0


COSTS: Final = {"bert-base": Cost(1.0, 0.88), "modernbert-base": Cost(1.5, 1.14)}
"""Fitted to the rates of `2026-11-23-...-peers-bert-base.json` and `-peers-modernbert-base.json`."""
ORDERS: Final = (
    Order("as it is"),
    Order("order of arrival", overtaking=-1, max_age_ms=0),
    Order("one queue for all workers", is_shared=True),
    Order("one queue, order of arrival", overtaking=-1, max_age_ms=0, is_shared=True),
    Order("one queue, longer texts earlier", overtaking=-2, max_age_ms=1e9, is_shared=True),
    Order("one step on all cores", is_one_step=True, slowdown=2 / _TEAM),
    Order("one step on all cores, slower by a fifth", is_one_step=True, slowdown=1.2),
)
_CLOSED: Final = (8, 32, 128)
_OPEN: Final = (0.7, 0.9)


class _Worker:
    """One worker's queue and pace, and what a frontend knows of it (`placement.Worker`)."""

    is_late = False

    def __init__(self, slot: int, speed: float, state: State) -> None:
        self.slot, self.speed, self.state = slot, speed, state
        self.pace = Pace(state.max_tokens, int(Settings().scheduler.max_step_ms * _MS))
        self.outstanding_tokens, self.slowness, self.pace_ns = 0, 1.0, 0.0
        self.is_running = False


class Simulation:
    """One run. Times are ns since its start."""

    def __init__(self, order: Order, cost: Cost, seed: int = SEED) -> None:
        self.now_ns = 0
        self.latencies: list[tuple[int, int, int]] = []
        """When each text was answered, its tokens, and how long it took."""
        self._order, self._cost = order, cost
        self._random = random.Random(seed)
        shared = State()
        speeds = (sum(cost.speeds) / order.slowdown,) if order.is_one_step else cost.speeds
        states = [shared if order.is_shared else State() for _ in speeds]
        self._workers = [_Worker(slot, speed, states[slot]) for slot, speed in enumerate(speeds)]
        tokens = 1 << 30 if order.is_one_step else _STEP_TOKENS
        self._budget = Budget(max_tokens=tokens, max_items=1024, max_age_ns=int(order.max_age_ms * _MS))
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._paced_ns = 0

    def at(self, when_ns: int, event: Callable[[], None]) -> None:
        """Let an event happen at a time."""
        heapq.heappush(self._events, (when_ns, next(self._numbers), event))

    def run(self, until_ns: int) -> None:
        """Let events happen until a time."""
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, event = heapq.heappop(self._events)
            event()

    def submit(self, num_tokens: int, on_answer: Callable[[], None] = lambda: None) -> None:
        """Hand a text to a worker; on_answer is called when its client has the answer."""
        worker = choose_worker(self._workers)
        assert worker is not None
        item = WaitingItem(None, 0, num_tokens, self.now_ns, _NEVER_NS)
        worker.outstanding_tokens += 0 if self._order.is_shared else num_tokens
        item.request = (worker, on_answer, worker.outstanding_tokens)
        worker.state.add("m", item)
        item.work_before += round(
            (self._order.overtaking - OVERTAKING) * num_tokens
        )  # `_order_by_turn` adds its own multiple
        self._start_steps()

    def _start_steps(self) -> None:
        for worker in self._workers:
            if not worker.is_running and (step := plan_step(worker.state, self._budget, self.now_ns)) is not None:
                worker.state.remove(step)
                self._start(worker, step.items, step.num_tokens)

    def _start(self, worker: _Worker, items: list[WaitingItem], num_tokens: int) -> None:
        others = [other for other in self._workers if other is not worker]
        is_alone = bool(others) and not any(other.is_running or other.state for other in others)
        work_ns = (self._cost.step_ms + self._cost.token_ms * num_tokens) * _MS
        work_ns *= 1 + self._random.uniform(-_NOISE, _NOISE)
        worker.is_running = True
        took_ns = int(work_ns / worker.speed / (_TEAM if is_alone else 1))
        self.at(self.now_ns + took_ns, lambda: self._end(worker, items, num_tokens, int(work_ns)))

    def _end(self, worker: _Worker, items: list[WaitingItem], num_tokens: int, work_ns: int) -> None:
        worker.is_running = False
        if not self._order.is_one_step:
            worker.pace.adapt("m", num_tokens, work_ns)
        for item in items:
            self.latencies.append((self.now_ns, item.num_tokens, self.now_ns - item.arrival_ns))
        self.at(self.now_ns + _ANSWER_NS, lambda: self._answer(items))
        self._start_steps()

    def _answer(self, items: list[WaitingItem]) -> None:
        for item in items:
            worker, _, tokens_at_worker = item.request
            if not self._order.is_shared:
                worker.outstanding_tokens -= item.num_tokens
                pace_ns = (self.now_ns - item.arrival_ns) / tokens_at_worker
                worker.pace_ns += _PACE_WEIGHT * (pace_ns - worker.pace_ns) if worker.pace_ns else pace_ns
        if self.now_ns - self._paced_ns > _PACE_TICK_NS:
            self._paced_ns = self.now_ns
            slowness = measure_slowness([worker.pace_ns for worker in self._workers])
            for worker, value in zip(self._workers, slowness, strict=True):
                worker.slowness = value
        for item in items:
            item.request[1]()


class Outcome(NamedTuple):
    """What came of a run; tokens a second, and milliseconds."""

    tokens_per_s: float
    p50_ms: float
    p99_ms: float


def simulate_closed(order: Order, cost: Cost, lengths: Sequence[int], connections: int, seconds: float) -> Outcome:
    """Keep connections busy with texts of these lengths in turn."""
    simulation, texts = Simulation(order, cost), itertools.cycle(lengths)

    def ask() -> None:
        simulation.submit(next(texts), ask)

    for _ in range(connections):
        simulation.at(0, ask)
    return _outcome(simulation, seconds)


def simulate_open(order: Order, cost: Cost, lengths: Sequence[int], load: float, seconds: float) -> Outcome:
    """Let texts of these lengths arrive at random times, at a part of the rate that all workers reach."""
    simulation, texts, gaps = Simulation(order, cost), itertools.cycle(lengths), random.Random(SEED)
    rate = load * sum(cost.speeds) / (cost.token_ms * _MS * sum(lengths) / len(lengths))
    due_ns = 0.0
    while due_ns < seconds * 1e9:
        due_ns += gaps.expovariate(rate)
        simulation.at(int(due_ns), lambda: simulation.submit(next(texts)))
    return _outcome(simulation, seconds)


def _outcome(simulation: Simulation, seconds: float) -> Outcome:
    simulation.run(int(seconds * 1e9))
    began_ns = seconds * 1e9 * _WARM_UP
    counted = [(tokens, took) for when, tokens, took in simulation.latencies if when > began_ns]
    times = sorted(took for _, took in counted)
    p50_ms, p99_ms = (times[len(times) * percent // 100] / _MS for percent in (50, 99))
    return Outcome(sum(tokens for tokens, _ in counted) / (seconds * (1 - _WARM_UP)), p50_ms, p99_ms)


@click.command()
@click.option("--seconds", default=120.0, show_default=True, help="Simulated length of a run.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(seconds: float, is_saved: bool) -> None:
    """Simulate orders of waiting texts."""
    lengths = [count_words(text) for text in Load("", "mixed", 1, 1).texts()]
    known = facts(
        "Orders of waiting texts, simulated",
        f"{len(lengths)} texts of 12, 64 and 230 tokens in turn; {seconds:g} s of simulated time a run; closed loops, and open "
        "ones at a part of the rate that two workers reach",
    )
    print_facts(known)
    figures: list[dict[str, Any]] = []
    for model, cost in COSTS.items():
        rows: list[list[str]] = []
        for order in ORDERS:
            runs = {f"{n} connections": simulate_closed(order, cost, lengths, n, seconds) for n in _CLOSED}
            runs |= {f"{load:.0%} of the rate": simulate_open(order, cost, lengths, load, seconds) for load in _OPEN}
            rows.append(
                [
                    order.name,
                    *(f"{one.tokens_per_s:,.0f} ({one.p50_ms:.0f} / {one.p99_ms:.0f})" for one in runs.values()),
                ]
            )
            figures += [
                {"model": model, "order": order.name, "load": load, **one._asdict()} for load, one in runs.items()
            ]
        print_table((f"{model}: tokens/s (p50 / p99 ms)", *runs), rows)
    if is_saved:
        save("queueing", known, {"runs": figures})
