"""Requests as spans of OpenTelemetry, sent over OTLP (HTTP): sizes and times, no text.

Nothing else imports OpenTelemetry, and nothing imports this unless requests are to be traced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import appliance
from appliance.service.generation import RequestStream
from appliance.service.interface import GenerationFailed, RequestTimes, Trace

TRACES_PATH: Final = "v1/traces"
LAST_SECONDS: Final = 3.0
"""How long spans that were not sent yet may hold up the end of the daemon."""

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""What is asked at a path, in the words of the conventions as far as they have one."""
UNNAMED: Final = "text_completion"
"""Everything else, and requests of batches."""

log = logging.getLogger(__name__)


class Traces:
    """A span for each request, made when it has ended, and one below it for each phase of its life.
    They are sent by a thread of its own from a bounded queue; what has no room there is lost."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        sample_ratio: float = 1.0,
        service_name: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """A request whose parent says whether it is sampled is as that says; of the others
        `sample_ratio` are. Without a name it is what `$OTEL_SERVICE_NAME` says, or `appliance`."""
        # It warns of every batch that cannot be sent, and of every span that has no room.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._wall_clock = wall_clock
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=_resource(service_name),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Patient(exporter)))
        self._tracer = self._provider.get_tracer("appliance", appliance.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(
        self,
        stream: RequestStream,
        times: RequestTimes,
        outcome: str,
        failure: GenerationFailed | None,
        now: float,
    ) -> None:
        """A request is over, at `now` of the daemon's clock. `outcome` is a finish reason, or the
        code of the failure."""
        trace = stream.request.trace
        carrier = {"traceparent": trace.parent} if trace is not None else {}
        attributes = _attributes(stream, times, outcome, now)
        shift = self._wall_clock() - now
        span = self._tracer.start_span(
            f"{_operation(trace)} {stream.request.model}",
            # Not below whatever this process may be doing.
            context=self._propagator.extract(carrier, context=context.Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_nanoseconds(stream.arrived + shift),
        )
        if failure is not None:
            span.set_attribute("error.type", failure.code)
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording():
            inside = set_span_in_context(span)
            for stretch in times.stretches:
                part = self._tracer.start_span(
                    stretch.phase, inside, start_time=_nanoseconds(stretch.began + shift)
                )
                part.end(_nanoseconds(stretch.ended + shift))
        span.end(_nanoseconds(now + shift))

    async def stop(self) -> None:
        """Send what there is, if that does not take long."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, LAST_SECONDS)


def otlp(endpoint: str) -> SpanExporter:
    """Sends to the collector at `endpoint`, without a path: `http://localhost:4318`. Without an
    endpoint it is where `$OTEL_EXPORTER_OTLP_ENDPOINT` says, or there. Headers, certificates and
    time limits are those of the environment, as OpenTelemetry specifies them."""
    if not endpoint:
        return OTLPSpanExporter()
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(TRACES_PATH) else f"{base}/{TRACES_PATH}")


class _Patient(SpanExporter):
    """Says once that spans cannot be sent, and once that they can be again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("traces cannot be sent to the collector, and are lost; is it running?")
        elif self._fails and not fails:
            log.warning("traces can be sent again")
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _resource(service_name: str) -> Resource:
    """What the configuration says goes before the environment, that before what we say."""
    ours = Resource({"service.name": "appliance", "service.version": appliance.__version__}).merge(
        OTELResourceDetector().detect()
    )
    return ours.merge(Resource({"service.name": service_name})) if service_name else ours


def _attributes(
    stream: RequestStream, times: RequestTimes, outcome: str, now: float
) -> Mapping[str, AttributeValue]:
    """By the conventions for generative AI; what those have no word for by vLLM's, or our own."""
    request = stream.request
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(request.trace),
        "gen_ai.provider.name": "appliance",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.id,
        "gen_ai.response.finish_reasons": [str(outcome)],
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": len(stream.output),
        "gen_ai.latency.e2e": now - stream.arrived,
        "gen_ai.latency.time_in_queue": times.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": times.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": times.decode_seconds,
        "appliance.load_seconds": times.load_seconds,
        "appliance.preempted_seconds": times.preempted_seconds,
        "appliance.preemptions": times.preemptions,
        "appliance.late_tokens": stream.late,
        "appliance.instances": list(times.instances),
        "appliance.class": request.request_class.value,
    }
    if request.trace is not None:
        found["url.path"] = request.trace.path
    if not request.pooled:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    if stream.first is not None:
        found["gen_ai.latency.time_to_first_token"] = stream.first - stream.arrived
    return found


def _operation(trace: Trace | None) -> str:
    return UNNAMED if trace is None else OPERATIONS.get(trace.path, UNNAMED)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
