"""Traces as a collector receives them, and the trace headers of answers."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time

import grpc
import httpx
import pytest

from sie.proto import message_class
from tests.process.collector import start_collector
from tests.process.harness import EX_CONFIG, WAIT_S, eventually, free_port, paused, run_to_end, start_server
from tests.process.wire import encode, get, post_json, raw_request, send_raw

PHASES = ["decode", "tokenise", "queue", "infer", "encode"]


def names_of(phases) -> list[str]:
    """Return the names of phases; on a busy host even the look at a loaded model may take long enough to be a load."""
    return [phase.name for phase in phases if phase.name != "load"]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture(scope="module")
def collector():
    with start_collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(collector):
    with start_server(
        "--model", "stub/a=stub:dense=16,score,extract", "--model", "stub/slow=stub:dense=16,latency_ms=200",
        "--lazy-model", "stub/lazy=stub:dense=16,load_ms=300", "--tracing", "--otlp-endpoint", collector.endpoint,
        "--frontends", "1", "--access-log", "1", "--model", "id=stub:tensor", "--model", "g=stub:generate", "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running


def test_trace_has_a_span_for_each_phase(server, collector):
    began_ns = time.time_ns()
    response = encode(server.port, "stub/slow", ["x"])
    ended_ns = time.time_ns()
    trace_id = response.headers["x-trace-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", trace_id)
    root, phases = collector.wait_trace(trace_id)
    assert (root.name, root.parent_id, root.service) == ("POST /v1/encode/{model}", "", "sie")
    assert names_of(phases) == PHASES
    assert {phase.parent_id for phase in phases} == {root.span_id}
    edges = [edge for phase in phases for edge in (phase.start_ns, phase.end_ns)]
    assert edges == sorted(edges), "phases do not overlap"
    assert began_ns <= root.start_ns == edges[0]
    assert edges[-1] == root.end_ns <= ended_ns
    infer = phases[-2]
    assert infer.end_ns - infer.start_ns >= 190e6, "the stub's step takes 200 ms"
    assert root.attributes["http.route"] == "/v1/encode/{model}"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["sie.model"] == "stub/slow"
    assert response.headers["traceparent"] == f"00-{trace_id}-{root.span_id}-01"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score/stub/a", {"query": {"text": "q"}, "items": [{"text": "d"}]}),
        ("/v1/extract/stub/a", {"items": [{"text": "d"}]}),
        ("/v1/rerank", {"model": "stub/a", "query": "q", "documents": ["d"]}),
        ("/v1/embeddings", {"model": "stub/a", "input": "x"}),
    ],
)
def test_every_inference_route_is_traced(path, body, server, collector):
    response = post_json(server.port, path, body)
    assert response.status == 200, response.body
    root, phases = collector.wait_trace(response.headers["x-trace-id"])
    assert root.attributes["sie.model"] == "stub/a"
    assert names_of(phases) == PHASES


@pytest.mark.parametrize(
    ("path", "body", "facts"),
    [
        ("/v1/embeddings", {"model": "stub/a", "input": "x" * 9}, ("embeddings", "stub/a", 3, None)),
        ("/v1/chat/completions", {"model": "g", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
         ("chat", "g", 19, 4)),
        ("/v1/messages", {"model": "g", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True},
         ("chat", "g", 19, 4)),
        ("/v1/completions", {"model": "g", "prompt": "xyz", "max_tokens": 2}, ("text_completion", "g", 3, 2)),
        ("/v1/score/stub/a", {"query": {"text": "q"}, "items": [{"text": "d"}]}, (None, None, None, None)),
    ],
)  # fmt: skip
def test_generating_and_embedding_have_the_names_of_the_conventions(path, body, facts, server, collector):
    trace_id = secrets.token_hex(16)
    response = post_json(server.port, path, body, {"traceparent": f"00-{trace_id}-{PARENT}-01"})
    assert response.status == 200, response.body
    root, _ = collector.wait_trace(trace_id)
    names = ("operation.name", "request.model", "usage.input_tokens", "usage.output_tokens")
    assert tuple(root.attributes.get(f"gen_ai.{name}") for name in names) == facts
    assert (root.attributes["server.address"], root.attributes["server.port"]) == ("127.0.0.1", server.port)


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_time_to_make_a_chats_prompt_is_its_own_and_not_a_load(is_stream, server, collector):
    trace_id = secrets.token_hex(16)
    body = {"model": "g", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": is_stream}
    post_json(server.port, "/v1/chat/completions", body, {"traceparent": f"00-{trace_id}-{PARENT}-01"})
    _, phases = collector.wait_trace(trace_id)
    assert names_of(phases) == PHASES
    (tokenise,) = [phase for phase in phases if phase.name == "tokenise"]
    logged_ms = json.loads(server.log_line(trace_id))["tokenization_ms"]
    assert logged_ms > 0
    assert tokenise.end_ns - tokenise.start_ns == pytest.approx(logged_ms * 1e6, abs=1000)


def test_sampled_parent_is_continued(server, collector):
    response = encode(server.port, "stub/a", ["x"], {"traceparent": SAMPLED})
    assert response.headers["x-trace-id"] == TRACE
    root, _ = collector.wait_trace(TRACE)
    assert root.parent_id == PARENT


def test_unsampled_parent_is_not_recorded(server, collector):
    response = encode(server.port, "stub/a", ["x"], {"traceparent": UNSAMPLED.replace("4bf9", "aaaa")})
    assert response.status == 200
    assert not {"x-trace-id", "traceparent"} & response.headers.keys()
    later = encode(server.port, "stub/a", ["x"]).headers["x-trace-id"]
    collector.wait_trace(later)
    assert not collector.spans(TRACE.replace("4bf9", "aaaa"))


@pytest.mark.parametrize(
    "bad", [b"nonsense", f"00-{'0' * 32}-{PARENT}-01".encode(), f"ff-{TRACE}-{PARENT}-01".encode(), b"\xff\xe9" * 400]
)
def test_bad_parent_starts_a_trace_of_its_own(bad, server):
    body = b'{"items": [{"text": "x"}]}'
    request = raw_request("/v1/encode/stub/a", body, {"traceparent": "PARENT", "tracestate": "PARENT"})
    response = send_raw(server.port, request.replace(b"PARENT", bad))
    assert response.status == 200
    assert response.headers["x-trace-id"] not in (TRACE, "0" * 32)


def test_line_of_the_access_log_names_the_trace(server):
    trace_id = encode(server.port, "stub/a", ["x"]).headers["x-trace-id"]
    assert json.loads(server.log_line(trace_id))["trace_id"] == trace_id


def test_errors_are_traced_as_far_as_they_came(server, collector):
    mistake = post_json(server.port, "/v1/encode/stub/a", {"items": []})
    root, phases = collector.wait_trace(mistake.headers["x-trace-id"])
    assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (400, "INVALID_INPUT")
    assert not root.is_error, "a client's mistake is not the server's failure"
    assert [phase.name for phase in phases] == ["decode"]
    with paused(server.worker()):
        late = encode(server.port, "stub/slow", ["x"], {"x-sie-timeout-ms": "20"})
    root, _ = collector.wait_trace(late.headers["x-trace-id"])
    assert (late.status, root.is_error, root.attributes["error.type"]) == (504, True, "DEADLINE_EXCEEDED")


def test_waiting_for_a_model_is_a_phase_of_its_own(server, collector):
    response = post_json(server.port, "/v1/embeddings", {"model": "stub/lazy", "input": "x"})
    assert response.status == 200
    _, phases = collector.wait_trace(response.headers["x-trace-id"])
    assert [phase.name for phase in phases] == ["decode", "load", *PHASES[1:]]
    assert phases[1].end_ns - phases[1].start_ns > 200e6


def ask_grpc(server, **metadata: str):
    """Return what the trailing metadata of an answer over gRPC say."""
    request = message_class("kserve", "inference.ModelInferRequest")(model_name="id")
    request.inputs.add(name="INPUT0", datatype="UINT8", shape=[1])
    request.raw_input_contents.append(b"x")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        _, answered = method.with_call(request.SerializeToString(), timeout=WAIT_S, metadata=list(metadata.items()))
        return dict(answered.trailing_metadata())


def test_a_call_of_grpc_is_traced_like_a_request(server, collector):
    trailers = ask_grpc(server)
    root, phases = collector.wait_trace(trailers["x-trace-id"])
    assert (root.name, root.parent_id, root.is_error) == ("inference.GRPCInferenceService/ModelInfer", "", False)
    assert (root.attributes["rpc.system"], root.attributes["sie.model"]) == ("grpc", "id")
    assert names_of(phases) == PHASES
    assert {phase.parent_id for phase in phases} == {root.span_id}
    assert trailers["traceparent"] == f"00-{trailers['x-trace-id']}-{root.span_id}-01"


def test_a_call_of_grpc_continues_its_callers_trace(server, collector):
    trace_id = TRACE.replace("4bf9", "abcd")
    assert ask_grpc(server, traceparent=SAMPLED.replace(TRACE, trace_id))["x-trace-id"] == trace_id
    root, _ = collector.wait_trace(trace_id)
    assert root.parent_id == PARENT
    assert "x-trace-id" not in ask_grpc(server, traceparent=UNSAMPLED)


def test_tensors_over_http_are_traced_in_all_their_phases(server, collector):
    body = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT8", "data": [1]}]}
    response = post_json(server.port, "/v2/models/id/infer", body)
    _, phases = collector.wait_trace(response.headers["x-trace-id"])
    assert names_of(phases) == PHASES


def test_bucket_of_the_latency_names_a_trace_in_openmetrics_only(server):
    trace = encode(server.port, "stub/a", ["x"]).headers["x-trace-id"]
    accepted = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    reply = httpx.get(f"{server.url}/metrics", headers=accepted, timeout=WAIT_S)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert f'# {{trace_id="{trace}"}}' in reply.text
    assert reply.text.endswith("# EOF\n")
    assert "trace_id" not in httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text


def test_what_is_not_inference_is_not_traced(server):
    for path in ("/healthz", "/metrics", "/v1/models"):
        assert "x-trace-id" not in get(server.port, path).headers


def test_off_by_default(stub_server):
    response = encode(stub_server.port, "stub/a", ["x"], {"traceparent": SAMPLED})
    assert not {"x-trace-id", "traceparent"} & response.headers.keys()


def test_start_without_the_library_is_refused_by_name(tmp_path):
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()  # hides the real one
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, text = run_to_end("--model", "stub/a=stub:", "--tracing", env={"PYTHONPATH": path})
    assert status == EX_CONFIG
    assert "pip install 'ringserve[otel]'" in text


def test_dead_collector_costs_no_request_and_no_stop():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        with start_server(
            "--model",
            "stub/a=stub:dense=16",
            "--tracing",
            "--otlp-endpoint",
            endpoint,
            "--frontends",
            "1",
            "--drain-timeout-s",
            "300",
        ) as server:
            for _ in range(50):
                assert encode(server.port, "stub/a", ["x"]).status == 200
            eventually(lambda: "exporting" in server.output.text(), "the exporter's complaint")
            server.stop()
            assert server.output.text().count("exporting traces") <= 2, "complaints do not fill the log"


def test_share_counts_without_a_parent_and_what_waits_is_sent_before_the_end_over_http_too(collector):
    with start_server(
        "--model", "stub/a=stub:dense=16", "--tracing", "--otlp-endpoint", collector.http_endpoint, "--trace-share", "0",
        "--otlp-protocol", "http", "--frontends", "1",
    ) as server:  # fmt: skip
        assert "x-trace-id" not in encode(server.port, "stub/a", ["x"]).headers
        trace_id = TRACE.replace("4bf9", "bbbb")
        assert encode(server.port, "stub/a", ["x"], {"traceparent": f"00-{trace_id}-{PARENT}-01"}).status == 200
        server.stop()
    assert collector.spans(trace_id)


def test_the_variables_of_opentelemetry_name_a_collector_behind_a_path(collector):
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.http_endpoint}/behind",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    with start_server("--model", "stub/a=stub:dense=16", "--tracing", "--frontends", "1", env=env) as server:
        trace_id = encode(server.port, "stub/a", ["x"]).headers["x-trace-id"]
        collector.wait_trace(trace_id)
    assert collector.paths[-1] == "/behind/v1/traces"
