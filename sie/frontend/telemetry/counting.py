"""Owns what is counted of a request once it is answered, over HTTP and over gRPC alike."""

from __future__ import annotations

import time
from typing import Final

from sie.frontend.http.exchange import Exchange
from sie.frontend.http.routes import COUNTED
from sie.frontend.telemetry.metrics import UNKNOWN_MODEL, FrontendMetrics
from sie.values.errors import ClientGone, Overloaded, SieError

_NO_REQUEST: Final = frozenset({204, 401, 403, 405, 429})
"""These never reached the model that their route is about, and are no requests in `sie_requests_total`."""

_TEXT_ROUTES: Final = frozenset(route for route in COUNTED.values() if route.endpoint == "generate")
"""Routes whose requests name their model in the body, perhaps in one that cannot be read."""

_HOUSEKEEPING: Final = frozenset({"/", "/health", "/metrics", "/docs", "/openapi.json", "/api-doc/openapi.json"})
"""Routes that are not counted, as no method OPTIONS is. Source: generation API reference, section 11."""
_UNMATCHED: Final = "<unmatched>"


def count_exchange(metrics: FrontendMetrics, exchange: Exchange, status: int, error: SieError | None) -> None:
    """Count an exchange that is over: answered, or left by its client."""
    route, timing, model = exchange.route, exchange.timing, exchange.known_model
    total_s = (time.monotonic_ns() - exchange.began_ns) / 1e9
    if timing is not None and error is None and route is not None and route.endpoint and model:
        metrics.record_served(
            exchange.scope.method, route.template, route.endpoint, model, status, total_s,
            exchange.body_bytes, timing,
        )  # fmt: skip
        return
    if not model:
        if exchange.scope.method == "OPTIONS" or (route is not None and route.template in _HOUSEKEEPING):
            return
        # A body that cannot be read is refused before its model is looked up; the path may have named it all the same.
        is_counted = route is not None and (route.endpoint or route in _TEXT_ROUTES)
        model = exchange.model or UNKNOWN_MODEL if is_counted else ""
    metrics.record_http(
        exchange.scope.method, route.template if route is not None else _UNMATCHED, model, status,
        duration_s=total_s, body_bytes=exchange.body_bytes,
    )  # fmt: skip
    if error is not None and error.retryable:
        metrics.record_refusal(error.code)
    if route is None or not route.endpoint or status in _NO_REQUEST:
        return
    outcome = "success" if error is None else _outcome_of(error)
    model = model or UNKNOWN_MODEL
    if timing is None:
        metrics.record_request(model, route.endpoint, outcome, total_s)
    else:
        metrics.record_request(
            model, route.endpoint, outcome, total_s, queue_s=timing.queue_ms / 1e3,
            tokenize_s=timing.tokenization_ms / 1e3, inference_s=timing.inference_ms / 1e3,
        )  # fmt: skip


def _outcome_of(error: SieError) -> str:
    """Return the word for a request that was not served; one whose client left is no error of ours."""
    if isinstance(error, ClientGone):
        return "cancelled"
    return "queue_full" if isinstance(error, Overloaded) else "error"
