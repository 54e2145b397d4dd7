"""A gateway before one host, over a real NATS: clients cannot tell it from the host itself."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from sie_sdk import SIEClient
from sie_sdk.client.errors import ProvisioningError, RequestError

from tests.conftest import MINILM
from tests.process.browser import find_browser, open_page
from tests.process.harness import EX_CONFIG, Server, eventually, run_to_end
from tests.process.nats_harness import Nats, start_gateway, start_host, start_nats, wait_for_hosts
from tests.process.watchers import next_frame, watch
from tests.process.wire import Response, connect, encode, get, post_json, raw_request, samples, send_raw, to_array

BROWSER = find_browser()
LIMITS = ("--max-body-bytes", "8388608", "--max-item-text-bytes", "8388608", "--max-items", "64")
MODELS = (
    "--model", "stub/a=stub:dense=16,sparse=64,multivector=8,score", "--model", "text=stub:generate,max_tokens=4096",
    "--model", "slow=stub:generate,max_tokens=8192,latency_ms=30", "--model", "find=stub:extract", "--lazy-model", "stub/lazy=stub:dense=16,load_ms=300",
    "--model", "wide=stub:dense=16,multivector=4096", "--model", "stub/poison=stub:dense=16,kill_on=poison",
)  # fmt: skip


@pytest.fixture(scope="module")
def nats() -> Iterator[Nats]:
    with start_nats() as running:
        yield running


@pytest.fixture(scope="module")
def host(nats: Nats, minilm_directory: Path) -> Iterator[Server]:
    with start_host(
        nats.url, *MODELS, "--model", f"{MINILM}={minilm_directory}", "--dtype", "float32", "--test",
        "--machine-profile", "L4", "--bundle", "small", "--weights-root", str(minilm_directory.parent), *LIMITS,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def gateway(nats: Nats, host: Server) -> Iterator[Server]:
    with start_gateway(nats.url, "--provided-profile", "h100", *LIMITS) as running:
        wait_for_hosts(running, 1, "stub/a", "text", "find", MINILM)
        yield running


def both(gateway: Server, host: Server, path: str, body: Any, **headers: str) -> tuple[Response, Response]:
    """Return the answers of a gateway and of its host to the same request."""
    data = json.dumps(body).encode()
    sent = {"content-type": "application/json", "accept": "application/json", **headers}
    first, second = (send_raw(server.port, raw_request(path, data, sent)) for server in (gateway, host))
    return first, second


def plain(response: Response) -> Any:
    """Return an answer without what differs between any two answers of one server."""
    answer = response.json()
    for name in ("timing", "id", "created"):
        answer.pop(name, None)
    usage = answer.get("usage")
    if isinstance(usage, dict):
        answer["usage"] = {name: value for name, value in usage.items() if not name.endswith(("_sec", "_time_sec"))}
    return answer


SAME = {
    "encode": ("/v1/encode/stub/a", {"items": [{"text": "one", "id": "x"}, {"text": ""}, {"text": "three " * 9}]}),
    "all outputs": (
        "/v1/encode/stub/a",
        {
            "items": [{"text": "one"}, {"text": "two three"}],
            "params": {"output_types": ["dense", "sparse", "multivector"]},
        },
    ),
    "float16": ("/v1/encode/stub/a", {"items": [{"text": "one"}] * 2, "params": {"output_dtype": "float16"}}),
    "minilm": (f"/v1/encode/{MINILM}", {"items": [{"text": "a cat"}, {"text": "a dog and more words"}]}),
    "score": ("/v1/score/stub/a", {"query": {"text": "q"}, "items": [{"text": "a", "id": "1"}, {"text": "bb"}]}),
    "extract": (
        "/v1/extract/find",
        {"items": [{"text": "Ann met Bob"}, {"text": "nobody"}], "params": {"labels": ["x"]}},
    ),
    "embeddings": ("/v1/embeddings", {"model": MINILM, "input": ["a", "b c"]}),
    "base64": ("/v1/embeddings", {"model": MINILM, "input": "a", "encoding_format": "base64"}),
    "rerank": ("/v1/rerank", {"model": "stub/a", "query": "q", "documents": ["a", "bb"], "return_documents": True}),
    "chat": ("/v1/chat/completions", {"model": "text", "messages": [{"role": "user", "content": "hello"}], "seed": 3}),
    "two choices": (
        "/v1/completions",
        {"model": "text", "prompt": ["one", "two"], "n": 2, "max_tokens": 4, "echo": True},
    ),
    "unknown model": ("/v1/encode/nope", {"items": [{"text": "a"}]}),
    "wrong type": ("/v1/encode/stub/a", {"items": [{"text": 1}]}),
    "no such output": ("/v1/encode/find", {"items": [{"text": "a"}]}),
    "too many items": ("/v1/encode/stub/a", {"items": [{"text": "a"}] * 65}),
    "cut": (
        f"/v1/encode/{MINILM}",
        {"items": [{"text": "a"}, {"text": "b " * 900}], "params": {"options": {"overflow_policy": "error"}}},
    ),
    "no text model": ("/v1/chat/completions", {"model": "stub/a", "messages": [{"role": "user", "content": "x"}]}),
    "too many tokens": ("/v1/completions", {"model": "text", "prompt": "x " * 9000, "max_tokens": 1}),
    "a prompt over a mebibyte": ("/v1/completions", {"model": "text", "prompt": "x" * 1_100_000, "max_tokens": 1}),
}


@pytest.mark.parametrize("name", SAME)
def test_an_answer_equals_the_hosts_own(gateway: Server, host: Server, name: str):
    mine, own = both(gateway, host, *SAME[name])
    assert (mine.status, plain(mine)) == (own.status, plain(own))
    ignored = {"date", "content-length", "x-request-id", "x-sie-runtime-instance"}
    shown = [
        {key for key in answer.headers if key not in ignored and key != "x-postprocessing-time"}
        for answer in (mine, own)
    ]
    assert shown[0] == shown[1]
    assert mine.headers.get("x-sie-truncated") == own.headers.get("x-sie-truncated")


def test_a_truncated_item_keeps_its_number(gateway: Server, host: Server):
    mine, own = both(gateway, host, f"/v1/encode/{MINILM}", {"items": [{"text": "a"}, {"text": "b " * 900}]})
    assert mine.headers["x-sie-truncated"] == own.headers["x-sie-truncated"] == "1"


def test_a_payload_over_a_mebibyte_goes_by_reference_both_ways(gateway: Server, host: Server):
    large = encode(gateway.port, "stub/a", ["word " * 300_000, "short"])
    assert large.unpack()["items"] == encode(host.port, "stub/a", ["word " * 300_000, "short"]).unpack()["items"]
    texts = ["x" * 400, "y" * 404]  # about a hundred tokens each, with vectors of 16 KB
    answers = [encode(server.port, "wide", texts, output_types=["multivector"]) for server in (gateway, host)]
    rows = [[to_array(item["multivector"]["values"]) for item in answer.unpack()["items"]] for answer in answers]
    assert [row.nbytes > 1 << 20 for row in rows[0]] == [True, True]
    for mine, own in zip(*rows, strict=True):
        np.testing.assert_array_equal(mine, own)


def test_a_stream_has_the_hosts_events_in_order(gateway: Server, host: Server):
    body = {"model": "text", "messages": [{"role": "user", "content": "hello"}], "stream": True, "seed": 1}
    deltas = []
    for answer in both(gateway, host, "/v1/chat/completions", body):
        events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line.startswith(b"data")]
        assert events[-1] == b"[DONE]"
        deltas.append([json.loads(event)["choices"][0]["delta"] for event in events[:-1]])
    assert deltas[0] == deltas[1]
    assert len(deltas[0]) > 5


def test_a_client_that_leaves_ends_the_generation_on_its_host(gateway: Server, host: Server):
    body = json.dumps({"model": "slow", "prompt": "x" * 3000, "max_tokens": 3000, "stream": True}).encode()
    with connect(gateway.port) as sock:
        sock.sendall(raw_request("/v1/completions", body, {"content-type": "application/json"}))
        eventually(lambda: running_texts(gateway) == 1, "an answer under way")
    eventually(lambda: running_texts(gateway) == 0, "its end")


def running_texts(gateway: Server) -> int | None:
    """Return how many answers the host's latest heartbeat counts, or None while the host is silent."""
    workers = get(gateway.port, "/health").json()["workers"]
    return workers[0]["active_generations"] if workers else None


