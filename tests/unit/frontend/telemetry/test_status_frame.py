"""The `/ws/status` frame: every field of the reference in both spellings, from the counter pages of all processes."""

from __future__ import annotations

import json
import math

import pytest

from sie.frontend.telemetry.metrics import FrontendMetrics, merge
from sie.frontend.telemetry.status_frame import (
    GPU_STALE_AFTER_S,
    ServerFacts,
    StatusInputs,
    build_status,
    encode_frame,
    process_owner,
)
from sie.ipc.messages import ModelEntry, WorkerEntry
from sie.metrics import definitions
from sie.shm.pages import CounterPage
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed, to_wire
from sie.values.generate import GenerateRule

NOW_S = 1_700_000_100.0
FACTS = ServerFacts(name="host", version="1.2.3", pid=7, user="sie", working_dir="/srv")
GIB = 1 << 30


@pytest.fixture
def page():
    page = CounterPage.create(128 * 1024)
    yield page
    page.close()


def entry(name, state="loaded", **changes):
    card = ModelCard(id=name, kind="encoder", architecture="BertModel", dims={"dense": 384}, max_sequence_length=256)
    return ModelEntry(card=card, state=state, **changes)


def frame_of(page, *models, workers=(), facts=FACTS, now_s=NOW_S, **changes):
    facts_and_models = {"server": facts, "uptime_s": 61.5, "ready": True, "models": models, "workers": workers}
    inputs = StatusInputs(**(facts_and_models | changes), metrics=merge([page]))
    return json.loads(encode_frame(build_status(inputs, now_s)))


def write_gpu(page, index=0, *, utilization=63, used=20 * GIB, total=48 * GIB, up=1, sampled_s=NOW_S - 1, kind="l40s"):
    labels = definitions.GPU_UP.label_pairs(f"cuda:{index}", str(index), "NVIDIA L40S", kind, f"uuid-{index}")
    for family, value in (
        (definitions.GPU_UTILIZATION, utilization), (definitions.GPU_MEMORY_USED, used), (definitions.GPU_MEMORY_TOTAL, total),
        (definitions.GPU_TEMPERATURE, 61), (definitions.GPU_UP, up), (definitions.GPU_SAMPLED, sampled_s),
    ):  # fmt: skip
        page.gauge(family.name, labels).set(value)


def test_frame_has_every_field_of_the_reference(page):
    frame = frame_of(page, entry("m", device="cpu", memory_bytes=5))
    assert set(frame) >= {
        "timestamp", "ready", "name", "machine_profile", "pool_name", "gpu", "gpu_count", "bundle", "bundle_config_hash",
        "loaded_models", "max_batch_requests", "saturated", "server", "gpus", "models", "counters", "histograms",
    }  # fmt: skip
    assert frame["timestamp"] == NOW_S
    assert frame["name"] == "host"
    assert frame["max_batch_requests"] == 64
    assert frame["server"] == {"version": "1.2.3", "uptime_seconds": 61, "user": "sie", "working_dir": "/srv", "pid": 7}
    assert frame["models"][0]["config"] == {
        "hf_id": "m", "adapter": "BertModel", "inputs": ["text"], "outputs": ["dense"], "dims": {"dense": 384},
        "max_sequence_length": 256,
    }  # fmt: skip


def test_without_gpu_the_list_is_empty_and_the_model_names_its_cpu(page):
    frame = frame_of(page, entry("m", device="cpu"))
    assert (frame["gpus"], frame["gpu_count"], frame["gpu"], frame["machine_profile"]) == ([], 0, "", "")
    assert frame["models"][0]["device"] == "cpu"


def test_a_model_that_is_not_loaded_has_no_device(page):
    frame = frame_of(page, entry("m", state="available"))
    assert frame["models"][0]["device"] is None
    assert frame["loaded_models"] == []


def test_models_are_sorted_by_memory_descending(page):
    frame = frame_of(
        page, entry("small", memory_bytes=1), entry("none", state="available"), entry("big", memory_bytes=9)
    )
    assert [model["name"] for model in frame["models"]] == ["big", "small", "none"]
    assert frame["loaded_models"] == ["small", "big"]


