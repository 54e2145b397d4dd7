"""Counts a gateway's requests, and publishes its picture of the cluster. Labels stay bounded: no text of a client is one."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

from sie.cluster.gateway.host_directory import Host
from sie.cluster.gateway.requested_placement import Placement
from sie.cluster.pools import Pool
from sie.cluster.subjects import ANY, Lane, consumer_name, dead_stream
from sie.metrics import cluster_definitions as families
from sie.metrics.family import Family
from sie.shm.pages import CounterPage, Gauge
from sie.values.errors import SieError

_DEMAND_S: Final = 60.0
"""How long a request that found no host counts as demand."""
_MAX_REFUSED: Final = 10_000
"""Most requests without a host that are kept: each look at the metrics counts them."""
_OTHER: Final = "other"
_NAN: Final = float("nan")
_REJECTIONS: Final = frozenset((429, 503))


class Gauges:
    """The gauges of one family by their labels. A label that is not set again is no longer reported."""

    def __init__(self, page: CounterPage, family: Family) -> None:
        self._page = page
        self._family = family
        self._known: dict[tuple[str, ...], Gauge] = {}

    def replace(self, values: dict[tuple[str, ...], float]) -> None:
        """Publish these values, and no others."""
        for labels in values.keys() - self._known.keys():
            self._known[labels] = self._page.gauge(self._family.name, self._family.label_pairs(*labels))
        for labels, gauge in self._known.items():
            gauge.set(values.get(labels, _NAN))


class GatewayMetrics:
    """The counters of one gateway process; page is its own, known_profiles the machine profiles of its hosts."""

    def __init__(
        self, page: CounterPage, known_profiles: Container[str], known_models: Container[str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._now_s = now_s
        self._page = page
        self._known_profiles = known_profiles
        self._known_models = known_models
        self._refused: deque[tuple[float, tuple[str, str]]] = deque(maxlen=_MAX_REFUSED)
        self._gauges = {
            family.name: Gauges(page, family)
            for family in families.CLUSTER_FAMILIES if family.kind == "gauge" and family.name.startswith("sie_gateway_")
        }  # fmt: skip
        self._items = page.histogram(families.GATEWAY_ITEMS.name, (), families.GATEWAY_ITEMS.bounds)
        waits = families.GATEWAY_RESULT_WAIT
        self.record_wait = page.histogram(waits.name, (), waits.bounds).observe
        """Count the time in seconds from a request's submission to the result of its last item."""
        self._dead: dict[tuple[Lane, str], Callable[[float], None]] = {}
        self._publish: dict[str, Callable[[float], None]] = {}
        self._ends: dict[tuple[str, str, str], tuple[Callable[[float], None], Callable[[float], None]]] = {}

    # --- requests -------------------------------------------------------------------------------------------------

    def record_end(self, endpoint: str, placement: Placement, error: SieError | None, duration_s: float) -> None:
        """Count one request for inference that is over."""
        profile, status = self._profile(placement), "success" if error is None else "error"
        ends = self._ends.get((endpoint, status, profile))
        if ends is None:
            ends = self._ends[endpoint, status, profile] = self._ends_of(endpoint, status, profile)
        ends[0](1.0)
        ends[1](duration_s)
        if error is not None and error.http_status in _REJECTIONS:
            self._add(families.GATEWAY_REJECTED, profile, placement.bundle or ANY, error.code)
            if error.code == "PROVISIONING":
                self._add(families.GATEWAY_PROVISIONING, profile)
                self._refused.append((self._now_s(), (profile, placement.bundle or ANY)))

    def _ends_of(
        self, endpoint: str, status: str, profile: str
    ) -> tuple[Callable[[float], None], Callable[[float], None]]:
        """Return the functions that count a request with this end, and that observe its duration."""
        count, last = families.GATEWAY_REQUESTS, families.GATEWAY_LATENCY
        add = self._page.counter(count.name, count.label_pairs(endpoint, status, profile)).add
        return add, self._page.histogram(last.name, last.label_pairs(endpoint, profile), last.bounds).observe

    def _profile(self, placement: Placement) -> str:
        """Return a label for the wanted machine profile: one that no host has had is `other`."""
        if not placement.profile:
            return ANY
        return placement.profile if placement.profile in self._known_profiles else _OTHER

    def record_published(self, operation: str, duration_s: float) -> None:
        """Count one message with work items that NATS has confirmed."""
        observe = self._publish.get(operation)
        if observe is None:
            family = families.GATEWAY_PUBLISH
            observe = self._page.histogram(family.name, family.label_pairs(operation), family.bounds).observe
            self._publish[operation] = observe
        observe(duration_s)

    def record_items(self, lane: Lane, model: str, num_items: int) -> None:
        """Count a request by the number of its work items."""
        self._items.observe(num_items)
        self._dead_letters(lane, model)  # Prometheus sees an increase only of a series that was there before

    def record_dead(self, lane: Lane, model: str) -> None:
        """Count a work item that is not tried again."""
        self._dead_letters(lane, model)(1.0)

    def _dead_letters(self, lane: Lane, model: str) -> Callable[[float], None]:
        add = self._dead.get((lane, model))
        if add is None:
            family = families.GATEWAY_DEAD_LETTERS
            labels = family.label_pairs(dead_stream(lane.pool), consumer_name(lane, model))
            add = self._dead[lane, model] = self._page.counter(family.name, labels).add
        return add

    def _add(self, family: Family, *labels: str) -> None:
        self._page.counter(family.name, family.label_pairs(*labels)).add()

    # --- the cluster ----------------------------------------------------------------------------------------------

    def publish(
        self, hosts: Iterable[tuple[Host, str]], pools: Iterable[Pool], by_lane: Counter[Lane], *, epoch: int,
        is_connected: bool,
    ) -> None:  # fmt: skip
        """Publish each host with its status (healthy, draining, silent), the pools in force and the unanswered items."""
        listed, leased = list(hosts), list(pools)
        self._set(families.GATEWAY_CONNECTED, {(): float(is_connected)})
        self._set(families.GATEWAY_EPOCH, {(): float(epoch)})
        states = Counter(status for _, status in listed)
        self._set(families.GATEWAY_WORKERS, {(name,): states[name] for name in ("healthy", "draining", "silent")})
        heard = [host for host, status in listed if status != "silent"]
        self._set(families.GATEWAY_WORKER_QUEUE, _by_host(heard, lambda host: host.beat.num_running))
        self._set(families.GATEWAY_WORKER_MEMORY, _by_host(heard, lambda host: host.beat.memory_used_bytes))
        serving = Counter(model for host in heard for model in host.beat.models if host.serves(model))
        self._set(families.GATEWAY_MODEL_WORKERS, {
            (model,): count for model, count in serving.items() if model in self._known_models
        })  # fmt: skip
        gpus = sum(max(1, host.beat.num_gpus) for host in heard if host.beat.lease)
        self._set(families.GATEWAY_LEASED, {(): gpus})
        floors = Counter[str]()
        for pool in leased:
            floors[pool.queue_pool] += pool.minimum_worker_count
        self._set(families.GATEWAY_WARM_FLOOR, {(name,): count for name, count in floors.items()})
        self._set(families.GATEWAY_DEMAND, self._demand(by_lane))

    def _demand(self, by_lane: Counter[Lane]) -> dict[tuple[str, ...], float]:
        demand: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for lane, count in by_lane.items():
            demand[lane.profile, lane.bundle] += count
        now_s = self._now_s()
        while self._refused and now_s - self._refused[0][0] > _DEMAND_S:
            self._refused.popleft()
        for _, labels in self._refused:
            demand[labels] += 1
        return dict(demand)

    def _set(self, family: Family, values: dict[Any, Any]) -> None:
        self._gauges[family.name].replace(values)


def _by_host(hosts: Iterable[Host], value: Callable[[Host], float]) -> dict[tuple[str, ...], float]:
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for host in hosts:
        beat = host.beat
        name = beat.name if beat.name != beat.host else "unnamed"  # an id is new with each start
        found[name, beat.profile, beat.bundle] += value(host)
    return dict(found)
