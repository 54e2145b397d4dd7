"""How a request's times become phases."""

from __future__ import annotations

from types import SimpleNamespace

from sie.frontend.telemetry.tracing import phases_of
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


def test_request_that_failed_early_has_its_first_phase_only():
    assert in_ms(phases_of(exchange(decoded_ms=0, timing=None), 104 * MS)) == {"decode": (100, 104)}
    assert in_ms(phases_of(exchange(decoded_ms=103, timing=None), 160 * MS)) == {"decode": (100, 103)}
