"""What a scraper sees: the seven families of the contract, sums over processes, and bounded labels."""

from __future__ import annotations

import math
import os

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sie.frontend.telemetry.exposition import CONTENT_TYPE, registry_of, render_openmetrics, render_text
from sie.frontend.telemetry.metrics import Exemplars, FrontendMetrics, count_watchers, merge
from sie.metrics import definitions
from sie.metrics.definitions import FAMILIES
from sie.shm.pages import CounterPage

PAGE_BYTES = 64 * 1024
DURATION_BOUNDS = ["0.001", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0"]
CONTRACT = {
    # Source: SIE API reference, section 14. The parser names a counter without its `_total`.
    "sie_requests": ("counter", ("model", "endpoint", "status"), []),
    "sie_request_duration_seconds": ("histogram", ("model", "endpoint", "phase"), DURATION_BOUNDS),
    "sie_batch_size": ("histogram", ("model",), [f"{1 << power}.0" for power in range(11)]),
    "sie_tokens_processed": ("counter", ("model",), []),
    "sie_queue_depth": ("gauge", ("model",), []),
    "sie_model_loaded": ("gauge", ("model", "device"), []),
    "sie_model_memory_bytes": ("gauge", ("model", "device"), []),
}


@pytest.fixture
def new_page():
    pages = []

    def create(nbytes=PAGE_BYTES):
        pages.append(CounterPage.create(nbytes))
        return pages[-1]

    yield create
    for page in pages:
        page.close()


def scrape(*pages):
    """Return {(sample name, sorted labels): value} as a scraper reads it."""
    text = render_text(merge(pages)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name, **labels):
    return name, tuple(sorted(labels.items()))


def write_one_sample_of_each(page):
    for family in FAMILIES:
        labels = family.label_pairs(*family.labels)
        if family.kind == "histogram":
            page.histogram(family.name, labels, family.bounds).observe(0.003)
        elif family.kind == "counter":
            page.counter(family.name, labels).add(1)
        else:
            page.gauge(family.name, labels).set(1)


def test_every_family_has_type_and_help_before_the_first_sample(new_page):
    text = render_text(merge([new_page()])).decode()
    for family in FAMILIES:
        assert f"# TYPE {family.name} {family.kind}\n" in text
        assert f"# HELP {family.name} {family.help}\n" in text
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_families_have_the_documented_type_labels_and_buckets(new_page, name):
    kind, labels, bounds = CONTRACT[name]
    page = new_page()
    write_one_sample_of_each(page)
    (family,) = [
        each for each in text_string_to_metric_families(render_text(merge([page])).decode()) if each.name == name
    ]
    assert family.type == kind
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == set(labels)
    found = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    assert found == ([*bounds, "+Inf"] if bounds else [])


def test_request_phases_of_zero_seconds_are_not_observed(new_page):
    page = new_page()
    FrontendMetrics(page, {"m"}).record_request("m", "encode", "success", 0.004, inference_s=0.002)
    samples = scrape(page)
    assert samples[key("sie_requests_total", model="m", endpoint="encode", status="success")] == 1
    phases = {dict(labels)["phase"] for name, labels in samples if name == "sie_request_duration_seconds_count"}
    assert phases == {"total", "inference"}
    total = {"model": "m", "endpoint": "encode", "phase": "total"}
    assert samples[key("sie_request_duration_seconds_sum", **total)] == pytest.approx(0.004)
    assert samples[key("sie_request_duration_seconds_bucket", **total, le="0.001")] == 0
    assert samples[key("sie_request_duration_seconds_bucket", **total, le="0.005")] == 1
    assert samples[key("sie_request_duration_seconds_bucket", **total, le="+Inf")] == 1


def test_counters_and_histograms_are_sums_over_processes(new_page):
    pages = [new_page(), new_page()]
    for page, seconds in zip(pages, (0.004, 0.04), strict=True):
        FrontendMetrics(page, {"m"}).record_request("m", "encode", "success", seconds)
    samples = scrape(*pages)
    total = {"model": "m", "endpoint": "encode", "phase": "total"}
    assert samples[key("sie_requests_total", model="m", endpoint="encode", status="success")] == 2
    assert samples[key("sie_request_duration_seconds_count", **total)] == 2
    assert samples[key("sie_request_duration_seconds_sum", **total)] == pytest.approx(0.044)
    assert samples[key("sie_request_duration_seconds_bucket", **total, le="0.005")] == 1


def test_gauges_are_sums_except_where_the_largest_is_meant(new_page):
    pages = [new_page(), new_page()]
    for page, lag_s, extents in zip(pages, (0.002, 0.5), (3, 4), strict=True):
        metrics = FrontendMetrics(page, set())
        metrics.record_loop_lag(lag_s)
        metrics.set_extents_in_use(extents)
        labels = definitions.MODEL_LOADED.label_pairs("m", "cpu")
        page.gauge(definitions.MODEL_LOADED.name, labels).set(1)
        page.gauge(definitions.MODEL_MEMORY.name, labels).set(100)
    samples = scrape(*pages)
    assert samples[key("sie_event_loop_lag_latest_seconds")] == 0.5
    assert samples[key("sie_extents_in_use", segment="request")] == 7
    assert samples[key("sie_model_loaded", model="m", device="cpu")] == 1
    assert samples[key("sie_model_memory_bytes", model="m", device="cpu")] == 200


def test_a_value_that_is_not_reported_has_no_sample(new_page):
    page = new_page()
    labels = definitions.GPU_UTILIZATION.label_pairs("cuda:0", "0", "NVIDIA L4", "l4", "u")
    page.gauge(definitions.GPU_UTILIZATION.name, labels).set(math.nan)
    assert not [name for name, _ in scrape(page) if name == "sie_gpu_utilization_percent"]


def test_counters_go_on_from_a_dead_predecessor_and_gauges_start_again(new_page):
    page = new_page()
    first = FrontendMetrics(page, {"m"})
    first.record_request("m", "encode", "success", 0.004)
    first.set_extents_in_use(9)
    successor = CounterPage.open(os.dup(page.fd), writable=True)
    FrontendMetrics(successor, {"m"}).record_request("m", "encode", "success", 0.004)
    samples = scrape(page)
    successor.close()
    assert samples[key("sie_requests_total", model="m", endpoint="encode", status="success")] == 2
    assert samples[key("sie_extents_in_use", segment="request")] == 0


def test_what_clients_make_up_never_becomes_a_label(new_page):
    page = new_page()
    metrics = FrontendMetrics(page, {"m"})
    for number in range(50):
        metrics.record_request(f"made-up-{number}", "encode", "error", 0.001)
        metrics.record_http(f"VERB{number}", "/healthz", "", 405, duration_s=0.001, body_bytes=0)
        metrics.record_http("POST", "/v1/embeddings", f"made-up-{number}", 404, duration_s=0.001, body_bytes=9)
    samples = scrape(page)
    assert samples[key("sie_requests_total", model="unknown", endpoint="encode", status="error")] == 50
    assert samples[key("http_requests_total", method="OTHER", path="/healthz", model="none", status="405")] == 50
    assert (
        samples[key("http_requests_total", method="POST", path="/v1/embeddings", model="unknown", status="404")] == 50
    )


def test_a_model_that_becomes_known_gets_its_label(new_page):
    page, known = new_page(), set()
    metrics = FrontendMetrics(page, known)
    metrics.record_request("late", "encode", "error", 0.001)
    known.add("late")
    metrics.record_request("late", "encode", "error", 0.001)
    samples = scrape(page)
    assert samples[key("sie_requests_total", model="late", endpoint="encode", status="error")] == 1


def test_refusals_are_counted_by_reason(new_page):
    page = new_page()
    metrics = FrontendMetrics(page, set())
    for reason in ("QUEUE_FULL", "QUEUE_FULL", "MODEL_LOADING"):
        metrics.record_refusal(reason)
    samples = scrape(page)
    assert samples[key("sie_refusals_total", reason="QUEUE_FULL")] == 2
    assert samples[key("sie_refusals_total", reason="MODEL_LOADING")] == 1


def test_label_values_are_escaped(new_page):
    page, name = new_page(), 'quo"te\\back\nline'
    FrontendMetrics(page, {name}).record_request(name, "encode", "success", 0.001)
    assert scrape(page)[key("sie_requests_total", model=name, endpoint="encode", status="success")] == 1


def test_a_full_page_says_how_much_it_does_not_count(new_page):
    page = new_page(8192)
    models = {f"model-{number}" for number in range(64)}
    metrics = FrontendMetrics(page, models)
    for model in sorted(models):
        metrics.record_request(model, "encode", "success", 0.001)
    assert scrape(page)[key("sie_metrics_dropped_total")] > 0


def test_exemplar_is_at_the_bucket_of_its_request_in_openmetrics_only(new_page):
    page, exemplars = new_page(1 << 20), Exemplars()
    write_one_sample_of_each(page)
    exemplars.add("model", "endpoint", 0.02, "older")
    exemplars.add("model", "endpoint", 0.02, "a" * 32)
    exemplars.add("model", "endpoint", 99.0, "b" * 32)
    for number in range(5000):  # as many models as may come and go
        exemplars.add(f"m{number}", "endpoint", 0.1, "c" * 32)
    family = definitions.REQUEST_DURATION
    page.histogram(family.name, family.label_pairs("model", "endpoint", "total"), family.bounds).observe(0.02)
    families = list(read_openmetrics(render_openmetrics(merge([page]), exemplars).decode()))
    assert {each.name for each in families} == {
        each.name for each in text_string_to_metric_families(render_text(merge([page])).decode())
    }
    found = {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for each in families for sample in each.samples if sample.exemplar
    }  # fmt: skip
    assert found == {"0.025": ("a" * 32, 0.02), "+Inf": ("b" * 32, 99.0)}
    assert len(exemplars._latest) == 1000
    assert b"aaaa" not in render_text(merge([page]))


def test_text_equals_that_of_the_library(new_page):
    page = new_page()
    write_one_sample_of_each(page)
    page.counter("sie_requests_total", definitions.REQUESTS.label_pairs('a"\\\n', "é", "{,}")).add(1.5e7)
    page.gauge("sie_queue_depth", definitions.QUEUE_DEPTH.label_pairs("m")).set(-math.inf)
    family = definitions.REQUEST_DURATION
    page.histogram(family.name, family.label_pairs("m", "encode", "total"), family.bounds).observe(1e-7)
    merged = merge([page])
    assert render_text(merged) == generate_latest(registry_of(merged, Exemplars()))


def test_watchers_of_all_processes_are_counted(new_page):
    pages = [new_page() for _ in range(3)]
    assert count_watchers(pages[2:]) == 0
    for page, watchers in zip(pages, (2, 3), strict=False):
        FrontendMetrics(page, set()).set_watchers(watchers)
    assert count_watchers(pages) == 5
