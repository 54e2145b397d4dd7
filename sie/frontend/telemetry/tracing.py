"""Exports traces over OTLP, one span for each request and each of its phases. Must be imported only if tracing is on.

Traces need no measurements of their own: the spans are written after a request from the times that it already has. The
module imports OpenTelemetry (`ringserve[otel]`). Sources: W3C Trace Context; SIE API reference, section 13; OpenTelemetry's
semantic conventions for HTTP, RPC and generative AI.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any, Final, NamedTuple, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sie import __version__
from sie.config.sections import Tracing
from sie.frontend.http.response import Headers
from sie.frontend.http.routing import Route
from sie.frontend.telemetry.metrics import Exemplars
from sie.ipc.messages import Launch
from sie.values.errors import SieError
from sie.values.inference import Timing

Attributes = dict[str, str | int | float]
_EXPORTER_LOGS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)  # fmt: skip
_HTTP_PATH: Final = "/v1/traces"
_EXPORT_TIMEOUT_S: Final = 5.0
_EXPORT_EVERY_MS: Final = 1000
_MAX_WAITING_SPANS: Final = 16_384
_CLOSE_TIMEOUT_S: Final = 2.0
_COMPLAIN_EVERY_S: Final = 60.0
_OPERATIONS: Final = {
    "/v1/completions": "text_completion", "/v1/generate/{model}": "text_completion",
    "/v2/models/{model}/generate": "text_completion", "/v2/models/{model}/generate_stream": "text_completion",
    "generate": "chat", "encode": "embeddings", "embeddings": "embeddings",
}  # fmt: skip
"""`gen_ai.operation.name` of a route, by its template or else its label."""
_MIN_LOAD_NS: Final = 1_000_000
"""A longer time between decoding and tokenising becomes a phase: the request waited for its model, or tools ran."""


class Exchange(Protocol):
    """The fields of a finished request that a trace reads. Times are CLOCK_MONOTONIC."""

    scope: Any
    headers: Any
    began_ns: int
    decoded_ns: int
    route: Route | None
    known_model: str
    body_bytes: int
    timing: Timing | None
    input_tokens: int
    output_tokens: int


class Phase(NamedTuple):
    """One part of a request's time, in nanoseconds of CLOCK_MONOTONIC."""

    name: str
    start_ns: int
    end_ns: int


def phases_of(exchange: Exchange, now_ns: int) -> list[Phase]:
    """Return the phases of a request, in order and without overlap. A failed request has only the first ones.

    decode: from its headers to the typed request; load: until its model was loaded, or of an agent's last round rounds:
    those before it, with their tools; tokenise; queue: until its first step; infer: until its reply was read, including
    other requests' steps between its own; encode: to the response's bytes.
    """
    began_ns, decoded_ns, timing = exchange.began_ns, exchange.decoded_ns, exchange.timing
    if not decoded_ns:
        return [Phase("decode", began_ns, now_ns)]
    phases = [Phase("decode", began_ns, decoded_ns)]
    if timing is None:
        return phases
    tokenise_ns = max(decoded_ns, timing.submitted_ns - int(timing.tokenization_ms * 1e6))
    started_ns = timing.submitted_ns + int(timing.queue_ms * 1e6)
    read_ns = max(started_ns, began_ns + int(timing.total_ms * 1e6))
    if tokenise_ns - decoded_ns >= _MIN_LOAD_NS:
        phases.append(Phase("rounds" if timing.num_earlier else "load", decoded_ns, tokenise_ns))
    return [
        *phases,
        Phase("tokenise", tokenise_ns, timing.submitted_ns),
        Phase("queue", timing.submitted_ns, started_ns),
        Phase("infer", started_ns, read_ns),
        Phase("encode", read_ns, now_ns),
    ]


