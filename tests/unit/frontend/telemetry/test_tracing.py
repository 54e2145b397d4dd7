"""How a request's times become phases, and the address that spans are sent to."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from sie.config.sections import Tracing
from sie.frontend.telemetry.tracing import _open_exporter, phases_of
from sie.values.inference import Timing

MS = 1_000_000
TIMES = Timing(total_ms=20, queue_ms=3, tokenization_ms=2, inference_ms=5, submitted_ns=109 * MS)


def exchange(began_ms=100, decoded_ms=107, timing=TIMES):
    return SimpleNamespace(began_ns=began_ms * MS, decoded_ns=decoded_ms * MS, timing=timing)


def in_ms(phases):
    return {phase.name: (phase.start_ns // MS, phase.end_ns // MS) for phase in phases}


def test_phases_follow_each_other():
    assert in_ms(phases_of(exchange(), 121 * MS)) == {
        "decode": (100, 107), "tokenise": (107, 109), "queue": (109, 112), "infer": (112, 120), "encode": (120, 121),
    }  # fmt: skip


def test_wait_for_a_model_is_told_from_decoding():
    phases = in_ms(phases_of(exchange(decoded_ms=102), 121 * MS))
    assert phases["decode"] == (100, 102)
    assert phases["load"] == (102, 107)


def test_rounds_of_an_agent_are_not_called_a_load():
    phases = in_ms(phases_of(exchange(decoded_ms=102, timing=msgspec.structs.replace(TIMES, num_earlier=2)), 121 * MS))
    assert phases["rounds"] == (102, 107)
    assert "load" not in phases


def test_request_that_failed_early_has_its_first_phase_only():
    assert in_ms(phases_of(exchange(decoded_ms=0, timing=None), 104 * MS)) == {"decode": (100, 104)}
    assert in_ms(phases_of(exchange(decoded_ms=103, timing=None), 160 * MS)) == {"decode": (100, 103)}


GENERAL, OWN = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL, OWN_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.mark.parametrize(
    ("settings", "variables", "address"),
    [
        ({}, {}, "localhost:4317"),
        ({"protocol": "http"}, {}, "http://localhost:4318/v1/traces"),
        ({"endpoint": "http://c:1/"}, {}, "c:1"),
        ({"protocol": "http", "endpoint": "http://c:1/"}, {}, "http://c:1/v1/traces"),
        ({"protocol": "http", "endpoint": "https://c/otlp"}, {}, "https://c/otlp/v1/traces"),
        ({"protocol": "http", "endpoint": "https://c/otlp/v1/traces"}, {}, "https://c/otlp/v1/traces"),
        ({}, {GENERAL: "http://v:1"}, "v:1"),
        ({}, {GENERAL: "http://v:1/otlp", PROTOCOL: "http/protobuf"}, "http://v:1/otlp/v1/traces"),
        ({}, {GENERAL: "http://v:1", OWN: "http://w:1/x", OWN_PROTOCOL: "http/protobuf", PROTOCOL: "grpc"}, "http://w:1/x"),
        ({"endpoint": "http://c:1"}, {GENERAL: "http://v:1", OWN: "http://w:1"}, "c:1"),
        ({"protocol": "grpc"}, {GENERAL: "http://v:1", PROTOCOL: "http/protobuf"}, "v:1"),
    ],
)  # fmt: skip
def test_spans_go_where_the_settings_or_else_the_variables_of_opentelemetry_say(
    settings, variables, address, monkeypatch
):
    for name in (GENERAL, OWN, PROTOCOL, OWN_PROTOCOL):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    exporter = _open_exporter(Tracing(**settings))
    assert exporter._endpoint == address
    exporter.shutdown()
