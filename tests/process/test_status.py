"""`/ws/status` and `/metrics` of a running server, as a dashboard and a scraper see them."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal

import pytest
from prometheus_client.samples import Sample
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from tests.conftest import MINILM
from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.watchers import next_frame, watch
from tests.process.wire import connect as connect_raw
from tests.process.wire import encode, families, get, raw_request, samples, total, under_load, without_worker

FRAME_KEYS = {
    "timestamp", "ready", "name", "machine_profile", "pool_name", "gpu_count", "bundle", "bundle_config_hash",
    "loaded_models", "max_batch_requests", "saturated", "server", "gpus", "models", "counters", "histograms",
}  # fmt: skip
GPU_KEYS = {
    "device", "index", "name", "gpu_type", "utilization_pct", "utilization_percent", "memory_used_bytes",
    "memory_total_bytes", "memory_threshold_pct", "temperature_c",
}  # fmt: skip
MODEL_KEYS = {"name", "state", "device", "memory_bytes", "config", "queue_depth", "queue_pending_items"}
CONFIG_KEYS = {"hf_id", "adapter", "inputs", "outputs", "dims", "max_sequence_length"}


def num_watchers(server: Server) -> int:
    return int(total(server.port, "sie_status_watchers"))


# --- /ws/status -------------------------------------------------------------------------------------------------------


def test_first_frame_waits_for_no_tick():
    with start_server("--model", "stub/a=stub:dense=16", "--status-interval-ms", "60000") as server:
        for _ in range(2):
            with watch(server) as socket:
                assert next_frame(socket)["loaded_models"] == ["stub/a"]


def test_frames_come_five_a_second(stub_server):
    """By the server's own time, and by the shortest of the gaps: a busy machine makes most of them longer."""
    with watch(stub_server) as socket:
        next_frame(socket)
        times_s = [next_frame(socket)["timestamp"] for _ in range(11)]
        assert times_s[-1] - times_s[0] > 1.6, times_s

        def shortest_gap_s() -> float:
            return min(after - before for before, after in itertools.pairwise(times_s))

        eventually(
            lambda: shortest_gap_s() < 0.4 or times_s.append(next_frame(socket)["timestamp"]), "two frames 200 ms apart"
        )


def test_frame_has_every_field(stub_server):
    encode(stub_server.port, "stub/a", ["x"])
    with watch(stub_server) as socket:
        # The first frame may be the one that earlier watchers got up to 200 ms ago.
        frame = eventually(lambda: counts_requests(next_frame(socket)), "a frame that counts the request")
    assert frame.keys() >= FRAME_KEYS
    assert frame["ready"] is True
    assert frame["gpu_count"] == len(frame["gpus"])
    assert all(gpu.keys() >= GPU_KEYS for gpu in frame["gpus"])
    assert "gpu" in frame, "the other spelling"
    assert {"stub/a", "stub/slow"} <= set(frame["loaded_models"])
    assert frame["server"].keys() >= {"version", "uptime_seconds", "user", "working_dir", "pid"}
    assert frame["server"]["pid"] == stub_server.process.pid
    model = next(model for model in frame["models"] if model["name"] == "stub/a")
    assert model.keys() >= MODEL_KEYS
    assert model["config"].keys() >= CONFIG_KEYS
    assert (model["state"], model["device"]) == ("loaded", "cpu")
    histogram = frame["histograms"]["sie_request_duration_seconds"]["stub/a"]
    assert len(histogram["buckets"]) == len(histogram["counts"]) == 13
    assert histogram["counts"] == sorted(histogram["counts"])


def counts_requests(frame: dict) -> dict | None:
    return frame if frame["counters"]["sie_requests"].get("stub/a", 0) >= 1 else None


def test_frame_of_a_real_model_has_its_memory(minilm_server):
    with watch(minilm_server) as socket:
        frame = next_frame(socket)
    (model,) = frame["models"]
    assert (model["name"], model["device"], model["config"]["dims"]) == (MINILM, "cpu", {"dense": 384})
    assert model["memory_bytes"] > 20e6
    assert frame["loaded_models"] == [MINILM]


def test_watchers_beyond_the_limit_are_refused_and_the_others_stay():
    with start_server("--model", "stub/a=stub:dense=16") as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(watch(server)) for _ in range(64)]
        eventually(lambda: num_watchers(server) == 64, "64 watchers")
        with pytest.raises(InvalidStatus) as refused, watch(server):
            pass
        assert refused.value.response.status_code == 503
        assert all(next_frame(socket)["ready"] for socket in sockets)
        sockets[0].close()
        eventually(lambda: num_watchers(server) == 63, "the place of a watcher that left")
        with watch(server) as socket:
            assert next_frame(socket)["ready"]


def test_other_websocket_paths_are_404(stub_server):
    with pytest.raises(InvalidStatus) as refused, watch(stub_server, "/ws/other"):
        pass
    assert refused.value.response.status_code == 404


def test_status_without_an_upgrade_is_no_websocket(stub_server):
    assert get(stub_server.port, "/ws/status").status in (400, 404, 405, 426)


def test_watcher_that_leaves_without_a_word_is_counted_out():
    with start_server("--model", "stub/a=stub:dense=16", "--status-interval-ms", "20") as server:
        key = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13",
               "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}  # fmt: skip
        with connect_raw(server.port) as sock:
            sock.sendall(raw_request("/ws/status", headers=key, method="GET", length=False))
            eventually(lambda: num_watchers(server) == 1, "one watcher")
            assert encode(server.port, "stub/a", ["x"]).status == 200
        eventually(lambda: num_watchers(server) == 0, "the watcher counted out")


def test_watchers_are_told_of_the_end():
    with start_server("--model", "stub/a=stub:dense=16") as server, watch(server) as socket:
        next_frame(socket)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: has_ended(socket), "the end of the frames")


