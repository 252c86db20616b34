"""OpenTelemetry: one span for each prompt that a client has asked an answer to.

The span's name and attributes are vLLM's, with those of OpenTelemetry's conventions for generative
AI beside them; it belongs to the trace of the request's `traceparent`, if it has one. Prompts and
answers are never in it. It is made when the request has ended, and sent by a thread of
OpenTelemetry's SDK, which drops spans when they cannot be delivered: nothing here waits for a
collector. The SDK is the extra `octavo[otel]`, and is not imported without an endpoint.

What the engine does in between is `--trace`'s (`octavo.engine.trace`).
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from octavo.core.submission import Submission
from octavo.errors import ConfigError
from octavo.log import get_logger
from octavo.outputs import FinishReason, RequestMetrics
from octavo.server.options import ServerConfig
from octavo.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = get_logger(__name__)

NAME = "llm_request"
_PATH = "/v1/traces"  # of OTLP over HTTP, where the endpoint has none
_CLOSE_SECONDS = 2.0  # for the spans that were not sent yet
_SCALE = 10**9


class Answered(NamedTuple):
    """What is known of a prompt when its request has ended.

    model, response_id: as the answer has them. generated, cached: tokens. reasons: of the choices.
    times: None where no choice has ended. error: what the client was told.
    """

    model: str
    response_id: str
    submission: Submission
    max_tokens: int
    generated: int
    cached: int
    reasons: Sequence[FinishReason]
    times: RequestMetrics | None
    engine: int
    error: Exception | None


def check_spans(options: ServerConfig) -> None:
    """Raise ConfigError where spans are asked for and OpenTelemetry is not installed."""
    if options.otlp_traces_endpoint is not None:
        _import_exporter()


def _import_exporter() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry, which cannot be imported "
            f"({error}): pip install 'octavo[otel]'"
        ) from error
    return OTLPSpanExporter


class Spans:
    """Makes and sends spans to `endpoint`. exporter: in place of the one over HTTP, for tests."""

    def __init__(self, endpoint: str, exporter: "SpanExporter | None" = None) -> None:
        kind = _import_exporter()
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # It would log every attempt; `_Delivery` says what changes.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        own = Resource({"service.name": "octavo", "service.version": __version__})
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        sender = kind(endpoint=_complete(endpoint)) if exporter is None else exporter
        delivery: Any = _Delivery(sender, endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(delivery))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch = time.time() - time.monotonic()

    def trace(self, headers: Mapping[str, str], kind: str) -> "RequestTrace":
        """Of a request with these headers, of which `traceparent` and `tracestate` say where it
        belongs. kind: what its answer's id begins with."""
        operation = "text_completion" if kind.startswith("cmpl") else "chat"
        return RequestTrace(self, self._propagator.extract(headers), operation)

    def add(self, parent: "Context", operation: str, answered: Answered) -> None:
        """A request has ended just now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.monotonic() + self._epoch
        arrival = answered.submission.arrival_time
        started = now if arrival is None else arrival + self._epoch
        span = self._tracer.start_span(
            NAME, context=parent, kind=SpanKind.SERVER, start_time=int(started * _SCALE)
        )
        span.set_attribute("gen_ai.operation.name", operation)
        span.set_attributes(_asked(answered))
        span.set_attributes(_given(answered))
        span.set_attributes(_latencies(answered, started, now))
        if (error := answered.error) is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)[:500]))
        times = answered.times
        if times is not None and times.first_token_time is not None:
            span.add_event("first token", timestamp=int(times.first_token_time * _SCALE))
        span.end(int(now * _SCALE))

    def close(self) -> None:
        """Send what is left, but wait no longer than a moment for a collector that is down."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


class RequestTrace(NamedTuple):
    """Where the spans of one request go."""

    spans: Spans
    parent: "Context"
    operation: str

    def add(self, answered: Answered) -> None:
        self.spans.add(self.parent, self.operation, answered)


class _Delivery:
    """An exporter that says once that spans cannot be delivered, and once that they can again."""

    def __init__(self, exporter: "SpanExporter", endpoint: str) -> None:
        self._exporter, self._endpoint = exporter, endpoint
        self._fails = False

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        from opentelemetry.sdk.trace.export import SpanExportResult

        reason = "it does not take them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - of whatever transport
            result, reason = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"[:200]
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            logger.warning(
                "spans cannot be delivered to %s (%s); they are dropped until they can",
                self._endpoint, reason,
            )  # fmt: skip
        elif self._fails and not fails:
            logger.info("spans are delivered to %s again", self._endpoint)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _complete(endpoint: str) -> str:
    """With the usual path, if it has none."""
    return endpoint.rstrip("/") + _PATH if urlsplit(endpoint).path in ("", "/") else endpoint


def _asked(answered: Answered) -> dict[str, Any]:
    submission, params = answered.submission, answered.submission.params
    found: dict[str, Any] = {
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": answered.model,
        "gen_ai.request.id": answered.response_id,
        "gen_ai.request.max_tokens": answered.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "octavo.engine": answered.engine,
        "octavo.engine.request_id": submission.request_id,  # of `--trace`
    }
    if params.top_k > 0:
        found["gen_ai.request.top_k"] = params.top_k
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    return found


def _given(answered: Answered) -> dict[str, Any]:
    prompt = len(answered.submission.token_ids)
    return {
        "gen_ai.response.id": answered.response_id,
        "gen_ai.response.model": answered.model,
        "gen_ai.response.finish_reasons": list(answered.reasons),
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": answered.generated,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": answered.generated,
        "gen_ai.usage.cache_read.input_tokens": answered.cached,
        "gen_ai.usage.num_sequences": answered.submission.params.n,
    }


def _latencies(answered: Answered, started: float, now: float) -> dict[str, float]:
    """Seconds. Without those of a stage that the request has not reached."""
    found = {"gen_ai.latency.e2e": now - started}
    times = answered.times
    if times is None or times.first_token_time is None:
        return found
    first, scheduled = times.first_token_time, times.first_scheduled_time
    last = times.finished_time or now
    found["gen_ai.latency.time_to_first_token"] = first - times.arrival_time
    found["gen_ai.latency.time_in_model_decode"] = last - first
    if scheduled is not None:
        found["gen_ai.latency.time_in_queue"] = scheduled - times.arrival_time
        found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
        found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    if times.preemptions:
        found["octavo.preemptions"] = times.preemptions
    return found
