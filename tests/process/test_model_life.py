"""Models that load late, fail to load, or are unloaded when idle; other models are not affected."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import anthropic
import httpx2
import numpy as np
import openai
import pytest

from tests.gguf_models import write_tiny_llama
from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, run_to_end, start_server
from tests.process.notify_socket import ServiceManager
from tests.process.wire import (
    Client,
    dense_rows,
    encode,
    get,
    keep_asking,
    post_json,
    stub_rows,
    total,
    without_worker,
)
from tests.unit.fake_hub import FakeHub


def state(server: Server, model: str) -> str:
    return get(server.port, f"/v1/models/{model}").json()["state"]


def test_a_cold_model_answers_503_at_once_and_loads():
    with start_server("--lazy-model", "stub/lazy=stub:dense=16,load_ms=300") as server:
        assert state(server, "stub/lazy") == "available"
        response = encode(server.port, "stub/lazy", ["x"])
        assert (response.status, response.code(), response.headers["retry-after"]) == (503, "MODEL_LOADING", "5")
        eventually(lambda: state(server, "stub/lazy") != "available", "the load began")
        eventually(lambda: state(server, "stub/lazy") == "loaded", "the model loaded")
        assert np.array_equal(dense_rows(encode(server.port, "stub/lazy", ["x"])), stub_rows(["x"], 16))


def test_list_of_models_says_how_far_a_load_is():
    with start_server(
        "--model", "stub/a=stub:dense=16", "--lazy-model", "stub/late=stub:dense=16,load_ms=3600000", "--frontends", "2"
    ) as server:  # fmt: skip
        assert "progress" not in get(server.port, "/v1/models/stub/late").json()
        encode(server.port, "stub/late", ["x"])

        def progress() -> dict[str, object] | None:
            return get(server.port, "/v1/models/stub/late").json().get("progress")

        eventually(progress, "progress")
        found = progress()
        assert found == {"stage": "starting", "fraction": 0.0, "worker": "worker-0"}
        assert "progress" not in get(server.port, "/v1/models/stub/a").json()


@pytest.mark.parametrize(
    ("flags", "requests"),
    [
        (
            (),
            (
                ("/v1/embeddings", {"model": "stub/one", "input": "x"}),
                ("/v1/rerank", {"model": "stub/other", "query": "q", "documents": ["a", "b"]}),
            ),
        ),
        (
            ("--wait-for-load",),
            (
                ("/v1/encode/stub/one", {"items": [{"text": "x"}]}),
                ("/v1/score/stub/other", {"query": {"text": "q"}, "items": [{"text": "x"}]}),
            ),
        ),
    ],
    ids=["by the route", "by the setting"],
)
def test_a_cold_model_is_waited_for_where_clients_know_no_loading(flags, requests):
    cold = "stub:dense=16,score=1,load_ms=2000"
    with start_server(*flags, "--lazy-model", f"stub/one={cold}", "--lazy-model", f"stub/other={cold}") as server:
        for path, body in requests:
            assert post_json(server.port, path, body, {"x-sie-timeout-ms": "100"}).status == 503, "not for ever"
            assert post_json(server.port, path, body).status == 200


def test_a_load_never_delays_a_model_that_serves():
    """The load goes on for longer than the answers take on any machine."""
    with (
        start_server(
            "--model", "stub/a=stub:dense=16", "--lazy-model", "stub/late=stub:dense=16,load_ms=3600000"
        ) as server,
        Client(server.port) as client,
    ):
        assert encode(server.port, "stub/late", ["x"]).status == 503
        eventually(lambda: state(server, "stub/late") == "loading", "the load began")
        for _ in range(20):
            assert np.array_equal(dense_rows(client.encode("stub/a", ["x"])), stub_rows(["x"], 16))
        assert state(server, "stub/late") == "loading"


def test_a_load_that_its_worker_did_not_survive_starts_again():
    with start_server("--lazy-model", "stub/lazy=stub:dense=16,load_ms=1000") as server:
        assert encode(server.port, "stub/lazy", ["x"]).status == 503
        eventually(lambda: state(server, "stub/lazy") != "available", "the load began")
        server.kill_worker()
        eventually(lambda: state(server, "stub/lazy") == "loaded", "the model loaded")
        assert encode(server.port, "stub/lazy", ["x"]).status == 200


def test_a_real_load_beside_a_serving_model_fails_none_of_its_requests(minilm_directory):
    with start_server("--model", "stub/a=stub:dense=16", "--lazy-model", f"mini={minilm_directory}") as server:
        assert encode(server.port, "mini", ["x"]).status == 503
        with Client(server.port) as client:
            deadline_s = time.monotonic() + WAIT_S
            while state(server, "mini") != "loaded":
                assert time.monotonic() < deadline_s
                assert np.array_equal(dense_rows(client.encode("stub/a", ["x"])), stub_rows(["x"], 16))
        assert dense_rows(encode(server.port, "mini", ["x"])).shape == (1, 384)


@pytest.fixture(scope="module")
def broken_server(minilm_directory: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return a server with a good stub and a MiniLM whose weights went away since the start; its load has failed."""
    directory = tmp_path_factory.mktemp("gone") / "model"
    shutil.copytree(minilm_directory, directory)
    flags = ("--lazy-model", f"broken={directory}", "--load-retry-s", "1800")
    with start_server("--model", "stub/a=stub:dense=16", *flags) as server:
        (directory / "model.safetensors").unlink()
        assert encode(server.port, "broken", ["x"]).code() == "MODEL_LOADING"
        eventually(lambda: state(server, "broken") == "failed", "the load failed")
        yield server


