"""The example alert rules and dashboard: every query names metrics and labels of a running server."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import promql_parser
import pytest
import yaml

from sie.frontend.openapi import OPERATIONS
from sie.metrics import definitions as declared
from sie.metrics.cluster_definitions import CLUSTER_FAMILIES
from tests.conformance.promql import QueryError, result_labels, selectors
from tests.process.harness import eventually, start_server
from tests.process.wire import encode, families, get, post_json, samples

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "monitoring"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
FAULTS = [fault for operation in OPERATIONS for fault in operation.faults]
CODES = {code for fault in FAULTS for code in fault.codes}
STATUSES = {str(part.status) for operation in OPERATIONS for part in (*operation.answers, *operation.faults)}
ABSENT_WITHOUT_A_DEVICE = {family.name for family in declared.FAMILIES if family.labels == declared.GPU_UP.labels}
SHOWN_WHEN_IT_HAPPENS = {
    "sie_refusals_total", "sie_idle_evictions_total", "sie_pressure_evictions_total", "sie_loras_loaded",
    "sie_oom_evictions_triggered_total", "sie_config_reloads_total", "sie_config_refused", "sie_model_failed",
    "sie_auth_failures_total", "sie_api_key_requests_total", "sie_api_key_tokens_total",
    "sie_api_key_running", "sie_api_keys", "sie_api_keys_refused", "sie_api_key_expiry_timestamp_seconds",
    *(family.name for family in CLUSTER_FAMILIES),
}  # fmt: skip


@pytest.fixture(scope="module")
def live():
    """Return the page of a server that has seen requests, mistakes and the death of a worker."""
    models = ("--model", "stub/a=stub:dense=16,score,extract", "--model", "stub/g=stub:generate")
    with start_server(*models, "--frontends", "1") as server:
        before = samples(server.port)
        assert encode(server.port, "stub/a", ["x", "y"]).status == 200
        assert post_json(server.port, "/v1/rerank", {"model": "stub/a", "query": "q", "documents": ["d"]}).status == 200
        assert post_json(server.port, "/v1/encode/stub/a", {"items": []}).status == 400
        assert post_json(server.port, "/v1/chat/completions", {"messages": "hello"}).status == 200
        server.kill_worker()
        eventually(lambda: encode(server.port, "stub/a", ["z"]).status == 200, "an answer of the next worker")
        eventually(  # which loads one model after the other
            lambda: post_json(server.port, "/v1/chat/completions", {"messages": "hello"}).status == 200,
            "one of each model",
        )
        names = {name for name, _ in before}
        eventually(lambda: {name for name, _ in samples(server.port)} >= names, "all that was shown before")
        yield {"before": before, "families": families(server.port), "text": get(server.port, "/metrics").body.decode()}


@pytest.fixture(scope="module")
def known(live):
    """Return the labels of each sample name: those on the page, or where it has no sample those of its family."""
    labels: dict[str, frozenset[str]] = {"up": frozenset()}
    for family in declared.FAMILIES:
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        for suffix in suffixes:
            labels[family.name + suffix] = frozenset(family.labels) | ({"le"} if suffix == "_bucket" else frozenset())
    seen = defaultdict(set)
    for family in live["families"].values():
        for sample in family.samples:
            seen[sample.name] |= sample.labels.keys()
    for name, names in seen.items():
        assert names == labels.get(name), f"{name} is not as sie.metrics.definitions says"
    return labels


def parse(text):
    """Return a query of a rule or panel, parsed; the dashboard's variables stand for what Grafana puts there."""
    plain = text.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$model", ".*")
    assert "$" not in plain, text
    return promql_parser.parse(plain)


def all_queries():
    """Yield (where, query) for every rule, panel and variable."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            yield f"variable {name}", variable_query(variable)[0]


def variable_query(variable):
    """Return (selector, label) of a `label_values(selector, label)`."""
    match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
    assert match, variable["query"]
    return match[1], match[2]


QUERIES = list(all_queries())


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[f"{where}-{n}" for n, (where, _) in enumerate(QUERIES)])
def test_query_names_only_what_a_live_server_has(where, query, known, live):
    expr = parse(query)
    assert result_labels(expr, known) is not None, "a query for a number"
    on_page = {sample.name for family in live["families"].values() for sample in family.samples} | {"up"}
    for selector in selectors(expr):
        family = re.sub(r"_(bucket|sum|count)$", "", selector.name)
        assert selector.name == "up" or f"# TYPE {family} " in live["text"]
        is_excused = selector.name in SHOWN_WHEN_IT_HAPPENS | ABSENT_WITHOUT_A_DEVICE
        assert selector.name in on_page or is_excused, f"{where}: no {selector.name} on the page"


def matchers():
    return [
        (selector.name, matcher)
        for _, query in QUERIES
        for selector in selectors(parse(query))
        for matcher in selector.matchers.matchers
    ]


def test_values_in_queries_can_occur(live):
    values = defaultdict(set)
    for family in live["families"].values():
        for sample in family.samples:
            for label, value in sample.labels.items():
                values[label].add(value)
    values["status"] |= STATUSES | {"healthy", "draining", "silent"}
    values["reason"] |= CODES
    values["job"].add("sie")
    asked = {(matcher.name, value) for _, matcher in matchers() for value in matcher.value.split("|") if value != ".*"}
    assert len(asked) > 5
    assert not {(label, value) for label, value in asked if value not in values[label]}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_legends_use_labels_of_their_query(panel, known):
    for target in panel["targets"]:
        used = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
        assert used == result_labels(parse(target["expr"]), known), target


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_is_whole_and_explained(rule, known):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    texts = " ".join(rule["annotations"][key] for key in ("summary", "description"))
    used = set(re.findall(r"\$labels\.(\w+)", texts))
    assert used <= result_labels(parse(rule["expr"]), known)
    assert f"`{rule['alert']}`" in (ROOT / "docs" / "monitoring.md").read_text()


def test_page_explains_no_alert_that_is_not_there():
    text = (ROOT / "docs" / "monitoring.md").read_text()
    assert set(re.findall(r"^\| `(Sie\w+)`", text, re.MULTILINE)) == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize(
    "counter", ["sie_worker_restarts_total", "sie_oom_terminal_failures_total", "sie_preemptions_total"]
)
def test_what_an_alert_waits_for_is_counted_from_zero(counter, live):
    """An increase is only seen by Prometheus when the series was there before it."""
    assert {value for (name, _), value in live["before"].items() if name == counter} == {0.0}


def test_dashboard_is_laid_out_without_overlap_and_its_variables_exist(known):
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    used = set(re.findall(r"\$(?:{)?([a-z]\w*)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == VARIABLES.keys()
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            selector, label = variable_query(variable)
            assert label in result_labels(parse(selector), known)


@pytest.mark.parametrize(
    "query",
    [
        "rate(sie_no_such_total[5m])",
        'sie_queue_depth{colour="red"}',
        "sum by (worker) (sie_queue_depth)",
        "rate(sie_queue_depth[5m])",
        "histogram_quantile(0.9, sum by (model) (rate(sie_batch_size_bucket[5m])))",
        "sum by (model) (sie_queue_depth) / sum(sie_queue_depth)",
    ],
)
def test_the_check_refuses(query, known):
    with pytest.raises(QueryError):
        result_labels(promql_parser.parse(query), known)
