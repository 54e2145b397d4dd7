"""The server's reports about itself, field by field: the list of models, the status feed, the metrics.

Source: SIE API reference, section 14. The server has a profile, an adapter, a model that failed and one that was unloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sie_sdk import SIEClient

from tests.process.harness import Server, eventually, start_server
from tests.process.watchers import next_frame, watch
from tests.process.wire import encode, families, get, post_json, total

CATALOG = """
[models."stub/all".profiles.default]
[models."stub/all".profiles.sparse.options]
output_types = ["sparse"]
[models."stub/only".profiles.toned.options]
lora_id = "tone"
"""
ENTRIES = ["stub/all", "stub/all:sparse", "stub/only:toned", "stub/big", "stub/idle"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog: Path = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(CATALOG)
    with start_server(
        "--catalog", str(catalog),
        "--model", "stub/all=stub:dense=16,sparse=50,multivector=8,score,extract,image,memory_mb=20,oom_tokens=8",
        "--model", "stub/only=stub:dense=16,max_tokens=32,memory_mb=40",
        "--lazy-model", "stub/big=stub:memory_mb=300",
        "--lazy-model", "stub/idle=stub:",
        "--lora", "stub/only=tone=stub:",
        "--lora", "stub/only=other=stub:",
        "--max-model-bytes", str(200 * MIB),
        "--idle-unload-s", "0.2",
        "--server-name", "here",
        "--pool-name", "pool",
        "--bundle", "bundle",
        "--frontends", "1",
    ) as running:  # fmt: skip
        encode(running.port, "stub/big", ["x"])
        eventually(lambda: model(running, "stub/big")["state"] == "failed", "its load was refused")
        eventually(lambda: encode(running.port, "stub/idle", ["x"]).status == 200, "it was loaded")
        eventually(lambda: model(running, "stub/idle")["state"] == "available", "nobody used it")
        eventually(lambda: encode(running.port, "stub/only:toned", ["x"]).status == 200, "the adapter was loaded")
        assert encode(running.port, "stub/all", ["x" * 20, "x" * 20]).status == 200, "a step that was split"
        yield running


def model(server: Server, name: str) -> dict[str, Any]:
    return get(server.port, f"/v1/models/{name}").json()


# --- /v1/models -------------------------------------------------------------------------------------------------------

KEYS = {
    "name": str, "inputs": list, "outputs": list, "dims": dict, "loaded": bool, "max_sequence_length": int,
    "profiles": dict, "state": str, "routing": dict,
}  # fmt: skip
NULLABLE = {"last_error", "revision", "capabilities"}
PROFILE_KEYS = {
    "is_default", "output_types", "output_similarity", "identity", "remote_contract_sha256", "remote_execution_sha256",
    "runtime_instance_id",
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_model_has_every_field(server: Server, name: str) -> None:
    info = model(server, name)
    assert info["name"] == name
    assert info == next(other for other in get(server.port, "/v1/models").json()["models"] if other["name"] == name)
    for key, kind in KEYS.items():
        assert type(info[key]) is kind, key
    assert info.keys() >= NULLABLE
    assert info["loaded"] == (info["state"] == "loaded")
    assert info["routing"] == {"policy": None, "upstream_kind": None}
    assert (info["capabilities"], info["revision"]) == (None, None)
    for profile, facts in info["profiles"].items():
        assert facts.keys() == PROFILE_KEYS
        assert facts["is_default"] == (profile == "default")


def test_model_tells_what_it_takes_and_gives(server: Server) -> None:
    info = model(server, "stub/all")
    assert info["inputs"] == ["text", "image"]
    assert info["outputs"] == ["dense", "sparse", "multivector", "score", "json"]
    assert info["dims"] == {"dense": 16, "sparse": 50, "multivector": 8}
    assert model(server, "stub/only:toned")["max_sequence_length"] == 32
    metrics = {"dense": "cosine", "sparse": "dot", "multivector": "maxsim"}
    assert info["profiles"]["default"]["output_similarity"] == metrics
    assert model(server, "stub/all:sparse")["profiles"]["default"]["output_similarity"] == {"sparse": "dot"}


def test_profiles_are_listed_with_the_model_and_as_entries(server: Server) -> None:
    listed = [info["name"] for info in get(server.port, "/v1/models").json()["models"]]
    assert listed == ENTRIES
    assert list(model(server, "stub/all")["profiles"]) == ["default", "sparse"]
    entry = model(server, "stub/all:sparse")
    assert list(entry["profiles"]) == ["default"]
    assert entry["profiles"]["default"]["output_types"] == ["sparse"]
    assert list(model(server, "stub/only:toned")["profiles"]) == ["default"]


def test_states_errors_and_adapters_are_shown(server: Server) -> None:
    states = {name: model(server, name)["state"] for name in ENTRIES}
    assert states == {
        "stub/all": "loaded", "stub/all:sparse": "loaded", "stub/only:toned": "loaded", "stub/big": "failed",
        "stub/idle": "available",
    }  # fmt: skip
    failed = model(server, "stub/big")["last_error"]
    assert failed.keys() == {"code", "message", "attempts", "permanent"}
    assert (failed["code"], failed["attempts"], failed["permanent"]) == ("MODEL_LOAD_FAILED", 1, False)
    assert model(server, "stub/all")["last_error"] is None
    assert model(server, "stub/only:toned")["loras"] == [
        {"id": "tone", "state": "loaded"}, {"id": "other", "state": "available"},
    ]  # fmt: skip


def test_list_is_also_openais(server: Server) -> None:
    body = get(server.port, "/v1/models").json()
    assert body.keys() == {"object", "data", "has_more", "first_id", "last_id", "models"}
    assert [info["id"] for info in body["data"]] == ENTRIES
    assert body["models"] == body["data"], "no default here, so both are the same"


def test_unknown_model_is_told_in_both_envelopes(server: Server) -> None:
    response = get(server.port, "/v1/models/stub/al")
    assert response.status == 404
    body = response.json()
    assert body["detail"]["code"] == "MODEL_NOT_FOUND"
    assert body["detail"]["message"].startswith("Model 'stub/al' not found Did you mean 'stub/all'")
    assert body["error"]["code"] == "model_not_found"


# --- /ws/status -------------------------------------------------------------------------------------------------------

FRAME: dict[str, type | tuple[type, ...]] = {
    "timestamp": float, "ready": bool, "name": str, "machine_profile": str, "pool_name": str, "gpu": str,
    "gpu_count": int, "bundle": str, "bundle_config_hash": str, "loaded_models": list, "max_batch_requests": int,
    "saturated": bool, "server": dict, "gpus": list, "models": list, "counters": dict, "histograms": dict,
}  # fmt: skip
MODEL: dict[str, type | tuple[type, ...]] = {
    "name": str, "state": str, "device": (str, type(None)), "memory_bytes": int, "config": dict, "queue_depth": int,
    "queue_pending_items": int,
}  # fmt: skip
COUNTERS = {
    "sie_requests", "sie_tokens_processed", "sie_model_busy_seconds", "sie_non_finite", "sie_oom_recoveries_attempted",
    "sie_oom_recoveries_succeeded", "sie_oom_terminal_failures", "sie_oom_cache_clears", "sie_oom_evictions_triggered",
    "sie_oom_batch_splits", "sie_idle_evictions", "sie_pressure_evictions", "sie_preemptions", "sie_prefix_cache_evictions",
    "sie_prefix_cache_hits", "sie_prefix_cache_lookups", "sie_prompt_tokens", "sie_generated_tokens",
    "sie_sequences_completed", "sie_truncated_items", "sie_worker_items",
}  # fmt: skip


@pytest.fixture(scope="module")
def frame(server: Server) -> dict[str, Any]:
    """Return a frame behind which everything is counted: a worker does so when it has answered."""
    counts = {
        "sie_tokens_processed": "stub/all",
        "sie_idle_evictions": "stub/idle",
        "sie_oom_recoveries_succeeded": "stub/all",
        "sie_oom_batch_splits": "stub/all",
        "sie_model_busy_seconds": "stub/all",
        "sie_requests": "stub/all",
    }
    with watch(server) as feed:

        def counted() -> dict[str, Any] | None:
            found = next_frame(feed)
            return found if all(found["counters"][name].get(model) for name, model in counts.items()) else None

        return eventually(counted, "a frame that counts what was done")


def test_frame_has_every_field_of_its_type(frame: dict[str, Any]) -> None:
    for key, kind in FRAME.items():
        assert isinstance(frame[key], kind), key
    assert (frame["name"], frame["pool_name"], frame["bundle"]) == ("here", "pool", "bundle")
    assert frame["server"].keys() >= {"version", "uptime_seconds", "user", "working_dir", "pid"}
    assert (frame["gpus"], frame["gpu_count"], frame["machine_profile"]) == ([], 0, "")
    assert frame["loaded_models"] == ["stub/all", "stub/all:sparse", "stub/only:toned"]


def test_frame_lists_models_by_memory(frame: dict[str, Any]) -> None:
    memory = [entry["memory_bytes"] for entry in frame["models"]]
    assert memory == sorted(memory, reverse=True)
    assert memory[:2] == [40 * MIB, 20 * MIB]
    for entry in frame["models"]:
        for key, kind in MODEL.items():
            assert isinstance(entry[key], kind), key
        assert entry["config"].keys() == {"hf_id", "adapter", "inputs", "outputs", "dims", "max_sequence_length"}
    by_name = {entry["name"]: entry for entry in frame["models"]}
    assert by_name["stub/only:toned"]["loras"] == {"tone": "loaded", "other": "available"}
    assert (by_name["stub/big"]["state"], by_name["stub/idle"]["device"]) == ("failed", None)


def test_frame_counts_by_model(frame: dict[str, Any]) -> None:
    assert frame["counters"].keys() == COUNTERS
    counters = frame["counters"]
    assert counters["sie_requests"]["stub/all"] == 1
    assert counters["sie_tokens_processed"]["stub/all"] == 10
    for name, only in (
        ("sie_idle_evictions", "stub/idle"),
        ("sie_oom_batch_splits", "stub/all"),
        ("sie_oom_recoveries_succeeded", "stub/all"),
    ):
        assert {entry for entry, count in counters[name].items() if count} == {only}
    assert (counters["sie_oom_batch_splits"]["stub/all"], counters["sie_oom_recoveries_succeeded"]["stub/all"]) == (
        1,
        1,
    )
    assert counters["sie_model_busy_seconds"]["stub/all"] > 0
    for name in ("sie_request_duration_seconds", "sie_batch_size"):
        histogram = frame["histograms"][name]["stub/all"]
        assert len(histogram["buckets"]) == len(histogram["counts"])


def test_sdk_reads_list_and_feed(server: Server) -> None:
    with SIEClient(server.url) as client:
        assert [info["name"] for info in client.list_models()] == ENTRIES
        assert client.get_model("stub/all:sparse")["state"] == "loaded"
        frames = client.watch()
        assert next(frames)["loaded_models"]
        frames.close()


# --- /metrics ---------------------------------------------------------------------------------------------------------

COUNTED_BY_MODEL = [
    "sie_oom_recoveries_attempted", "sie_oom_recoveries_succeeded", "sie_oom_terminal_failures", "sie_oom_cache_clears",
    "sie_oom_evictions_triggered", "sie_oom_batch_splits", "sie_idle_evictions",
]  # fmt: skip


@pytest.mark.parametrize("name", COUNTED_BY_MODEL)
def test_family_of_recoveries_counts_by_model(server: Server, name: str) -> None:
    family = families(server.port)[name]
    assert family.type == "counter"
    assert all(sample.labels.keys() == {"model"} for sample in family.samples)


def test_gauges_follow_loads_and_unloads(server: Server) -> None:
    assert total(server.port, "sie_model_loaded", model="stub/all", device="cpu") == 1
    eventually(
        lambda: total(server.port, "sie_model_loaded", model="stub/idle", device="cpu") == 0, "its unload is shown"
    )
    assert total(server.port, "sie_model_memory_bytes", model="stub/only", device="cpu") == 40 * MIB
    assert total(server.port, "sie_idle_evictions_total", model="stub/idle") >= 1, "twice, if its first answer was late"
    assert total(server.port, "sie_loras_loaded", model="stub/only") == 1


def test_requests_are_counted_by_entry_endpoint_and_outcome(server: Server) -> None:
    """`/v1/rerank` is counted as score."""
    asked = [
        ("encode", "/v1/encode/stub/all:sparse", {"items": [{"text": "x"}]}),
        ("score", "/v1/score/stub/all", {"query": {"text": "x"}, "items": [{"text": "x"}]}),
        ("extract", "/v1/extract/stub/all", {"items": [{"text": "x"}]}),
        ("embeddings", "/v1/embeddings", {"model": "stub/only:toned", "input": "x"}),
    ]
    for endpoint, path, body in asked:
        name = path.rpartition("/v1/")[2].partition("/")[2] or body["model"]
        labels = {"model": name, "endpoint": endpoint, "status": "success"}
        before = total(server.port, "sie_requests_total", **labels)
        assert post_json(server.port, path, body).status == 200
        eventually(lambda: total(server.port, "sie_requests_total", **labels) == before + 1, f"{labels}")  # noqa: B023


@pytest.mark.parametrize(
    ("endpoint", "path", "body", "model"),
    [
        ("embeddings", "/v1/embeddings", {"model": "stub/only:toned", "input": 3}, "stub/only:toned"),
        ("embeddings", "/v1/embeddings", {"model": "stub/all:default", "input": []}, "stub/all"),
        ("embeddings", "/v1/embeddings", {"model": "made up", "input": 3}, "unknown"),
        ("score", "/v1/rerank", {"model": "stub/all", "query": 3}, "stub/all"),
        ("score", "/v1/rerank", {"query": 3}, "stub/all"),
    ],
)  # fmt: skip
def test_a_bad_field_is_counted_for_the_model_of_its_body(
    server: Server, endpoint: str, path: str, body: dict[str, Any], model: str
) -> None:
    labels = {"model": model, "endpoint": endpoint, "status": "error"}
    before = total(server.port, "sie_requests_total", **labels)
    assert post_json(server.port, path, body).status in {400, 422}
    eventually(lambda: total(server.port, "sie_requests_total", **labels) == before + 1, "the error is counted")


@pytest.mark.parametrize("operation", ["encode", "score", "extract"])
def test_a_body_that_cannot_be_read_is_counted_for_the_model_of_its_path(server: Server, operation: str) -> None:
    labels = {"model": "stub/all", "endpoint": operation, "status": "error"}
    before = total(server.port, "sie_requests_total", **labels)
    assert post_json(server.port, f"/v1/{operation}/stub/all", {"items": []}).status == 400
    eventually(lambda: total(server.port, "sie_requests_total", **labels) == before + 1, "the error is counted")