def test_a_failed_load_is_502_without_retry_after(broken_server):
    response = encode(broken_server.port, "broken", ["x"])
    assert (response.status, response.code()) == (502, "MODEL_LOAD_FAILED")
    assert "retry-after" not in response.headers
    detail = response.json()["detail"]
    assert {"error_class", "attempts", "permanent"} <= detail.keys()
    assert detail["attempts"] == 1


def test_a_failed_load_on_the_openai_route_is_502(broken_server):
    response = post_json(broken_server.port, "/v1/embeddings", {"model": "broken", "input": "x"})
    assert response.status == 502
    assert response.json()["error"]["code"] == "MODEL_LOAD_FAILED"
    assert "x-should-retry" not in response.headers, "it is tried again after load_retry_s"


def test_a_failed_load_shows_in_the_model_list(broken_server):
    info = get(broken_server.port, "/v1/models/broken").json()
    assert info["loaded"] is False
    assert info["last_error"]["code"] == "MODEL_LOAD_FAILED"
    assert info["last_error"]["message"]


def test_a_failed_load_leaves_the_server_ready_and_the_other_model_serving(broken_server):
    assert get(broken_server.port, "/readyz").status == 200
    rows = dense_rows(encode(broken_server.port, "stub/a", ["x"]))
    assert np.array_equal(rows, stub_rows(["x"], 16))


def test_damaged_weights_are_refused_for_good_until_somebody_repairs_them(minilm_directory: Path, tmp_path: Path):
    directory = tmp_path / "model"
    shutil.copytree(minilm_directory, directory)
    weights = directory / "model.safetensors"
    whole = weights.rename(tmp_path / "whole")
    weights.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    with start_server("--model", "stub/a=stub:dense=16", "--lazy-model", f"broken={directory}") as server:
        encode(server.port, "broken", ["x"])
        eventually(lambda: state(server, "broken") == "failed", "the load failed")
        detail = encode(server.port, "broken", ["x"]).json()["detail"]
        assert (detail["error_class"], detail["permanent"], detail["attempts"]) == ("CONFIG", True, 1)
        whole.rename(weights)
        server.log_line("the files of broken have changed since its load failed")
        eventually(lambda: encode(server.port, "broken", ["x"]).status == 200, "it is loaded")
        assert server.output.text().count("load failed: ") == 1


WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()
"""Lets root read no files of others, as an ordinary user."""


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_may_not_be_read_stops_the_start(minilm_directory: Path, tmp_path: Path, name: str):
    path = tmp_path / "model.gguf" if name == "model.gguf" else tmp_path
    if path == tmp_path:
        shutil.copytree(minilm_directory, tmp_path, dirs_exist_ok=True)
    else:
        path.write_bytes(b"GGUF")
    (tmp_path / name).chmod(0)
    status, said = run_to_end("--model", f"m={path}", prefix=WITHOUT_RIGHTS)
    assert status == EX_CONFIG
    assert f"Model 'm' cannot be loaded: {name}: Permission denied" in said


def test_a_file_that_may_be_read_again_is_loaded_without_a_restart(tmp_path: Path):
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    path.chmod(0)
    models = ("--model", "stub/a=stub:dense=16", "--model", f"m={path}", "--no-strict-readiness")
    with start_server(*models, prefix=WITHOUT_RIGHTS) as server:
        eventually(lambda: state(server, "m") == "failed", "it may not be read")
        path.chmod(0o600)
        eventually(lambda: state(server, "m") == "loaded", "it may be read")
        assert server.output.text().count("load failed: ") == 1


HQQ = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "vocab_size": 100,
    "quantization_config": {"quant_method": "hqq", "bits": 4},
}
REFUSED = "it is quantised with HQQ, which this server does not serve; use its unquantised checkpoint"


def test_a_quantised_checkpoint_of_a_hub_is_refused_for_good_and_clients_hear_its_method(tmp_path):
    files = {"config.json": json.dumps(HQQ).encode(), "model.safetensors": b"weights"}
    with FakeHub(files) as hub, ServiceManager() as manager:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
        env |= manager.env
        models = ("--model", "stub/a=stub:dense=16", "--model", "org/model")
        with start_server(*models, "--no-strict-readiness", env=env) as server:
            assert manager.wait_for("READY")
            assert manager.wait_for("STATUS", "models loaded: 1; failed: org/model")
            eventually(lambda: total(server.port, "sie_model_failed", model="org/model") == 1, "an alert")
            eventually(lambda: state(server, "org/model") == "failed", "the frontend has heard of it, too")
            response = encode(server.port, "org/model", ["x"])
            detail = response.json()["detail"]
            assert (response.status, response.code()) == (502, "MODEL_LOAD_FAILED")
            assert (detail["error_class"], detail["permanent"], detail["attempts"]) == ("CONFIG", True, 1)
            assert REFUSED in detail["message"]
            response = post_json(server.port, "/v1/completions", {"model": "org/model", "prompt": "x"})
            assert response.status == 502
            assert REFUSED in response.json()["error"]["message"]
            assert get(server.port, "/readyz").status == 200
            check_that_clients_ask_once(server, "org/model")


@pytest.mark.parametrize(
    ("others", "said_first"),
    [
        ((), "no model can be served: stopping: "),
        (
            ("--model", "stub/a=stub:dense=16"),
            "not every model can be served (strict_readiness = false serves the others): stopping: ",
        ),
    ],
    ids=["alone", "beside a good model"],
)
def test_a_server_that_can_never_be_ready_ends_and_says_why(tmp_path, others, said_first):
    with FakeHub({"config.json": json.dumps(HQQ).encode(), "model.safetensors": b"weights"}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
        status, said = run_to_end("--model", "org/model", *others, env=env)
    assert status == EX_CONFIG
    assert f"{said_first}Model 'org/model' cannot be loaded: {REFUSED}" in said
    assert "it is not tried again" in said


def check_that_clients_ask_once(server, model):
    """Ask for a model whose load has failed for good with clients that would ask three times."""
    asked = []
    options = {
        "api_key": "unused",
        "http_client": httpx2.Client(event_hooks={"request": [lambda request: asked.append(request.url.path)]}),
    }
    hello = [{"role": "user", "content": "hello"}]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", **options) as one,
        anthropic.Anthropic(base_url=server.url, **options) as other,
    ):
        calls = [
            lambda: one.chat.completions.create(model=model, messages=hello),
            lambda: one.chat.completions.create(model=model, messages=hello, stream=True),
            lambda: one.completions.create(model=model, prompt="x"),
            lambda: one.responses.create(model=model, input="x"),
            lambda: one.embeddings.create(model=model, input="x"),
            lambda: other.messages.create(model=model, max_tokens=5, messages=hello),
            lambda: other.messages.count_tokens(model=model, messages=hello),
        ]
        for call in calls:
            asked.clear()
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)) as caught:
                call()
            assert (caught.value.status_code, caught.value.response.headers.get("x-should-retry")) == (502, "false")
            assert len(asked) == 1, asked


