"""Spans for OpenTelemetry, where the extra ``tracing`` is installed and an endpoint is named.

The SDK exports from a thread of its own and drops what it cannot; nothing here waits for it but :meth:`Tracer.close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmgw.errors import OperatorError
from llmgw.settings.document import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as OtelSpan

_FLUSH_MS = 2000


class Span:
    """A span under way. ``fields`` are lines of a head that tell others to go on from it (W3C Trace Context)."""

    __slots__ = ("_span", "fields")

    def __init__(self, span: OtelSpan, fields: bytes) -> None:
        self._span = span
        self.fields = fields

    def end(self, facts: Mapping[str, object], *, failed: bool) -> None:
        """It is over, and this is what was found."""
        from opentelemetry.trace import StatusCode

        for name, value in facts.items():
            if isinstance(value, str | int | float):
                self._span.set_attribute(f"llmgw.{name}", value)
        status = facts.get("status")
        if isinstance(status, int) and status:
            self._span.set_attribute("http.response.status_code", status)
        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Tracer:
    """Makes spans of one service. Raises :class:`OperatorError` where the extra is not installed.

    ``processor`` takes them instead of an exporter to the endpoint.
    """

    def __init__(self, config: Tracing, service: str, processor: SpanProcessor | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as missing:
            raise OperatorError(
                "tracing", f"needs {missing.name}, which is not installed", "install llmgw[tracing]"
            ) from missing
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.share)),
            resource=Resource.create({"service.name": service}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            processor or BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint, timeout=5))
        )
        self._tracer = self._provider.get_tracer("llmgw")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, fields: Mapping[str, str]) -> Span:
        """A span below the one that these fields of a request tell of, or a new trace."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(name, self._propagator.extract(dict(fields)), SpanKind.SERVER)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return Span(span, "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode("latin-1"))

    def close(self) -> None:
        """Send what is left, for two seconds at most. Blocking."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