def test_a_failed_model_says_why(page):
    frame = frame_of(page, entry("m", state="failed", error=to_wire(ModelLoadFailed("no config.json"))))
    assert frame["models"][0]["error"] == "no config.json"


@pytest.mark.parametrize(("share", "is_degraded"), [(0.0, False), (0.01, False), (0.011, True)])
def test_a_model_is_degraded_when_over_one_percent_of_its_values_are_not_finite(page, share, is_degraded):
    page.gauge(definitions.NON_FINITE_SHARE.name, definitions.NON_FINITE_SHARE.label_pairs("m")).set(share)
    first, other = frame_of(page, entry("m", memory_bytes=1), entry("n"))["models"]
    assert (first["degraded"], other["degraded"]) == (is_degraded, False)


def test_queue_depth_is_given_under_both_names(page):
    page.gauge(definitions.QUEUE_DEPTH.name, definitions.QUEUE_DEPTH.label_pairs("m")).set(11)
    model = frame_of(page, entry("m"))["models"][0]
    assert (model["queue_depth"], model["queue_pending_items"]) == (11, 11)


def test_a_model_that_generates_has_its_sequences_and_blocks_once(page):
    for family, value in (
        (definitions.SEQUENCES_RUNNING, 3), (definitions.SEQUENCES_WAITING, 2), (definitions.KV_BLOCKS_USED, 7),
        (definitions.KV_BLOCKS, 64),
    ):  # fmt: skip
        page.gauge(family.name, family.label_pairs("g")).set(value)
    page.histogram(
        definitions.FIRST_TOKEN.name, definitions.FIRST_TOKEN.label_pairs("g"), definitions.FIRST_TOKEN.bounds
    ).observe(0.2)
    cards = [ModelCard(id=name, kind="stub", generate=GenerateRule(context_length=64)) for name in ("g", "g:short")]
    frame = frame_of(page, entry("m"), *(ModelEntry(card=card, state="loaded") for card in cards))
    found = {model["name"]: model.get("generation") for model in frame["models"]}
    assert found == {
        "g": {"running": 3, "waiting": 2, "kv_blocks_used": 7, "kv_blocks": 64},
        "g:short": None, "m": None,
    }  # fmt: skip
    first_token = frame["histograms"]["sie_time_to_first_token_seconds"]["g"]
    assert dict(zip(first_token["buckets"], first_token["counts"], strict=True))[0.25] == 1


def test_gpu_has_both_spellings(page):
    write_gpu(page)
    frame = frame_of(page)
    (gpu,) = frame["gpus"]
    assert gpu == {
        "device": "cuda:0", "index": 0, "name": "NVIDIA L40S", "gpu_type": "l40s", "uuid": "uuid-0",
        "utilization_pct": 63, "utilization_percent": 63, "memory_used_bytes": 20 * GIB, "memory_total_bytes": 48 * GIB,
        "memory_threshold_pct": 95.0, "temperature_c": 61, "healthy": True, "stale": False,
    }  # fmt: skip
    assert (frame["gpu"], frame["gpu_count"], frame["machine_profile"]) == ("l40s", 1, "l40s")


def test_the_configured_machine_profile_wins_over_the_gpu(page):
    write_gpu(page)
    facts = ServerFacts(name="h", version="1", pid=1, machine_profile="l40s-spot")
    assert frame_of(page, facts=facts)["machine_profile"] == "l40s-spot"


def test_gpus_are_in_the_order_of_their_index(page):
    for index in (10, 2, 0):
        write_gpu(page, index)
    assert [gpu["index"] for gpu in frame_of(page)["gpus"]] == [0, 2, 10]


def test_what_a_mig_slice_does_not_report_is_null(page):
    write_gpu(page, utilization=math.nan)
    (gpu,) = frame_of(page)["gpus"]
    assert gpu["utilization_pct"] is None
    assert gpu["utilization_percent"] is None
    assert gpu["memory_used_bytes"] == 20 * GIB


def test_a_lost_gpu_is_listed_as_unhealthy(page):
    write_gpu(page, up=0, utilization=math.nan, used=math.nan)
    (gpu,) = frame_of(page)["gpus"]
    assert (gpu["healthy"], gpu["memory_used_bytes"], gpu["memory_total_bytes"]) == (False, None, 48 * GIB)


