"""Too little memory for a step or a model, as a client sees it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.process.harness import eventually, start_server
from tests.process.wire import dense_rows, encode, get, post_json, stub_rows, total


def test_an_item_too_large_for_the_device_is_503_and_its_neighbours_are_answered():
    texts = [f"text {i}" for i in range(20)]
    with start_server("--model", "stub/a=stub:dense=16,oom_tokens=8", "--oom-retry-after-s", "7") as server:
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", texts)), stub_rows(texts, 16))
        response = encode(server.port, "stub/a", ["x" * 36])
        assert (response.status, response.code(), response.headers["retry-after"]) == (503, "RESOURCE_EXHAUSTED", "7")
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", ["x" * 32])), stub_rows(["x" * 32], 16))
        # A worker counts a step when it has answered it.
        eventually(lambda: total(server.port, "sie_oom_batch_splits_total", model="stub/a") >= 1, "a step was split")
        eventually(lambda: total(server.port, "sie_oom_terminal_failures_total", model="stub/a") == 1, "one failed")


def state(server, model):
    return get(server.port, f"/v1/models/{model}").json()["state"]


def load(server, model):
    """Ask for a model until it is loaded."""
    eventually(lambda: encode(server.port, model, ["x"]).status == 200, f"{model} loaded")


def test_the_least_recently_used_lazy_model_makes_room_for_the_next():
    lazy = [word for name in "abc" for word in ("--lazy-model", f"stub/{name}=stub:dense=16,memory_mb=40")]
    with start_server(
        "--model", "stub/pre=stub:dense=16,memory_mb=100", *lazy, "--pinned-model", "stub/c",
        "--max-model-bytes", str(200 << 20), "--idle-unload-s", "600",
    ) as server:  # fmt: skip
        load(server, "stub/c")
        load(server, "stub/a")
        load(server, "stub/b")
        assert state(server, "stub/a") == "available", "180 MiB were taken, 40 more did not fit"
        assert [state(server, f"stub/{name}") for name in ("pre", "b", "c")] == ["loaded"] * 3
        eventually(lambda: total(server.port, "sie_pressure_evictions_total", model="stub/a") == 1, "it is counted")
        assert encode(server.port, "stub/a", ["x"]).code() == "MODEL_LOADING"
        load(server, "stub/a")
        assert [state(server, f"stub/{name}") for name in "abc"] == ["loaded", "available", "loaded"]


def test_a_model_that_can_never_fit_says_so():
    with start_server(
        "--model", "stub/pre=stub:dense=16,memory_mb=100", "--lazy-model", "stub/big=stub:dense=16,memory_mb=300",
        "--max-model-bytes", str(200 << 20),
    ) as server:  # fmt: skip
        assert encode(server.port, "stub/big", ["x"]).code() == "MODEL_LOADING"
        eventually(lambda: state(server, "stub/big") == "failed", "refused")
        response = encode(server.port, "stub/big", ["x"])
        assert (response.status, response.code()) == (502, "MODEL_LOAD_FAILED")
        detail = response.json()["detail"]
        assert (detail["error_class"], detail["permanent"]) == ("PLACEMENT", False)
        assert "300 MiB on cpu" in detail["message"]
        assert encode(server.port, "stub/pre", ["x"]).status == 200


def test_a_device_over_its_share_lets_lazy_models_go_and_keeps_the_others():
    with start_server(
        "--model", "stub/pre=stub:dense=16", "--lazy-model", "stub/a=stub:dense=16", "--memory-pressure-pct", "1"
    ) as server:
        load(server, "stub/a")
        eventually(lambda: state(server, "stub/a") == "available", "1 % is in use on every machine")
        assert state(server, "stub/pre") == "loaded"
        eventually(lambda: total(server.port, "sie_pressure_evictions_total", model="stub/a") >= 1, "it is counted")


def test_a_step_without_memory_takes_it_from_the_model_that_nobody_uses():
    with start_server(
        "--model", "stub/a=stub:dense=16,oom_tokens=8", "--lazy-model", "stub/b=stub:dense=16,memory_mb=10"
    ) as server:
        load(server, "stub/b")
        assert encode(server.port, "stub/a", ["x" * 36]).code() == "RESOURCE_EXHAUSTED"
        eventually(lambda: state(server, "stub/b") == "available", "it was unloaded")
        eventually(
            lambda: total(server.port, "sie_oom_evictions_triggered_total", model="stub/b") == 1, "it is counted"
        )
        load(server, "stub/b")


def test_a_lost_device_costs_its_worker_and_an_input_that_loses_it_twice_is_refused():
    with start_server("--model", "stub/a=stub:dense=16,lost_tokens=8") as server:
        response = encode(server.port, "stub/a", ["x" * 36])
        assert (response.status, response.code()) == (422, "POISON_INPUT")
        assert "ended with status 75" in server.log_line("worker-0 ended")
        eventually(lambda: total(server.port, "sie_worker_restarts_total") == 2, "two restarts")
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", ["x"])), stub_rows(["x"], 16))


def test_requests_that_wait_for_their_model_are_answered_though_others_take_its_memory():
    lazy = [
        word for name, kind in (("x", "generate"), ("y", "generate"), ("e", "dense=16"), ("f", "dense=16"))
        for word in ("--lazy-model", f"{name}=stub:{kind},load_ms=20,memory_mb=60")
    ]  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with start_server(*lazy, "--frontends", "1", "--max-model-bytes", str(70 << 20)) as server:
        is_over = threading.Event()

        def ask(model: str) -> set[int]:
            path, body = ("/v1/chat/completions", chat) if model in "xy" else ("/v1/embeddings", {"input": "x"})
            seen: set[int] = set()
            while not is_over.is_set():
                seen.add(post_json(server.port, path, {"model": model, **body}).status)
            return seen

        with ThreadPoolExecutor(8) as pool:
            statuses = pool.map(ask, "xyefxyef")
            try:
                eventually(lambda: total(server.port, "sie_pressure_evictions_total") >= 9, "they take turns")
            finally:
                is_over.set()
        assert list(statuses) == [{200}] * 8