class RequestTracing:
    """The traces of one frontend process."""

    def __init__(self, settings: Tracing, launch: Launch) -> None:
        self._server: Attributes = (
            {} if launch.listen_fd >= 0 else {"server.address": launch.host, "server.port": launch.port}
        )
        exporter = _open_exporter(settings)
        for name in _EXPORTER_LOGS:
            logging.getLogger(name).addFilter(_RarelyFilter())
        resource = Resource.create(
            {"service.version": __version__, "service.instance.id": f"{socket.gethostname()}/frontend-{launch.slot}"}
        )
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({"service.name": "sie"}))
        sampler = ParentBasedTraceIdRatio(settings.share)
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_WAITING_SPANS, schedule_delay_millis=_EXPORT_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("sie", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self.exemplars = Exemplars()

    def record(self, exchange: Exchange, status: int, headers: Headers, error: SieError | None) -> Headers:
        """Write the trace of a finished inference request. Return its headers, with the trace id if it is recorded.

        A valid `traceparent` is continued and decides about recording. Otherwise the configured share decides.
        """
        route = exchange.route
        if route is None or not route.label:
            return headers
        now_ns = time.monotonic_ns()
        to_unix_ns = time.time_ns() - now_ns
        span = self._tracer.start_span(
            _name(exchange, route),
            self._parent(exchange.headers),
            SpanKind.SERVER,
            start_time=exchange.began_ns + to_unix_ns,
        )
        if not span.is_recording():
            return headers
        span.set_attributes({**self._server, **_attributes(exchange, route, status)})
        if error is not None:
            span.set_attribute("error.type", error.code)
            if status >= 500:
                span.set_status(StatusCode.ERROR, error.message)
        context = set_span_in_context(span, Context())
        for phase in phases_of(exchange, now_ns):
            child = self._tracer.start_span(phase.name, context, start_time=phase.start_ns + to_unix_ns)
            child.end(phase.end_ns + to_unix_ns)
        span.end(now_ns + to_unix_ns)
        own = span.get_span_context()
        trace_id = f"{own.trace_id:032x}"
        if error is None and exchange.timing is not None and exchange.known_model:
            self.exemplars.add(exchange.known_model, route.label, (now_ns - exchange.began_ns) / 1e9, trace_id)
        return [*headers, ("x-trace-id", trace_id), ("traceparent", f"00-{trace_id}-{own.span_id:016x}-01")]

    def close(self) -> None:
        """Send the waiting spans, for up to 2 s, so that a dead collector does not block the exit."""
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        sender.join(_CLOSE_TIMEOUT_S)

    def _parent(self, headers: Any) -> Context:
        traceparent = headers.get("traceparent")
        if traceparent is None:
            return Context()
        carrier = {"traceparent": traceparent, "tracestate": headers.get("tracestate") or ""}
        return self._propagator.extract(carrier, Context())


def _open_exporter(settings: Tracing) -> SpanExporter:
    """Return the exporter of these settings. Without an endpoint it reads OpenTelemetry's variables, and has their default."""
    if settings.protocol_in(os.environ) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(settings.endpoint or None, timeout=_EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    base = settings.endpoint.rstrip("/").removesuffix(_HTTP_PATH)
    return HttpExporter(f"{base}{_HTTP_PATH}" if base else None, timeout=_EXPORT_TIMEOUT_S)


def _is_grpc(exchange: Exchange) -> bool:
    return exchange.scope.proto == "grpc"


def _name(exchange: Exchange, route: Route) -> str:
    return route.template[1:] if _is_grpc(exchange) else f"{exchange.scope.method} {route.template}"


def _protocol_attributes(exchange: Exchange, route: Route, status: int) -> Attributes:
    if _is_grpc(exchange):
        service, _, method = route.template[1:].partition("/")
        return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    return {
        "http.request.method": exchange.scope.method,
        "http.route": route.template,
        "http.response.status_code": status,
        "http.request.body.size": exchange.body_bytes,
    }


def _attributes(exchange: Exchange, route: Route, status: int) -> Attributes:
    attributes = {**_protocol_attributes(exchange, route, status), **_model_attributes(exchange, route)}
    if exchange.timing is not None:
        attributes["sie.inference_ms"] = exchange.timing.inference_ms
    return attributes


def _model_attributes(exchange: Exchange, route: Route) -> Attributes:
    """Return the attributes of the model's work, for the routes that generate or embed also by the conventions' names."""
    attributes: Attributes = {"sie.endpoint": route.label}
    if exchange.known_model:
        attributes["sie.model"] = exchange.known_model
    operation = _OPERATIONS.get(route.template) or _OPERATIONS.get(route.label)
    if operation is None:
        return attributes
    attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "sie"}
    if exchange.known_model:
        attributes |= {"gen_ai.request.model": exchange.known_model, "gen_ai.response.model": exchange.known_model}
    if exchange.input_tokens:
        attributes["gen_ai.usage.input_tokens"] = exchange.input_tokens
    if exchange.output_tokens:
        attributes["gen_ai.usage.output_tokens"] = exchange.output_tokens
    return attributes


class _RarelyFilter(logging.Filter):
    """Passes one record a minute, because the exporter logs every failed attempt while its collector is down."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._next_s:
            return False
        self._next_s = record.created + _COMPLAIN_EVERY_S
        return True