@pytest.mark.parametrize(("age_s", "stale"), [(GPU_STALE_AFTER_S - 0.5, False), (GPU_STALE_AFTER_S + 0.5, True)])
def test_an_old_gpu_sample_is_marked_stale(page, age_s, stale):
    write_gpu(page, sampled_s=NOW_S - age_s)
    assert frame_of(page)["gpus"][0]["stale"] is stale


def test_a_device_from_before_a_restart_is_not_listed(page):
    write_gpu(page, 3, total=0)
    assert frame_of(page)["gpus"] == []


def test_counters_are_by_model_and_without_the_suffix(page):
    metrics = FrontendMetrics(page, {"a", "b"})
    for model, endpoint, status in (
        ("a", "encode", "success"),
        ("a", "embeddings", "error"),
        ("b", "encode", "success"),
    ):
        metrics.record_request(model, endpoint, status, 0.004)
    page.counter(definitions.TOKENS_PROCESSED.name, definitions.TOKENS_PROCESSED.label_pairs("a")).add(128)
    frame = frame_of(page)
    counted = {name: by_model for name, by_model in frame["counters"].items() if by_model}
    assert counted == {"sie_requests": {"a": 2, "b": 1}, "sie_tokens_processed": {"a": 128}}
    assert "sie_idle_evictions" in frame["counters"], "it is there before the first one"
    assert frame["outcomes"] == {"success": 2, "error": 1}


def test_histograms_are_cumulative_without_infinity_and_of_the_total_phase(page):
    metrics = FrontendMetrics(page, {"m"})
    metrics.record_request("m", "encode", "success", 0.004, inference_s=0.002)
    metrics.record_request("m", "embeddings", "success", 0.3)
    metrics.record_request("m", "encode", "success", 99.0)
    durations = frame_of(page)["histograms"]["sie_request_duration_seconds"]["m"]
    assert durations["buckets"] == [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
    assert durations["counts"] == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_workers_carry_what_their_busy_share_is_made_of(page):
    labels = definitions.STEP_DURATION.label_pairs("1")
    steps = page.histogram(definitions.STEP_DURATION.name, labels, definitions.STEP_DURATION.bounds)
    tokens = page.histogram(definitions.STEP_TOKENS.name, labels, definitions.STEP_TOKENS.bounds)
    for seconds, num_tokens in ((0.25, 100), (0.5, 28)):
        steps.observe(seconds)
        tokens.observe(num_tokens)
    workers = (WorkerEntry(slot=1, device="cpu", pid=44, state="ready", restarts=2),)
    assert frame_of(page, workers=workers)["workers"] == [
        {
            "slot": 1, "device": "cpu", "pid": 44, "state": "ready", "restarts": 2, "busy_seconds": 0.75,
            "num_steps": 2, "num_tokens": 128,
        }
    ]  # fmt: skip


def test_not_ready_says_why(page):
    inputs = StatusInputs(server=FACTS, ready=False, models=(), workers=(), metrics=merge([page]), reason="loading m")
    frame = build_status(inputs, NOW_S)
    assert (frame["ready"], frame["reason"]) == (False, "loading m")


def test_a_wall_clock_that_is_set_does_not_change_the_uptime(page):
    frames = [frame_of(page, now_s=now_s, uptime_s=5.9) for now_s in (NOW_S - 3600, NOW_S + 3600)]
    assert [frame["server"]["uptime_seconds"] for frame in frames] == [5, 5]


def test_process_owner_names_a_user_and_a_directory():
    user, directory = process_owner()
    assert user
    assert directory.startswith("/")


def test_entries_of_a_model_s_profiles_show_its_memory_and_its_queue_once(page):
    for family, value in ((definitions.QUEUE_DEPTH, 3),):
        page.gauge(family.name, family.label_pairs("m")).set(value)
    frame = frame_of(page, entry("m:a", memory_bytes=5), entry("m:b", memory_bytes=5), entry("n", memory_bytes=4))
    shown = {model["name"]: (model["memory_bytes"], model["queue_depth"]) for model in frame["models"]}
    assert shown == {"m:a": (5, 3), "m:b": (0, 0), "n": (4, 0)}
    assert frame["loaded_models"] == ["m:a", "m:b", "n"]
    assert {model["config"]["hf_id"] for model in frame["models"]} == {"m", "n"}
