"""Writes merged metrics as a page for scrapers: Prometheus' text, or OpenMetrics with exemplars. Pure.

The text is written here, because prometheus_client takes 20 times as long: 1.4 s for 300 models. OpenMetrics is rare,
so prometheus_client writes it.
Source: Prometheus exposition formats, text version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]  # it is untyped

from sie.frontend.telemetry.metrics import Exemplars, Merged, cumulative
from sie.metrics.definitions import FAMILIES, Family
from sie.shm.pages import Labels

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of `render_text`. Every scraper reads version 0.0.4, and our names need no newer one."""
OPENMETRICS_TYPE: Final = openmetrics.CONTENT_TYPE_LATEST
"""The content type of `render_openmetrics`."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def render_text(merged: Merged) -> bytes:
    """Return all families as text, each with HELP and TYPE before its first sample."""
    return "".join([line for family in FAMILIES for line in _lines(family, merged[family.name])]).encode()


def _lines(family: Family, samples: dict[Labels, list[float]]) -> Iterator[str]:
    name = family.name
    yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
    for labels, values in samples.items():
        pairs = {key: f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels}
        own = _braced(pairs.values())
        if family.kind != "histogram":
            yield f"{name}{own} {floatToGoString(values[0])}\n"
            continue
        before, after = _around_le(pairs)
        counts = cumulative(values)
        for bound, count in zip(_le_texts(family), counts, strict=True):
            yield f'{name}_bucket{{{before}le="{bound}"{after}}} {floatToGoString(count)}\n'
        yield f"{name}_count{own} {floatToGoString(counts[-1])}\n{name}_sum{own} {floatToGoString(values[0])}\n"


def _braced(pairs: Iterable[str]) -> str:
    text = ",".join(sorted(pairs))
    return f"{{{text}}}" if text else ""


def _around_le(pairs: dict[str, str]) -> tuple[str, str]:
    """Return the labels before and after `le`, with commas; labels are sorted."""
    names = sorted(pairs)
    before = "".join([f"{pairs[name]}," for name in names if name < "le"])
    return before, "".join([f",{pairs[name]}" for name in names if name > "le"])


def render_openmetrics(merged: Merged, exemplars: Exemplars) -> bytes:
    """Return all families in the form of OpenMetrics, with exemplars, which the older format does not have."""
    return cast("bytes", openmetrics.generate_latest(registry_of(merged, exemplars)))  # pyright: ignore[reportUnknownMemberType]  # it is untyped


def registry_of(merged: Merged, exemplars: Exemplars) -> CollectorRegistry:
    """Return the families for prometheus_client."""
    registry = CollectorRegistry()
    registry.register(_Collected([_to_prometheus(family, merged[family.name], exemplars) for family in FAMILIES]))
    return registry


class _Collected(Collector):
    """Passes finished families to prometheus_client, which writes the format and escapes it."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _to_prometheus(family: Family, samples: dict[Labels, list[float]], exemplars: Exemplars) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, values in samples.items():
            known = exemplars.of(family, labels)
            counts = enumerate(zip(_le_texts(family), cumulative(values), strict=True))
            buckets = [(*pair, known[bucket]) if bucket in known else pair for bucket, pair in counts]
            histogram.add_metric(_label_values(labels), buckets, sum_value=values[0])
        return histogram
    factory = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = factory(family.name, family.help, labels=family.labels)
    for labels, values in samples.items():
        metric.add_metric(_label_values(labels), values[0])
    return metric


def _label_values(labels: Labels) -> list[str]:
    return [value for _, value in labels]


def _le_texts(family: Family) -> list[str]:
    return [repr(bound) for bound in family.bounds] + ["+Inf"]
