"""Models that are loaded and unloaded on request, and which clients may do that."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.process.harness import WAIT_S, eventually, paused, start_server
from tests.process.wire import Client, dense_rows, encode, get, post_json, raw_request, send_raw, stub_rows, under_load

STUBS = ("--model", "stub/a=stub:dense=16", "--lazy-model", "stub/b=stub:dense=16,load_ms=500")


def manage(server, verb, model, **headers):
    response = post_json(server.port, f"/v1/models/{verb}", {"model_id": model}, headers)
    return response.status, response.json()


@pytest.fixture(scope="module")
def server():
    # A second frontend would hear of a load or an unload a moment after the one that answered.
    with start_server(*STUBS, "--frontends", "1") as running:
        yield running


def test_models_are_loaded_and_unloaded_on_request_as_often_as_asked(server):
    assert manage(server, "status", "stub/b") == (200, {"model_id": "stub/b", "status": "unloaded"})
    for _ in range(2):
        for _ in range(2):
            assert manage(server, "load", "stub/b") == (200, {"model_id": "stub/b", "status": "loaded"})
        assert np.array_equal(dense_rows(encode(server.port, "stub/b", ["x"])), stub_rows(["x"], 16))
        assert manage(server, "reload", "stub/b") == (200, {"model_id": "stub/b", "status": "loaded"})
        for _ in range(2):
            assert manage(server, "unload", "stub/b") == (200, {"model_id": "stub/b", "status": "unloaded"})
        assert get(server.port, "/v1/models/stub/b").json()["state"] == "available"


def test_unload_while_it_loads_wins(server):
    def load() -> tuple[int, Any] | None:
        answer = manage(server, "load", "stub/b", **{"x-sie-timeout-ms": "100"})
        return None if answer[0] == 504 else answer  # the supervisor itself was late

    with paused(server.worker()):
        assert eventually(load, "an answer of the supervisor") == (202, {"model_id": "stub/b", "status": "loading"})
    assert manage(server, "unload", "stub/b") == (200, {"model_id": "stub/b", "status": "unloaded"})
    assert get(server.port, "/v1/models/stub/b").json()["state"] == "available"


def test_preloaded_model_can_be_unloaded_and_the_server_stays_ready(server):
    assert manage(server, "unload", "stub/a") == (200, {"model_id": "stub/a", "status": "unloaded"})
    assert get(server.port, "/readyz").status == 200
    response = encode(server.port, "stub/a", ["x"])
    assert (response.status, response.code()) == (503, "MODEL_LOADING")
    eventually(lambda: encode(server.port, "stub/a", ["x"]).status == 200, "a request loads it again")


def test_unknown_model_and_wrong_method(server):
    status, answer = manage(server, "load", "nope")
    assert (status, answer["status"], answer["detail"]["code"]) == (404, "not_found", "MODEL_NOT_FOUND")
    assert get(server.port, "/v1/models/load").status == 405


def test_other_sites_pages_are_refused(server):
    for headers, setting in (
        ({"origin": "http://evil.example"}, "cors_origin"),
        ({"host": "evil.example"}, "allowed_host"),
        ({"content-type": "text/plain"}, "admin_from"),
    ):
        fields = {"host": f"127.0.0.1:{server.port}", "content-type": "application/json", **headers}
        response = send_raw(server.port, raw_request("/v1/models/unload", b'{"model_id": "stub/a"}', fields))
        assert (response.status, response.code()) == (403, "FORBIDDEN")
        assert setting in response.json()["detail"]["message"]
    assert get(server.port, "/v1/admin", {"host": "evil.example"}).status == 403
    assert get(server.port, "/v1/admin").json() == {"allowed": True}


def test_no_client_may_manage_with_admin_from_nobody():
    with start_server("--model", "stub/a=stub:dense=16", "--admin-from", "nobody") as server:
        status, answer = manage(server, "unload", "stub/a")
        assert (status, answer["detail"]["code"]) == (403, "FORBIDDEN")
        assert get(server.port, "/v1/admin").status == 403
        assert encode(server.port, "stub/a", ["x"]).status == 200


def test_reload_under_load_answers_rightly_or_says_why_not():
    with (
        start_server("--model", "stub/a=stub:dense=16,latency_ms=2", "--model", "stub/b=stub:dense=16") as server,
        under_load(server, "stub/b", 16, seed=11, num_clients=2),
    ):
        wrong, num_right = [], 0
        is_over = threading.Event()

        def ask() -> None:
            nonlocal num_right
            with Client(server.port) as client:
                while not is_over.is_set():
                    response = client.encode("stub/a", ["x"])
                    if response.status == 200 and np.array_equal(dense_rows(response), stub_rows(["x"], 16)):
                        num_right += 1
                    elif response.status != 503 or response.code() not in ("MODEL_LOADING", "MODEL_NOT_LOADED"):
                        wrong.append((response.status, response.body[:200]))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: num_right or wrong, "a first answer")
        for _ in range(10):
            assert manage(server, "reload", "stub/a") == (200, {"model_id": "stub/a", "status": "loaded"})
        is_over.set()
        asking.join(WAIT_S)
        assert not wrong
        assert num_right
        assert get(server.port, "/readyz").status == 200
