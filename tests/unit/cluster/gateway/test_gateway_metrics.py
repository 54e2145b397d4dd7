"""The metrics of a gateway: bounded labels, demand for autoscalers, and gauges that end with what they describe."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from sie.cluster.gateway.gateway_metrics import GatewayMetrics
from sie.cluster.gateway.host_directory import Directory, Host
from sie.cluster.gateway.requested_placement import Placement
from sie.cluster.payloads import VERSION, Beat, ModelBeat
from sie.cluster.pools import make_pool
from sie.cluster.subjects import Lane
from sie.shm.pages import CounterPage
from sie.values.errors import BadRequest, Overloaded, SieError, Unavailable
from sie.values.host_pool import PoolBody

MODELS = {"m": ModelBeat("loaded", is_served=True), "cold": ModelBeat("available", is_served=False)}


@pytest.fixture
def page() -> CounterPage:
    return CounterPage.create(1 << 16)


def metrics(page: CounterPage) -> GatewayMetrics:
    return GatewayMetrics(page, {"l4"}, {"m", "cold"})


def values(page: CounterPage, name: str) -> dict[tuple[str, ...], float]:
    found = {tuple(value for _, value in one.labels): one.value for one in page.records() if one.name == name}
    return {labels: value for labels, value in found.items() if not math.isnan(value)}


def host(name: str, **fields: Any) -> Host:
    return Host(Beat(VERSION, fields.pop("id", "id-" + name), name, "p", "l4", "b", "k", MODELS, **fields), 0.0)


def show(made: GatewayMetrics, *hosts: tuple[Host, str], by_lane: Counter[Lane] | None = None) -> None:
    pools = [make_pool(PoolBody(name, minimum_worker_count=2), None, 60, 0) for name in ("x", "y")]
    made.publish(hosts, pools, by_lane or Counter(), epoch=3, is_connected=True)


def end(made: GatewayMetrics, error: SieError | None = None, profile: str = "l4") -> None:
    made.record_end("encode", Placement("p", profile), error, 0.01)


def test_requests_are_counted_by_outcome_and_wanted_profile(page: CounterPage):
    made = metrics(page)
    end(made)
    end(made, BadRequest("no"))
    end(made, profile="")
    assert values(page, "sie_gateway_requests_total") == {
        ("encode", "success", "l4"): 1, ("encode", "error", "l4"): 1, ("encode", "success", "any"): 1,
    }  # fmt: skip


def test_only_refusals_for_want_of_capacity_are_rejections(page: CounterPage):
    made = metrics(page)
    end(made, BadRequest("no"))
    end(made, Overloaded("full"))
    assert values(page, "sie_gateway_rejected_requests_total") == {("l4", "any", "QUEUE_FULL"): 1}


def test_a_profile_that_nobody_knows_is_no_label_of_its_own(page: CounterPage):
    made = metrics(page)
    for number in range(100):
        end(made, profile=f"made-up-{number}")
    assert values(page, "sie_gateway_requests_total") == {("encode", "success", "other"): 100}


def test_demand_is_what_waits_and_what_found_no_host_within_a_minute(page: CounterPage):
    now_s = 100.0
    made = GatewayMetrics(page, {"l4"}, {"m"}, lambda: now_s)
    end(made, Unavailable("none", code="PROVISIONING"))
    waiting = Counter({Lane("p", "l4", "b"): 3, Lane("p", "l4", "b", "x"): 1})
    show(made, by_lane=waiting)
    assert values(page, "sie_gateway_pending_demand") == {("l4", "b"): 4, ("l4", "any"): 1}
    assert values(page, "sie_gateway_provisioning_responses_total") == {("l4",): 1}
    now_s = 161.0
    show(made, by_lane=waiting)
    assert values(page, "sie_gateway_pending_demand") == {("l4", "b"): 4}


def test_a_flood_of_refused_requests_is_not_kept_whole(page: CounterPage):
    made = metrics(page)
    for _ in range(10_003):
        end(made, Unavailable("none", code="PROVISIONING"))
    show(made)
    assert values(page, "sie_gateway_pending_demand") == {("l4", "any"): 10_000}


def test_the_cluster_is_shown_as_its_heartbeats_say(page: CounterPage):
    show(
        metrics(page), (host("one", num_running=3, memory_used_bytes=7, num_gpus=4, lease="x"), "healthy"),
        (host("two", num_running=1, lease="y"), "draining"), (host("lost", num_running=9), "silent"),
    )  # fmt: skip
    assert values(page, "sie_gateway_workers") == {("healthy",): 1, ("draining",): 1, ("silent",): 1}
    assert values(page, "sie_gateway_worker_queue_depth") == {("one", "l4", "b"): 3, ("two", "l4", "b"): 1}
    assert values(page, "sie_gateway_worker_memory_used_bytes") == {("one", "l4", "b"): 7, ("two", "l4", "b"): 0}
    assert values(page, "sie_gateway_model_workers") == {("m",): 2}
    assert values(page, "sie_gateway_active_lease_gpus") == {(): 5}
    assert values(page, "sie_gateway_pool_warm_floor") == {("default",): 4}
    assert (values(page, "sie_gateway_config_epoch"), values(page, "sie_gateway_nats_connected")) == ({(): 3}, {(): 1})


def test_hosts_without_a_name_share_a_label_and_a_host_that_is_gone_has_none(page: CounterPage):
    made = metrics(page)
    show(made, *((host(name, id=name, num_running=2), "healthy") for name in ("a", "b")))
    assert values(page, "sie_gateway_worker_queue_depth") == {("unnamed", "l4", "b"): 4}
    show(made)
    assert values(page, "sie_gateway_worker_queue_depth") == {}


def test_a_host_that_has_left_is_not_silent():
    directory = Directory()
    for name, is_draining in (("left", True), ("lost", False)):
        directory.hear(Beat(VERSION, name, name, "p", "l4", "b", "k", {}, is_draining=is_draining), 0.0)
    assert [(one.beat.host, status) for one, status in directory.statuses(5.0)] == [("lost", "silent")]
    assert {status for _, status in directory.statuses(1.0)} == {"draining", "healthy"}


def test_dead_letters_are_counted_from_zero(page: CounterPage):
    made, lane = metrics(page), Lane("p", "l4", "b")
    made.record_items(lane, "m", 2)
    assert values(page, "sie_gateway_dlq_events_total") == {("SIE_DEAD_p", "l4~b~m"): 0}
    made.record_dead(lane, "m")
    assert values(page, "sie_gateway_dlq_events_total") == {("SIE_DEAD_p", "l4~b~m"): 1}
