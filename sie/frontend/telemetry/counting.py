"""Counts each finished request, over HTTP and gRPC alike. Must be called exactly once for each request."""

from __future__ import annotations

import time
from typing import Final

from sie.frontend.http.exchange import Exchange
from sie.frontend.http.routing import Route
from sie.frontend.telemetry.metrics import UNKNOWN_MODEL, FrontendMetrics
from sie.values.errors import ClientGone, Overloaded, SieError

_NO_REQUEST: Final = frozenset({204, 401, 403, 405, 429})
"""Requests with these statuses never reached a model, so `sie_requests_total` does not count them."""

_BODY_NAMES_MODEL: Final = frozenset({"/v1/messages/count_tokens", "/v1/responses/input_tokens"})
"""Routes without a label whose requests name their model in the body, which may be unreadable."""
_UNMATCHED: Final = "<unmatched>"


def count_exchange(metrics: FrontendMetrics, exchange: Exchange, status: int, error: SieError | None) -> None:
    """Count a finished exchange, whether it was answered or its client left."""
    route, timing, model = exchange.route, exchange.timing, exchange.known_model
    total_s = (time.monotonic_ns() - exchange.began_ns) / 1e9
    if exchange.cuts and error is None and route is not None and model:
        metrics.record_cuts(model, route.label, len(exchange.cuts))
    if timing is not None and error is None and route is not None and route.label and model:
        metrics.record_served(
            exchange.scope.method, route.template, route.label, model, status, total_s,
            exchange.body_bytes, timing,
        )  # fmt: skip
        return
    if not model:
        if exchange.scope.method == "OPTIONS" or _is_housekeeping(route):
            return
        # An unreadable body is refused before its model is looked up, but the path may name the model.
        is_counted = route is not None and (route.label or route.template in _BODY_NAMES_MODEL)
        model = exchange.model or UNKNOWN_MODEL if is_counted else ""
    metrics.record_http(
        exchange.scope.method, route.template if route is not None else _UNMATCHED, model, status,
        duration_s=total_s, body_bytes=exchange.body_bytes,
    )  # fmt: skip
    if error is not None and error.retryable:
        metrics.record_refusal(error.code)
    if route is None or not route.label or status in _NO_REQUEST:
        return
    outcome = "success" if error is None else _outcome_of(error)
    model = model or UNKNOWN_MODEL
    if timing is None:
        metrics.record_request(model, route.label, outcome, total_s)
    else:
        metrics.record_request(
            model, route.label, outcome, total_s, queue_s=timing.queue_ms / 1e3,
            tokenize_s=timing.tokenization_ms / 1e3, inference_s=timing.inference_ms / 1e3,
        )  # fmt: skip


def _is_housekeeping(route: Route | None) -> bool:
    """Tell whether a route is not counted, such as those of health. Source: generation API reference, section 11."""
    return route is not None and (route.need == "open" or route.template == "/metrics")


def _outcome_of(error: SieError) -> str:
    """Return the outcome label of a failed request. A client that left is not counted as a server error."""
    if isinstance(error, ClientGone):
        return "cancelled"
    return "queue_full" if isinstance(error, Overloaded) else "error"