def heard_host(gateway: Server) -> dict[str, Any]:
    """Return what a gateway shows of its only host, which is there while its heartbeats are in time."""
    (worker,) = eventually(lambda: get(gateway.port, "/health").json()["workers"], "a heartbeat")
    return worker


def test_a_cold_model_is_loaded_at_its_first_request(gateway: Server):
    first = encode(gateway.port, "stub/lazy", ["a"])
    assert (first.status, first.code(), first.headers["retry-after"]) == (503, "MODEL_LOADING", "5")
    eventually(lambda: encode(gateway.port, "stub/lazy", ["a"]).status == 200, "the model is loaded")


def test_a_model_that_another_pool_serves_is_loaded_in_the_pool_that_a_client_wants(nats: Nats, gateway: Server):
    lazy = ("--lazy-model", "stub/a=stub:dense=16,load_ms=300", "--lazy-model", "text=stub:generate,load_ms=300")
    chat = {"model": "text", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with start_host(nats.url, "--pool", "cold", *lazy):
        eventually(lambda: get(gateway.port, "/health").json()["cluster"]["worker_count"] == 2, "the other host")
        there = {"content-type": "application/json", "x-sie-pool": "cold"}
        native = raw_request(
            "/v1/encode/stub/a", b'{"items": [{"text": "x"}]}', {**there, "accept": "application/json"}
        )
        first = send_raw(gateway.port, native)
        assert (first.status, first.code(), first.headers["retry-after"]) == (503, "MODEL_LOADING", "5")
        for path, body in (("/v1/embeddings", {"model": "stub/a", "input": "x"}), ("/v1/chat/completions", chat)):
            assert send_raw(gateway.port, raw_request(path, json.dumps(body).encode(), there)).status == 200
        assert send_raw(gateway.port, native).status == 200
    wait_for_hosts(gateway, 1)


def test_the_unmodified_sdk_waits_and_encodes(gateway: Server, host: Server):
    with SIEClient(gateway.url) as mine, SIEClient(host.url) as own:
        texts = [{"text": "one"}, {"text": "two", "id": "2"}]
        for found, wanted in zip(mine.encode(MINILM, texts), own.encode(MINILM, texts), strict=True):
            np.testing.assert_array_equal(found["dense"], wanted["dense"])
        scores = mine.score("stub/a", {"text": "q"}, texts)
        assert scores["scores"] == own.score("stub/a", {"text": "q"}, texts)["scores"]
        assert mine.extract("find", texts[0], labels=["x"]) is not None
        assert mine.encode("stub/a", {"text": "x"}, gpu="l4")["dense"].shape == (16,)
        eventually(lambda: mine.get_capacity()["worker_count"] == 1, "a heartbeat")
        assert mine.get_capacity(gpu="h100")["worker_count"] == 0
        with pytest.raises(ProvisioningError):
            mine.encode("stub/a", {"text": "x"}, gpu="h100", wait_for_capacity=False)
        with pytest.raises(RequestError, match="not found"):
            mine.encode("nope", {"text": "x"})


def test_the_openai_client_embeds_and_streams(gateway: Server):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model=MINILM, input=["a", "b"])
        assert [len(row.embedding) for row in answer.data] == [384, 384]
        parts = client.chat.completions.create(
            model="text", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        assert "hello" in "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def test_the_anthropic_client_asks_and_streams(gateway: Server, host: Server):
    asked: Any = {"model": "text", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
    texts = []
    for server in (gateway, host):
        with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
            answer = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = "".join(stream.text_stream)
            counted = client.messages.count_tokens(model="text", messages=asked["messages"]).input_tokens
            texts.append((answer.content[0].text, streamed, counted, answer.usage.output_tokens, answer.stop_reason))
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(**{**asked, "model": "nope"})
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] != ""


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/models/stub/a/infer"),
        ("GET", "/api/status"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/models/load"),
        ("GET", "/v1/files/file_x"),
        ("POST", "/v1/skills"),
        ("DELETE", "/v1/sessions/x"),
    ],
)
def test_what_a_gateway_does_not_serve_is_refused_by_name(gateway: Server, method: str, path: str):
    answer = send_raw(gateway.port, raw_request(path, b"{}", {"content-type": "application/json"}, method=method))
    assert answer.status == (400 if path.startswith("/api") else 501)  # that API has only its own statuses
    assert "A gateway does not serve" in answer.headers.get("nv-status", answer.body.decode())


