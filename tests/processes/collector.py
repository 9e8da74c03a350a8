"""A receiver of traces: OTLP over HTTP on a free loopback port."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class Exported:
    """One span as received. `service` is the process's `service.name`."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    failed: bool
    service: str


class Collector:
    """Answers each export, and appends its spans to `spans`. `url` is for `OTEL_EXPORTER_OTLP_ENDPOINT`."""

    def __init__(self) -> None:
        self.spans: list[Exported] = []
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="collector", daemon=True).start()

    def of(self, trace_id: str) -> list[Exported]:
        """The spans of one trace."""
        return [each for each in list(self.spans) if each.trace_id == trace_id]

    def take(self, raw: bytes) -> None:
        """Record an export."""
        request = ExportTraceServiceRequest.FromString(raw)
        for of_process in request.resource_spans:
            resource = _values(of_process.resource.attributes)
            for scope in of_process.scope_spans:
                self.spans += [
                    Exported(
                        each.name,
                        each.trace_id.hex(),
                        each.span_id.hex(),
                        each.parent_span_id.hex(),
                        _values(each.attributes),
                        each.status.code == each.status.STATUS_CODE_ERROR,
                        resource["service.name"],
                    )
                    for each in scope.spans
                ]

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        """Take an export to `/v1/traces`."""
        assert self.path == "/v1/traces"
        self.server.collector.take(self.rfile.read(int(self.headers["content-length"])))
        body = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
