"""A collector of OpenTelemetry: takes OTLP over HTTP (protobuf), and keeps the decoded spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


class Received(NamedTuple):
    """A span as it has arrived. Ids are in hexadecimal; `parent` is empty for the first span of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int  # 1: internal, 3: client
    start_us: int
    end_us: int
    attributes: dict[str, Any]
    status: int  # 0: unset, 2: error
    message: str
    service: str


class Collector:
    """Listens on a free port while it is open."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                collector._take(gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, raw: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(raw)
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                with self._lock:
                    self.spans.extend(_received(span, service) for span in scope.spans)


def _received(span: Any, service: str) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano // 1_000,
        span.end_time_unix_nano // 1_000,
        _attributes(span.attributes),
        span.status.code,
        span.status.message,
        service,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