def test_a_gateway_keeps_no_sessions(gateway: Server):
    body = {"model": "text", "messages": [{"role": "user", "content": "x"}], "session_id": "mine"}
    answer = post_json(gateway.port, "/v1/chat/completions", body)
    assert answer.status == 400
    assert "session_id" in answer.body.decode()


def test_a_gateway_names_no_switch_of_its_own_for_tools(gateway: Server):
    body = {"model": "text", "messages": [{"role": "user", "content": "x"}], "enable_shell": True}
    answer = post_json(gateway.port, "/v1/chat/completions", body)
    assert answer.status == 400
    expected = "Field 'enable_shell' asks for tools, which a gateway does not run; ask a host itself"
    assert answer.json()["error"]["message"] == expected


def test_health_says_gateway(gateway: Server):
    # A host whose heartbeat is late is not among those of this moment.
    health = eventually(lambda: (one := get(gateway.port, "/health").json())["workers"] and one, "a heartbeat")
    assert (health["type"], health["status"]) == ("gateway", "healthy")
    assert health["live_gpu_types"] == ["l4"]
    ready = {"status": "ready", "healthy_workers": 1}
    eventually(lambda: get(gateway.port, "/readyz").json() == ready, "a heartbeat")
    assert get(gateway.port, "/healthz").json() == {"status": "ok"}


