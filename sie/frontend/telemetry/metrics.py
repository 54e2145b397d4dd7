"""Counts requests of a frontend, and merges the metrics of all processes. Must keep the set of labels bounded.

The values are in shared counter pages (`sie.shm.pages`). A page outlives its process, so a sum never falls when a process
is replaced. Families are defined in `sie.metrics.definitions`; records with other names are not shown.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence

from prometheus_client.samples import Exemplar

from sie.metrics import definitions
from sie.metrics.definitions import FAMILIES, Family
from sie.shm.pages import CounterPage, Gauge, Labels, Record, RecordKind
from sie.values.inference import Timing

_MAX_EXEMPLAR_LABELS = 1000

UNKNOWN_MODEL = "unknown"
"""The model label of requests for unknown models, so that labels stay bounded."""
_NO_MODEL = "none"
"""The model label of HTTP requests without a model."""

Pages = Iterable[CounterPage]
Merged = dict[str, dict[Labels, list[float]]]
"""Values by family name and label tuple: one value, or for a histogram its sum and the count of each bucket."""

_Observe = Callable[[float], None]
_BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PHASES = ("total", "queue", "tokenize", "inference")
_FAILED = "failed"
_TENSORS = "infer"


class FrontendMetrics:
    """The counters of one frontend process.

    known_models is queried once for each new combination of labels. It may be a live view of the catalogue.
    """

    def __init__(self, page: CounterPage, known_models: Container[str]) -> None:
        self._page = page
        self._known_models = known_models
        self._requests: dict[tuple[str, str, str], tuple[_Observe, ...]] = {}
        self._http: dict[tuple[str, str, str, int], tuple[_Observe, ...]] = {}
        self._served: dict[tuple[str, str, str, int], tuple[_Observe, ...]] = {}
        self._refusals: dict[str, _Observe] = {}
        self._last_inference: dict[str, Gauge] = {}
        self._lag = page.histogram(definitions.LOOP_LAG.name, (), definitions.LOOP_LAG.bounds)
        self._lag_latest = page.gauge(definitions.LOOP_LAG_LATEST.name, ())
        self._watchers = page.gauge(definitions.STATUS_WATCHERS.name, ())
        self._agents = page.gauge(definitions.AGENTS_RUNNING.name, ())
        self._num_agents = 0
        self._held = page.gauge(definitions.HELD_BYTES.name, ())
        self.record_held_cut = page.counter(definitions.HELD_CUTS.name, ()).add
        """Count a connection that was cut because this process held too much."""
        self._extents = page.gauge(definitions.EXTENTS_IN_USE.name, definitions.EXTENTS_IN_USE.label_pairs("request"))

    def record_served(  # noqa: PLR0917  # for every request that is served: keywords cost
        self, method: str, route: str, endpoint: str, model: str, status: int, total_s: float, body_bytes: int, timing: Timing
    ) -> None:  # fmt: skip
        """Count one answered inference request, as `record_http` and `record_request` together do."""
        handles = self._served.get((method, route, model, status))
        if handles is None:
            http = self._http_handles(method, route, model, status)
            handles = (*http, *self._request_handles(model, endpoint, "success"))
            if self._model_label(model) == model and method in _METHODS:
                self._served[method, route, model, status] = handles
        count_http, http_duration, body, count, total, queue, tokenize, inference = handles
        count_http(1.0)
        http_duration(total_s)
        body(body_bytes)
        count(1.0)
        total(total_s)
        if timing.queue_ms:
            queue(timing.queue_ms / 1e3)
        if timing.tokenization_ms:
            tokenize(timing.tokenization_ms / 1e3)
        if timing.inference_ms:
            inference(timing.inference_ms / 1e3)

    def record_request(
        self,
        model: str,
        endpoint: str,
        status: str,
        total_s: float,
        *,
        queue_s: float = 0.0,
        tokenize_s: float = 0.0,
        inference_s: float = 0.0,
    ) -> None:
        """Count one inference request and its phases; a phase of zero seconds is not observed.

        endpoint is encode, score, extract, embeddings or infer; status is success, error, queue_full or cancelled.
        """
        handles = self._requests.get((model, endpoint, status))
        if handles is None:
            handles = self._request_handles(model, endpoint, status)
        count, total, queue, tokenize, inference = handles
        count(1.0)
        if total_s:
            total(total_s)
        if queue_s:
            queue(queue_s)
        if tokenize_s:
            tokenize(tokenize_s)
        if inference_s:
            inference(inference_s)

    def record_http(
        self, method: str, route: str, model: str, status: int, *, duration_s: float, body_bytes: int
    ) -> None:
        """Count one HTTP request. route is a template from the route table, never a client's path.

        An unknown method is counted as OTHER.
        """
        handles = self._http.get((method, route, model, status))
        if handles is None:
            handles = self._http_handles(method, route, model, status)
        count, duration, body = handles
        count(1.0)
        duration(duration_s)
        body(body_bytes)

    def record_refusal(self, reason: str) -> None:
        """Count one request that was refused before any work. reason is one of our error codes."""
        add = self._refusals.get(reason)
        if add is None:
            counter = self._page.counter(definitions.REFUSALS.name, definitions.REFUSALS.label_pairs(reason))
            add = self._refusals[reason] = counter.add
        add(1.0)

    def record_cuts(self, model: str, endpoint: str, num_items: int) -> None:
        """Count the items of an answered request whose texts were cut; endpoint as in `record_request`."""
        labels = definitions.TRUNCATED.label_pairs(self._model_label(model), endpoint)
        self._page.counter(definitions.TRUNCATED.name, labels).add(num_items)

    def record_auth_failure(self, reason: str) -> None:
        """Count one request that was refused for its API key. reason is one of the family's documented values."""
        self._page.counter(definitions.AUTH_FAILURES.name, definitions.AUTH_FAILURES.label_pairs(reason)).add()

    def record_last_inference(self, model: str) -> None:
        """Publish the current time as the last answer of a tensor request to this model."""
        gauge = self._last_inference.get(model)
        if gauge is None:
            labels = definitions.LAST_INFERENCE.label_pairs(self._model_label(model))
            gauge = self._last_inference[model] = self._page.gauge(definitions.LAST_INFERENCE.name, labels)
        gauge.set(time.time())

    def record_loop_lag(self, lag_s: float) -> None:
        """Publish the event loop's delay for a timer."""
        self._lag.observe(lag_s)
        self._lag_latest.set(lag_s)

    def set_held_bytes(self, num_bytes: int) -> None:
        """Publish the bytes of bodies and unread answers that this process holds."""
        self._held.set(num_bytes)

    def set_extents_in_use(self, num_extents: int) -> None:
        """Publish the number of leased request extents."""
        self._extents.set(num_extents)

    def record_grpc_ended(self, reason: str) -> None:
        """Count one connection of gRPC that this side ended. reason is one of the family's documented values."""
        self._page.counter(definitions.GRPC_ENDED.name, definitions.GRPC_ENDED.label_pairs(reason)).add()
        if reason == "memory":
            self.record_held_cut()

    def record_grpc_turns(self, num_connections: int, num_waits: int) -> None:
        """Publish the open connections of gRPC, and count waits for a later turn of the event loop."""
        self._page.gauge(definitions.GRPC_CONNECTIONS.name, ()).set(num_connections)
        self._page.counter(definitions.GRPC_WAITS.name, ()).add(num_waits)

    def count_agents(self, change: int) -> None:
        """Publish that this process runs more or fewer agents."""
        self._num_agents += change
        self._agents.set(self._num_agents)

    def set_watchers(self, num_watchers: int) -> None:
        """Publish the number of this process's status connections."""
        self._watchers.set(num_watchers)

    def _request_handles(self, model: str, endpoint: str, status: str) -> tuple[_Observe, ...]:
        label = self._model_label(model)
        count = self._page.counter(definitions.REQUESTS.name, definitions.REQUESTS.label_pairs(label, endpoint, status))
        family = definitions.REQUEST_DURATION
        # The tensor protocols report the times of failed and of successful requests separately.
        has_failed = endpoint == _TENSORS and status != "success"
        phases = (
            self._page.histogram(family.name, family.label_pairs(label, endpoint, phase), family.bounds).observe
            for phase in (_FAILED if has_failed else _PHASES[0], *_PHASES[1:])
        )
        handles = (count.add, *phases)
        if label == model:  # names invented by clients must not fill the cache either
            self._requests[model, endpoint, status] = handles
        return handles

    def _http_handles(self, method: str, route: str, model: str, status: int) -> tuple[_Observe, ...]:
        label = self._model_label(model) or _NO_MODEL
        verb = method if method in _METHODS else "OTHER"
        labels = (verb, route, label)
        page, code = self._page, str(status)
        count = page.counter(definitions.HTTP_REQUESTS.name, definitions.HTTP_REQUESTS.label_pairs(*labels, code))
        family = definitions.HTTP_DURATION
        duration = page.histogram(family.name, family.label_pairs(*labels, code), family.bounds)
        body = page.histogram(
            definitions.HTTP_BODY.name, definitions.HTTP_BODY.label_pairs(*labels), definitions.HTTP_BODY.bounds
        )
        handles = (count.add, duration.observe, body.observe)
        if label in (model, _NO_MODEL) and verb == method:
            self._http[method, route, model, status] = handles
        return handles

    def _model_label(self, model: str) -> str:
        """Return the label for this model; "" stays "", for requests without a model."""
        return model if not model or model in self._known_models else UNKNOWN_MODEL


