"""The access log: what a line says, which requests get one, and what it never says."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sie.frontend.routes.table import TABLE
from sie.frontend.telemetry.access_log import AccessLog
from sie.values.errors import BadRequest, SieError
from sie.values.inference import Timing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def ended(path: str = "/v1/encode/a/b", **changes: Any) -> Any:
    found = TABLE.match(path)
    exchange = SimpleNamespace(
        scope=SimpleNamespace(method="POST", path=path), headers={}, began_ns=time.monotonic_ns() - 5_000_000,
        holder=None, route=found.route if found else None, known_model="a/b", request_id="", body_bytes=120, num_items=2,
        timing=Timing(total_ms=4.0, queue_ms=1.0, inference_ms=2.5),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(exchange, name, value)
    return exchange


def facts(caplog: pytest.LogCaptureFixture, exchange: Any, status: int = 200, error: SieError | None = None) -> dict:
    caplog.clear()
    with caplog.at_level(logging.INFO, "sie.access"):
        AccessLog(1.0).record(exchange, status, [], error)
    (record,) = caplog.records
    plain = vars(logging.makeLogRecord({}))
    return {name: value for name, value in vars(record).items() if name not in plain and name != "message"}


def test_a_line_describes_its_request(caplog):
    said = facts(caplog, ended(headers={"x-request-id": "r-1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}))
    assert said.pop("total_ms") >= 5.0
    assert said == {
        "method": "POST", "route": "/v1/encode/{model}", "status": 200, "model": "a/b", "items": 2, "body_bytes": 120,
        "queue_ms": 1.0, "inference_ms": 2.5, "request_id": "r-1", "trace_id": TRACE,
    }  # fmt: skip


def test_a_line_says_whose_key_it_was(caplog):
    assert facts(caplog, ended(holder=SimpleNamespace(key=SimpleNamespace(name="ingest"))))["key"] == "ingest"


def test_a_failure_says_its_code_and_not_its_message(caplog):
    said = facts(caplog, ended(timing=None), 400, BadRequest("the text 'secret' is wrong"))
    assert (said["status"], said["code"]) == (400, "INVALID_INPUT")
    assert "secret" not in str(said)


def test_a_path_that_a_client_made_up_is_not_written(caplog):
    said = facts(caplog, ended("/secret/path", known_model=""), 404)
    assert (said["method"], said["route"]) == ("ANY", "unmatched")
    assert "secret" not in str(said)


@pytest.mark.parametrize("sent", ["", "a b", "a\nb", "x" * 129, "é"])
def test_a_request_without_a_fit_id_gets_one_and_its_client_hears_it(sent):
    headers = AccessLog(1.0).record(ended(headers={"x-request-id": sent}), 200, [("a", "b")], None)
    assert headers[0] == ("a", "b")
    assert headers[1][0] == "x-request-id"
    assert headers[1][1].startswith("req_")


@pytest.mark.parametrize(
    "sent", ["", "00", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE.upper()}-00f067aa0ba902b7-01"]
)
def test_a_malformed_trace_is_left_out(caplog, sent):
    assert "trace_id" not in facts(caplog, ended(headers={"traceparent": sent}))


def test_a_share_of_the_requests_is_written(caplog):
    drawn = iter([0.0, 0.29, 0.3, 0.99])
    log = AccessLog(0.3, lambda: next(drawn))
    with caplog.at_level(logging.INFO, "sie.access"):
        told = [bool(log.record(ended(), 200, [], None)) for _ in range(4)]
    assert told == [True, True, False, False]
    assert len(caplog.records) == 2