def test_the_docs_of_a_gateway_have_the_routes_of_a_cluster(gateway: Server, host: Server):
    pages = {server: get(server.port, "/docs").body for server in (gateway, host)}
    assert {server: b'id="post_v1_pools"' in page for server, page in pages.items()} == {gateway: True, host: False}


def test_the_cluster_is_watched_each_second(gateway: Server):
    with watch(gateway, "/ws/cluster-status") as watcher:
        first = next_frame(watcher)
        # Without its host where a heartbeat is late.
        frame = eventually(lambda: (one := next_frame(watcher))["workers"] and one, "a frame")
    assert first["timestamp"] < frame["timestamp"]
    (worker,) = frame["workers"]
    assert "stub/a" in worker["loaded_models"]
    assert frame["cluster"]["worker_count"] == 1
    assert {model["name"] for model in frame["models"]} >= {"stub/a", "stub/lazy", MINILM}


def test_metrics_of_a_gateway_and_its_host(gateway: Server, host: Server):
    before = samples(gateway.port)
    assert encode(gateway.port, "stub/a", ["one", "two"]).status == 200
    refused = post_json(
        gateway.port, "/v1/encode/stub/a", {"items": [{"text": "a"}]}, {"x-sie-machine-profile": "H100"}
    )
    assert refused.code() == "PROVISIONING"

    def grew(now: dict[Any, float], name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return now.get(key, 0.0) - before.get(key, 0.0)

    def counted() -> dict[Any, float] | None:  # an answer is on its way before it is counted
        now = samples(gateway.port)
        is_counted = (
            grew(now, "sie_gateway_requests_total", endpoint="encode", status="success", machine_profile="any"),
            grew(now, "sie_gateway_provisioning_responses_total", machine_profile="h100"),
            grew(now, "sie_gateway_queue_publish_seconds_count", operation="encode"),
        )
        return now if all(is_counted) else None

    now = eventually(counted, "all are counted")
    assert grew(now, "sie_gateway_requests_total", endpoint="encode", status="success", machine_profile="any") == 1
    assert grew(now, "sie_gateway_provisioning_responses_total", machine_profile="h100") == 1
    assert grew(now, "sie_gateway_queue_publish_seconds_count", operation="encode") == 1
    assert grew(now, "sie_gateway_queue_items_published_sum") == 1
    demand = ("sie_gateway_pending_demand", (("bundle", "any"), ("machine_profile", "h100")))
    eventually(lambda: samples(gateway.port).get(demand, 0.0) >= 1, "the demand for an H100")
    healthy = ("sie_gateway_workers", (("status", "healthy"),))
    eventually(lambda: samples(gateway.port).get(healthy) == 1, "a heartbeat")
    assert now["sie_gateway_nats_connected", ()] == 1
    hosts = samples(host.port)
    assert hosts["sie_worker_items_total", (("model", "stub/a"), ("outcome", "answered"))] >= 1
    assert hosts["sie_worker_nats_connected", ()] == 1


def test_another_pool_or_profile_has_no_host(gateway: Server):
    for headers in ({"x-sie-pool": "other"}, {"x-sie-machine-profile": "h100"}, {"x-sie-machine-profile": "other/l4"}):
        answer = post_json(gateway.port, "/v1/encode/stub/a", {"items": [{"text": "a"}]}, headers)
        assert (answer.status, answer.code()) == (503, "PROVISIONING")
        assert int(answer.headers["retry-after"]) > 0
    for headers in (
        {"x-sie-machine-profile": "L4"},
        {"x-sie-machine-profile": "default/l4"},
        {"x-sie-pool": "default"},
    ):
        assert post_json(gateway.port, "/v1/encode/stub/a", {"items": [{"text": "a"}]}, headers).status == 200


def test_the_unmodified_sdk_leases_the_host_for_a_pool_and_gives_it_back(gateway: Server, host: Server):
    with SIEClient(gateway.url) as client:
        assert client.get_pool("bench") is None
        client.create_pool("Bench", {"L4": 1}, minimum_worker_count=1, pinned_models=["stub/lazy"])
        eventually(lambda: (client.get_pool("bench") or {})["status"]["state"] == "active", "the pool is active")
        eventually(lambda: encode_in(gateway, "bench").status == 200, "the host works for the pool")
        refused = post_json(gateway.port, "/v1/encode/stub/a", {"items": [{"text": "a"}]})
        assert (refused.status, refused.code()) == (503, "PROVISIONING")
        assert client.encode("stub/a", {"text": "x"}, gpu="bench/l4")["dense"].shape == (16,)
        chat = {"model": "text", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert post_json(gateway.port, "/v1/chat/completions", chat, {"x-sie-pool": "bench"}).status == 200
        eventually(lambda: "stub/lazy" in heard_host(gateway)["loaded_models"], "its pin")

        client.create_pool("bench", gpu_caps={"l4": 2})
        pool = eventually(
            lambda: (one := client.get_pool("bench")) and one["status"]["assigned_workers"] and one, "a heartbeat"
        )
        assert (pool["spec"]["gpus"], pool["spec"]["gpu_caps"]) == ({"l4": 1}, {"l4": 2})
        assert [worker["gpu"] for worker in pool["status"]["assigned_workers"]] == ["l4"]
        assert (pool["spec"]["minimum_worker_count"], pool["spec"]["pinned_models"]) == (1, ["stub/lazy"])
        renewed = raw_request("/v1/pools/bench/renew", b"", {}, method="POST")
        assert "renewed" in send_raw(gateway.port, renewed).json()["message"]
        again = client.get_pool("bench")
        assert again is not None
        assert again["status"]["last_renewed"] > pool["status"]["last_renewed"]

        assert client.delete_pool("bench")
        assert not client.delete_pool("bench")
    eventually(
        lambda: post_json(gateway.port, "/v1/encode/stub/a", {"items": [{"text": "a"}]}).status == 200,
        "the host works for its own pool again",
    )


def encode_in(server: Server, pool: str) -> Response:
    return post_json(server.port, "/v1/encode/stub/a", {"items": [{"text": "a"}]}, {"x-sie-pool": pool})


def test_a_pool_that_reserves_nothing_shares_hosts_until_its_lease_ends(gateway: Server):
    made = post_json(gateway.port, "/v1/pools", {"name": "shared"})
    assert made.status == 201
    shown = eventually(
        lambda: (one := get(gateway.port, "/v1/pools/shared").json())["state"] == "active" and one, "a heartbeat"
    )
    assert shown["worker_count"] == 1
    assert encode_in(gateway, "shared").status == 200
    assert [pool["name"] for pool in get(gateway.port, "/v1/pools").json()["pools"]] == ["default", "shared"]
    again = post_json(gateway.port, "/v1/pools", {"name": "shared", "ttl_seconds": 1})
    assert (again.status, again.json()["spec"]["ttl_seconds"]) == (200, 1)
    eventually(lambda: get(gateway.port, "/v1/pools/shared").json()["state"] == "expired", "the end of the lease")
    assert encode_in(gateway, "shared").code() == "PROVISIONING"
    late = send_raw(gateway.port, raw_request("/v1/pools/shared/renew", b"", {}, method="POST"))
    assert (late.status, late.code()) == (404, "POOL_NOT_FOUND")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"name": "default"}, 403, "--pool"),
        ({"name": "a/b"}, 400, "$.name"),
        ({"name": "x", "gpus": {"l4": -1}}, 400, "$.gpus"),
        ({"name": "x", "gpus": {"l4": 2}, "gpu_caps": {"l4": 1}}, 400, "gpu_caps"),
        ({"name": "x", "pinned_models": ["nope"]}, 400, "'nope'"),
        ({"name": "x", "ttl_seconds": 0}, 400, "$.ttl_seconds"),
        ({"name": "x", "color": "red"}, 400, "color"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(gateway: Server, body: dict[str, Any], status: int, said: str):
    answer = post_json(gateway.port, "/v1/pools", body)
    assert answer.status == status
    assert said in answer.json()["detail"]["message"]


def config_status(gateway: Server, model: str) -> Any:
    return get(gateway.port, f"/v1/configs/models/{model}/status").json()


def acked(gateway: Server, model: str) -> int:
    """Return how many hosts that are heard run the configuration of a model."""
    return config_status(gateway, model)["acked_workers"]


def test_hosts_take_over_a_shared_profile_without_a_restart(gateway: Server):
    before = get(gateway.port, "/v1/configs/epoch").json()["epoch"]
    config = {"sie_id": "stub/a", "profiles": {"half": {"adapter_options": {"runtime": {"output_dtype": "float16"}}}}}
    headers = {"idempotency-key": "k1", "if-match": str(before)}
    made = [post_json(gateway.port, "/v1/configs/models", config, headers) for _ in range(2)]
    assert [answer.status for answer in made] == [201, 201]
    assert made[0].json() == made[1].json() == {
        "model_id": "stub/a", "epoch": before + 1, "created_profiles": ["half"], "existing_profiles": [],
    }  # fmt: skip
    eventually(lambda: acked(gateway, "stub/a") == 1, "the host runs the configuration")
    eventually(lambda: encode(gateway.port, "stub/a:half", ["x"]).status == 200, "the profile is served")
    assert encode(gateway.port, "stub/a", ["x"]).status == 200
    (item,) = encode(gateway.port, "stub/a:half", ["x"]).unpack()["items"]
    assert to_array(item["dense"]["values"]).dtype == np.float16
    shown = eventually(lambda: config_status(gateway, "stub/a")["workers"], "a heartbeat")
    assert heard_host(gateway)["bundle_config_hash"] == shown[0]["bundle_config_hash"] != ""

    again = post_json(gateway.port, "/v1/configs/models", config)
    assert (again.status, again.json()["existing_profiles"]) == (200, ["half"])
    config["profiles"]["half"]["adapter_options"]["runtime"]["output_dtype"] = "float32"
    for sent in ({}, {"if-match": str(before)}):
        assert post_json(gateway.port, "/v1/configs/models", config, sent).code() == "CONFIG_CONFLICT"
    shown = get(gateway.port, "/v1/configs/models/stub/a")
    assert (shown.headers["content-type"], b"output_dtype: float16" in shown.body) == ("application/yaml", True)


def test_hosts_offer_a_shared_model(gateway: Server, minilm_directory: Path):
    body = f"sie_id: shared/minilm\nweights_path: {minilm_directory.name}\n".encode()
    answer = send_raw(gateway.port, raw_request("/v1/configs/models", body, {"content-type": "application/yaml"}))
    assert answer.status == 200
    eventually(lambda: encode(gateway.port, "shared/minilm", ["a cat"]).status == 200, "the model is loaded")
    answers = [encode(gateway.port, model, ["a cat"]) for model in ("shared/minilm", MINILM)]
    assert [answer.status for answer in answers] == [200, 200], [answer.body[:200] for answer in answers]
    mine, own = (answer.unpack()["items"][0]["dense"]["values"] for answer in answers)
    np.testing.assert_array_equal(to_array(mine), to_array(own))


def test_a_host_says_which_shared_model_it_does_not_take(gateway: Server):
    assert post_json(gateway.port, "/v1/configs/models", {"sie_id": "x/y", "weights_path": "../.."}).status == 200

    def refusal() -> Any:
        status = config_status(gateway, "x/y")
        return status if any(worker["error"] for worker in status["workers"]) else None

    assert not eventually(refusal, "the refusal")["all_acked"]


def test_names_of_models_are_resolved(gateway: Server):
    asked = {
        "stub/a": 200, "small:/stub/a": 200, "large:/stub/a": 409, "nope": 404, "stub/a:nope": 404,
    }  # fmt: skip

    def resolve() -> tuple[dict[str, int], Any, Any]:
        found = {name: post_json(gateway.port, "/v1/configs/resolve", {"model": name}) for name in asked}
        statuses = {name: answer.status for name, answer in found.items()}
        large = found["large:/stub/a"].json()["detail"]
        return statuses, found["small:/stub/a"].json().get("bundle"), large.get("compatible_bundles")

    # The bundles are those of the hosts that are heard at this moment.
    eventually(lambda: resolve() == (asked, "small", ["small"]), "a heartbeat, and the answers")
    bundle = eventually(
        lambda: (one := get(gateway.port, "/v1/configs/bundles/small")).status == 200 and one.json(), "a heartbeat"
    )
    assert "stub/a" in bundle["models"]

    def bundles() -> list[str]:
        models = get(gateway.port, "/v1/configs/models").json()["models"]
        return next(model["bundles"] for model in models if model["model_id"] == "stub/a")

    assert eventually(bundles, "a heartbeat") == ["small"]
    exported = get(gateway.port, "/v1/configs/export").json()
    assert exported["epoch"] == get(gateway.port, "/v1/configs/epoch").json()["epoch"]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_the_page_of_a_gateway_shows_its_hosts(gateway: Server):
    assert BROWSER is not None
    with open_page(BROWSER, gateway.url) as page:
        page.wait("document.querySelectorAll('#hosts tr').length === 1", "the host")
        shown = page.run("document.querySelector('#hosts tr').innerText")
        assert all(part in shown for part in ("ready", "l4", "bundle\u00a0small")), shown
        assert page.run("document.getElementById('workers').hidden && !document.getElementById('cluster').hidden")
        shown_buttons = "[...document.querySelectorAll('#models button')].filter((one) => !one.hidden).length"
        page.wait(
            f"document.querySelectorAll('#models button').length && !{shown_buttons}", "no button to load or unload"
        )
        page.wait("document.getElementById('host-count').textContent.startsWith('1\u00a0host')", "the count")
        assert page.logged == [], "it asks only what a gateway answers"


def test_a_server_on_its_own_has_no_pools(host: Server):
    answer = get(host.port, "/v1/pools")
    assert (answer.status, answer.code()) == (404, "NOT_A_GATEWAY")


# The last test of the host: a model that its next worker loads may not be there at once.
def test_an_input_that_kills_workers_is_refused_and_kept_as_a_dead_letter(gateway: Server, host: Server):
    answer = encode(gateway.port, "stub/poison", ["this is poison"])
    assert (answer.status, answer.code()) == (422, "POISON_INPUT")
    assert encode(gateway.port, "stub/a", ["others are served"]).status == 200


def test_a_gateway_and_a_host_say_that_nats_does_not_answer():
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sie-nats-"))
        nats = Nats(directory)
        servers = [
            stack.enter_context(start_gateway(nats.url)),
            stack.enter_context(start_host(nats.url, "--model", "stub/a=stub:dense=8")),
        ]
        for server in servers:
            assert '"level":"warning"' in server.log_line("NATS does not answer yet")
        ready = get(servers[0].port, "/readyz")
        assert (ready.status, ready.json()) == (503, {"status": "starting", "healthy_workers": 0})
        stack.callback(nats.kill)
        nats.start()
        for server in servers:
            server.log_line("connected to NATS")
        wait_for_hosts(servers[0], 1)
        eventually(lambda: get(servers[0].port, "/readyz").status == 200, "a gateway that knows its hosts")
        nats.kill()
        ready = eventually(lambda: (one := get(servers[0].port, "/readyz")).status == 503 and one, "NATS is away")
        assert ready.json()["status"] == "disconnected"
        assert get(servers[0].port, "/v2/health/ready").body == b'{"error":"Server not ready: disconnected"}'
        late = encode(servers[0].port, "stub/a", ["x"], {"x-sie-timeout-ms": "300"})
        assert (late.status, late.code(), late.headers["retry-after"]) == (503, "UPSTREAM_UNAVAILABLE", "1")
        nats.start()
        eventually(lambda: get(servers[0].port, "/readyz").status == 200, "NATS is back")
        assert encode(servers[0].port, "stub/a", ["x"]).status == 200


def test_a_gateway_without_nats_does_not_start():
    status, output = run_to_end(command="gateway")
    assert status == EX_CONFIG
    assert "--nats" in output