def merge(pages: Pages, families: Sequence[Family] = FAMILIES) -> Merged:
    """Merge the records of these families on all pages: counters and histograms by sum, gauges by their family's rule.

    Histograms without observations are left out, as are gauges with the value NaN ("not reported"). Raises ProtocolError
    on a broken page, because a sum without it would be wrong.
    """
    by_name = _BY_NAME if families is FAMILIES else {family.name: family for family in families}
    merged: Merged = {name: {} for name in by_name}
    num_dropped = 0
    for page in pages:
        num_dropped += page.dropped
        for record in page.records():
            family = by_name.get(record.name)
            if family is not None:
                _merge_record(merged[record.name], family, record)
    if definitions.DROPPED.name in merged:
        merged[definitions.DROPPED.name][()] = [num_dropped]
    return merged


def _merge_record(samples: dict[Labels, list[float]], family: Family, record: Record) -> None:
    empty = not any(record.buckets) if family.kind == "histogram" else math.isnan(record.value)
    if empty:
        return
    known = samples.get(record.labels)
    if known is None:
        samples[record.labels] = [record.value, *record.buckets]
    elif family.merge == "max":
        known[0] = max(known[0], record.value)
    else:
        known[0] += record.value
        for position, count in enumerate(record.buckets, start=1):
            known[position] += count


