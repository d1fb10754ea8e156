"""Where Serve sends spans: an OTLP collector. Needs the extra `[tracing]`.

For RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH, or `exporter_import_path` of Serve's TracingConfig: `dflash2_ray.serving.otlp:span_processors`.
The collector is OpenTelemetry's own to configure (OTEL_EXPORTER_OTLP_ENDPOINT and the others).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


def span_processors() -> list["SpanProcessor"]:
    """Spans in batches over HTTP. Raises ImportError naming the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(f"sending spans needs `pip install 'dflash2-ray[tracing]'`: {error}") from None
    return [BatchSpanProcessor(OTLPSpanExporter())]
