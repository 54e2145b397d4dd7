"""An OTLP collector for tests: takes what exporters send over gRPC or HTTP, and shows it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.process.harness import eventually


class Span(NamedTuple):
    """One span; ids in hex, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    service: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.port = 0
        self.http_port = 0
        self.paths: list[str] = []
        """The path of each export over HTTP."""

    def Export(self, request: Any, _context: Any) -> Any:
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self, request: Any) -> None:
        """Keep the spans of a request."""
        found = [
            _read(span, resource.resource)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found

    @property
    def endpoint(self) -> str:
        """What an exporter is told."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def http_endpoint(self) -> str:
        """What an exporter over HTTP is told."""
        return f"http://127.0.0.1:{self.http_port}"

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """Return what has come so far, by start; a request before its phases, one without length before its successor."""
        with self._lock:
            found = [span for span in self._spans if trace_id in (None, span.trace_id)]
        return sorted(found, key=lambda span: (span.start_ns, span.kind != 2, span.end_ns))

    def wait_trace(self, trace_id: str) -> tuple[Span, list[Span]]:
        """Return the span of a request and those of its phases; a request ends after its phases, and is sent last."""
        spans = eventually(
            lambda: [span for span in self.spans(trace_id) if span.kind == 2] and self.spans(trace_id), "the trace"
        )
        (root,) = [span for span in spans if span.kind == 2]
        return root, [span for span in spans if span is not root]


def _read(span: Any, resource: Any) -> Span:
    service = {pair.key: pair.value.string_value for pair in resource.attributes}.get("service.name", "")
    return Span(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano,
        span.end_time_unix_nano, span.kind, span.status.code == 2,
        {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}, service,
    )  # fmt: skip


def _handler_of(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_known = self.path.endswith("/v1/traces") and self.headers["content-type"] == "application/x-protobuf"
            collector.paths.append(self.path)
            if is_known:
                collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the overridden one
            """Write nothing."""

    return Handler


@contextlib.contextmanager
def start_collector() -> Iterator[Collector]:
    """Yield a collector that listens on a free port of this host."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    over_http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(collector))
    collector.http_port = over_http.server_port
    threading.Thread(target=over_http.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield collector
    finally:
        over_http.shutdown()
        over_http.server_close()
        server.stop(0).wait(5.0)