def count_watchers(pages: Pages) -> int:
    """Return the status connections of all processes. It reads one gauge of each page: merging all of them takes milliseconds."""
    name = definitions.STATUS_WATCHERS.name
    return int(sum(read() for page in pages if (read := page.reader(RecordKind.GAUGE, name)) is not None))


class Exemplars:
    """The latest traced request of each bucket of `sie_request_duration_seconds`, of this process. Its size is bounded."""

    def __init__(self) -> None:
        self._latest: dict[Labels, dict[int, Exemplar]] = {}

    def add(self, model: str, endpoint: str, total_s: float, trace_id: str) -> None:
        """Remember a request that was served and traced."""
        family = definitions.REQUEST_DURATION
        labels = family.label_pairs(model, endpoint, _PHASES[0])
        if labels in self._latest or len(self._latest) < _MAX_EXEMPLAR_LABELS:
            bucket = bisect_left(family.bounds, total_s)
            self._latest.setdefault(labels, {})[bucket] = Exemplar({"trace_id": trace_id}, total_s, time.time())

    def of(self, family: Family, labels: Labels) -> dict[int, Exemplar]:
        """Return the exemplars of a histogram by the number of their bucket."""
        return self._latest.get(labels, {}) if family is definitions.REQUEST_DURATION else {}


def cumulative(values: Sequence[float]) -> list[float]:
    """Return a histogram's cumulative counts, +Inf last, from its merged values (sum, then the count of each bucket)."""
    counts: list[float] = []
    total: float = 0
    for count in values[1:]:
        total += count
        counts.append(total)
    return counts
