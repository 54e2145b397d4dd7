"""Publishes the metrics of a generating model in the worker's counter page: sequences, blocks and steps."""

from __future__ import annotations

from collections.abc import Callable

from sie.metrics import definitions
from sie.metrics.definitions import Family
from sie.shm.pages import CounterPage
from sie.workers.generation.model_engine import REASONS, Engine


class GenerationMetrics:
    """The metrics of one generating model on one worker."""

    def __init__(self, page: CounterPage, engine: Engine) -> None:
        """Create all samples at once, so that a scraper sees each one from its start."""
        model = engine.runner.card.id
        planner, pool = engine.planner, engine.planner.pool

        def gauge(family: Family) -> Callable[[float], None]:
            return page.gauge(family.name, family.label_pairs(model)).set

        def counter(family: Family, *labels: str) -> Callable[[float], None]:
            return page.counter(family.name, family.label_pairs(model, *labels)).add

        steps = definitions.GENERATION_STEP
        self.observe_step = page.histogram(steps.name, steps.label_pairs(model), steps.bounds).observe
        """Takes the seconds of a step."""
        gauge(definitions.KV_BLOCKS)(pool.num_blocks)
        self._gauges: list[tuple[Callable[[float], None], Callable[[], int]]] = [
            (gauge(definitions.SEQUENCES_RUNNING), lambda: sum(found.num_choices for found in planner.running)),
            (gauge(definitions.SEQUENCES_WAITING), lambda: engine.num_waiting),
            (gauge(definitions.KV_BLOCKS_USED), lambda: pool.num_used),
        ]
        self._counters: list[_Counted] = [
            _Counted(counter(definitions.PREEMPTIONS), lambda: planner.num_preempted),
            _Counted(counter(definitions.PREFIX_LOOKUPS), lambda: planner.num_lookups),
            _Counted(counter(definitions.PREFIX_HITS), lambda: planner.num_hits),
            _Counted(counter(definitions.PREFIX_EVICTIONS), lambda: pool.num_evicted),
            _Counted(counter(definitions.PROMPT_TOKENS), lambda: engine.num_prompt_tokens),
            _Counted(counter(definitions.GENERATED_TOKENS), lambda: engine.num_generated),
            *(
                _Counted(
                    counter(definitions.SEQUENCES_COMPLETED, reason), lambda reason=reason: engine.num_ended[reason]
                )
                for reason in REASONS
            ),
        ]

    def publish(self) -> None:
        """Write the engine's current values."""
        for set_gauge, read in self._gauges:
            set_gauge(read())
        for counted in self._counters:
            counted.publish()


class _Counted:
    """A counter that follows a number of the engine, which starts at 0 at every load of the model."""

    def __init__(self, add: Callable[[float], None], read: Callable[[], int]) -> None:
        self._add = add
        self._read = read
        self._known = 0

    def publish(self) -> None:
        value = self._read()
        if value != self._known:
            self._add(value - self._known)
            self._known = value
