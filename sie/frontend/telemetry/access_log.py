"""Writes a log line for each finished request, or for a share of them. Must never log the content of a request or answer.

Lines have level info and come from the logger `sie.access`, with these extras: `method`, `route` (the template, never
the path), `status`, `code` (of an error), `key` (the name of an API key), `model` (a known one), `items`, `body_bytes`,
`total_ms` and the phases that took time, `request_id`, `trace_id` (of the request's own trace, or of a W3C
`traceparent`).
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from sie.frontend.access.key_use import KeyHolder
from sie.frontend.http.response import Headers
from sie.frontend.http.routing import Route
from sie.runtime.logs import get_logger
from sie.values.errors import SieError
from sie.values.inference import Timing

_log = get_logger("sie.access")
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Exchange(Protocol):
    """The fields of a finished request that the log reads."""

    scope: Any
    headers: Any
    began_ns: int
    holder: KeyHolder | None
    route: Route | None
    known_model: str
    request_id: str
    body_bytes: int
    num_items: int
    timing: Timing | None


class AccessLog:
    """The access log of one process."""

    def __init__(self, share: float, draw: Callable[[], float] = random.random) -> None:
        """Log a share of requests, 0 to 1. draw returns a random number from 0 to below 1."""
        self._share = share
        self._draw = draw

    def record(self, exchange: Exchange, status: int, headers: Headers, error: SieError | None) -> Headers:
        """Write the line of a request if it is in the share. Return its headers, with `x-request-id` if it was logged.

        The id is the client's or a new one.
        """
        if self._draw() >= self._share:
            return headers
        request_id = exchange.request_id or request_id_of(exchange.headers)
        trace_id = dict(headers).get("x-trace-id") or _trace_id(exchange.headers.get("traceparent"))
        _log.info("request", extra=_facts(exchange, status, error, request_id, trace_id))
        return headers if exchange.request_id else [*headers, ("x-request-id", request_id)]


def request_id_of(headers: Any) -> str:
    """Return the `x-request-id` that a client sent, or a new one."""
    sent = headers.get("x-request-id") or ""
    return sent if _REQUEST_ID.fullmatch(sent) else f"req_{secrets.token_hex(16)}"


def id_headers(exchange: Exchange) -> Headers:
    """Set the request's id, and return the headers with it. Anthropic's client reads a separate header."""
    exchange.request_id = exchange.request_id or request_id_of(exchange.headers)
    headers = [("x-request-id", exchange.request_id)]
    if exchange.route is not None and exchange.route.envelope == "anthropic":
        headers.append(("request-id", exchange.request_id))
    return headers


def _facts(exchange: Exchange, status: int, error: SieError | None, request_id: str, trace_id: str) -> dict[str, Any]:
    timing = exchange.timing
    total_ms = (time.monotonic_ns() - exchange.began_ns) / 1e6
    phases = {} if timing is None else {
        "queue_ms": timing.queue_ms, "tokenization_ms": timing.tokenization_ms, "inference_ms": timing.inference_ms,
        "postprocessing_ms": timing.postprocessing_ms,
    }  # fmt: skip
    facts = {
        "method": exchange.scope.method if exchange.route is not None else "ANY",
        "route": exchange.route.template if exchange.route is not None else "unmatched",
        "status": status,
        "code": error.code if error is not None else "",
        "key": exchange.holder.key.name if exchange.holder is not None else "",
        "model": exchange.known_model,
        "items": exchange.num_items,
        "body_bytes": exchange.body_bytes,
        "total_ms": round(total_ms, 3),
        **{name: round(ms, 3) for name, ms in phases.items()},
        "request_id": request_id,
        "trace_id": trace_id,
    }
    return {name: fact for name, fact in facts.items() if fact not in ("", 0)}


def _trace_id(traceparent: str | None) -> str:
    """Return the trace id, or an empty string if it is not valid. Source: W3C Trace Context, section 3.2."""
    match = _TRACEPARENT.match(traceparent or "")
    return match[1] if match else ""