def has_ended(socket: ClientConnection) -> bool:
    try:
        next_frame(socket)
    except ConnectionClosed:
        return True
    return False


def test_readiness_falls_in_the_frame_when_the_worker_is_gone():
    with start_server("--model", "stub/a=stub:dense=16,load_ms=500") as server, watch(server) as socket:
        assert next_frame(socket)["ready"] is True
        with without_worker(server, lambda: get(server.port, "/readyz").status == 503):
            eventually(lambda: next_frame(socket)["ready"] is False, "a frame that is not ready")
        eventually(lambda: next_frame(socket)["ready"] is True, "a frame that is ready again")


# --- /metrics ---------------------------------------------------------------------------------------------------------

DURATION_BUCKETS = [
    "0.001",
    "0.005",
    "0.01",
    "0.025",
    "0.05",
    "0.1",
    "0.25",
    "0.5",
    "1.0",
    "2.5",
    "5.0",
    "10.0",
    "30.0",
    "+Inf",
]
SIZE_BUCKETS = [f"{1 << power}.0" for power in range(11)] + ["+Inf"]
FAMILIES = {
    "sie_requests": ("counter", {"model", "endpoint", "status"}, None),
    "sie_request_duration_seconds": ("histogram", {"model", "endpoint", "phase"}, DURATION_BUCKETS),
    "sie_batch_size": ("histogram", {"model"}, SIZE_BUCKETS),
    "sie_tokens_processed": ("counter", {"model"}, None),
    "sie_queue_depth": ("gauge", {"model"}, None),
    "sie_model_loaded": ("gauge", {"model", "device"}, None),
    "sie_model_memory_bytes": ("gauge", {"model", "device"}, None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_has_its_type_labels_and_buckets(stub_server, name):
    """Source: SIE API reference, section 14."""
    kind, labels, buckets = FAMILIES[name]
    encode(stub_server.port, "stub/a", ["x"])
    eventually(lambda: total(stub_server.port, "sie_batch_size_count", model="stub/a") > 0, "a step was counted")

    def own_samples() -> list[Sample]:
        family = families(stub_server.port)[name]
        assert family.type == kind
        return [sample for sample in family.samples if sample.labels.get("model") == "stub/a"]

    found = eventually(own_samples, "samples of the model")
    assert all(sample.labels.keys() - {"le"} == labels for sample in found)
    if buckets is not None:
        by_rest: dict[tuple, list[str]] = {}
        for sample in found:
            if sample.name.endswith("_bucket"):
                rest = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
                by_rest.setdefault(rest, []).append(sample.labels["le"])
        assert by_rest
        assert all(bounds == buckets for bounds in by_rest.values())


def test_page_has_the_scrapers_content_type(stub_server):
    response = get(stub_server.port, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_requests_are_counted_by_outcome():
    with start_server("--model", "stub/a=stub:dense=16", "--frontends", "2") as server:
        for _ in range(10):
            assert encode(server.port, "stub/a", ["xxxxxxxx", "y"]).status == 200
        for _ in range(3):
            assert encode(server.port, "stub/a", []).status == 400
        for _ in range(2):
            assert encode(server.port, "made/up", ["x"]).status == 404

        def requests(**labels: str) -> float:
            return total(server.port, "sie_requests_total", endpoint="encode", **labels)

        # An answer is on its way before it is counted, by its frontend and by its worker.
        eventually(lambda: requests(model="stub/a", status="success") == 10, "ten good ones")
        # A body that is refused is judged before its model is looked at.
        eventually(lambda: requests(status="error") == 5, "five refusals")
        assert requests(model="made/up") == 0, "names that clients make up are no labels"
        eventually(lambda: total(server.port, "sie_tokens_processed_total", model="stub/a") == 30, "thirty tokens")
        phases = {
            dict(pairs)["phase"] for name, pairs in samples(server.port) if name == "sie_request_duration_seconds_count"
        }
        assert "total" in phases
        assert phases <= {"total", "queue", "tokenize", "inference"}


def test_a_thousand_made_up_paths_make_no_labels(stub_server):
    before = len(samples(stub_server.port))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", stub_server.port, timeout=WAIT_S)) as connection:
        for n in range(1000):
            connection.request("POST", f"/v1/encode/made/up/{n}", b'{"items":[{"text":"x"}]}', {"x-n": str(n)})
            response = connection.getresponse()
            response.read()
            assert response.status == 404
    assert len(samples(stub_server.port)) - before < 60


def test_counters_and_readers_agree_under_load_and_death():
    """Every scrape during load and two deaths parses, and no cumulative sample ever falls."""
    seen: dict[tuple, float] = {}

    def scrape(server: Server) -> None:
        for key, value in samples(server.port).items():
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert value >= seen.get(key, 0.0), (key, seen[key], value)
                seen[key] = value

    with start_server("--model", "stub/a=stub:dense=16,latency_ms=2") as server:
        with under_load(server, "stub/a", 16, seed=505, num_clients=2) as load:
            for _ in range(2):
                for _ in range(10):
                    scrape(server)
                server.kill_worker()
                load.wait_answers(20)
                scrape(server)
        answered = seen["sie_requests_total", (("endpoint", "encode"), ("model", "stub/a"), ("status", "success"))]
        assert 0 < answered <= load.num_answered + 2
        frontend = server.frontends()[0]
        os.kill(frontend, signal.SIGKILL)
        eventually(lambda: server.frontends() not in ([], [frontend]), "a new frontend")
        eventually(lambda: is_up(server), "an answer of the new frontend")
        scrape(server)


def is_up(server: Server) -> bool:
    try:
        return get(server.port, "/healthz").status == 200
    except (OSError, http.client.HTTPException):
        return False
