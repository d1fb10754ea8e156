"""Spans reach a collector as Serve would send them: by the import path, in batches, over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import TracerProvider
from ray.serve._private.tracing_utils import _load_span_processors

PATH = "dflash2_ray.serving.otlp:span_processors"


@pytest.fixture
def collector():
    """A local HTTP server; `received`: (path, body) of each POST."""
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    server.received = received
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_serves_import_path_sends_spans(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    provider = TracerProvider()
    for processor in _load_span_processors(PATH, "unused"):
        provider.add_span_processor(processor)
    provider.get_tracer("test").start_span("chat some-model").end()
    assert provider.force_flush(10_000)
    provider.shutdown()
    ((path, body),) = collector.received
    assert path == "/v1/traces"
    assert b"chat some-model" in body


def test_without_the_extra_the_error_names_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ImportError, match=r"dflash2-ray\[tracing\]"):
        _load_span_processors(PATH, "unused")