def test_a_quantised_checkpoint_in_a_directory_stops_the_start_with_its_method(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HQQ))
    status, said = run_to_end("--model", f"org/model={tmp_path}")
    assert status == EX_CONFIG, said
    assert REFUSED in said


def test_an_idle_model_goes_and_comes_back():
    with start_server(
        "--lazy-model", "stub/lazy=stub:dense=16", "--model", "stub/a=stub:dense=16", "--idle-unload-s", "1"
    ) as server:
        for _ in range(2):
            assert encode(server.port, "stub/lazy", ["x"]).code() == "MODEL_LOADING"
            answer = eventually(
                lambda: (found := encode(server.port, "stub/lazy", ["x"])).status == 200 and found, "the model loaded"
            )
            assert np.array_equal(dense_rows(answer), stub_rows(["x"], 16))
            eventually(lambda: state(server, "stub/lazy") == "available", "the model unloaded")
            eventually(
                lambda: total(server.port, "sie_model_loaded", model="stub/lazy") == 0, "it is counted as loaded"
            )
        assert state(server, "stub/a") == "loaded", "a model to load before readiness stays"


def test_a_model_in_use_is_not_unloaded():
    with (
        start_server("--lazy-model", "stub/lazy=stub:dense=16", "--idle-unload-s", "1") as server,
        Client(server.port) as client,
    ):
        assert client.encode("stub/lazy", ["x"]).status == 503
        eventually(lambda: client.encode("stub/lazy", ["x"]).status == 200, "the model loaded")
        keep_asking(lambda: client.encode("stub/lazy", ["x"]), for_s=3.0, pause_s=0.9)


_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {**_CHAT, "stream": True}, b"data: [DONE]\n\n"),
        ("/v1/messages", {**_CHAT, "stream": True}, b"message_stop"),
        ("/v1/responses", {"input": "hi", "stream": True}, b"response.completed"),
        ("/v1/responses", {"input": "hi", "stream": True, "background": True}, b"response.completed"),
        ("/v1/responses", {"input": "hi"}, b'"completed"'),
    ],
)
def test_a_model_that_was_unloaded_before_an_answer_began_is_loaded_for_it(path, body, end):
    """The frontend sleeps so long before it submits its second request that the idle model is unloaded meanwhile."""
    with start_server(
        "--lazy-model", "m=stub:generate", "--idle-unload-s", "1", "--frontends", "1",
        "--test", "--failpoints", "frontend.before_commit=sleep:2500@2",
    ) as server:  # fmt: skip
        assert post_json(server.port, "/v1/chat/completions", {"model": "m", **_CHAT}).status == 200
        answer = post_json(server.port, path, {"model": "m", **body})
        assert total(server.port, "sie_idle_evictions_total", model="m") >= 1
        assert answer.status == 200, answer.body
        assert end in answer.body


def test_readiness_waits_for_the_models_to_load_first():
    with start_server("--model", "mini=stub:dense=16,load_ms=1500") as server:
        assert get(server.port, "/readyz").status == 200
        assert dense_rows(encode(server.port, "mini", ["x"])).shape == (1, 16)
        with without_worker(server, lambda: get(server.port, "/readyz").status == 503):
            missing = b"not loaded: mini (loading)"
            eventually(lambda: missing in get(server.port, "/readyz").body, "it says which model is missing, and why")
            assert get(server.port, "/readyz").body.startswith(b"not ready: ")
            assert get(server.port, "/healthz").status == 200
        # A model that was loaded when its worker died is waited for, not refused.
        assert dense_rows(encode(server.port, "mini", ["x"])).shape == (1, 16)
        eventually(lambda: get(server.port, "/readyz").status == 200, "ready again")
