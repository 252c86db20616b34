"""Prometheus metrics: vLLM's names and labels, and `octavo:` ones for what vLLM does not have.

What the engine exports is declared in `engine.stats`, and by the policy: gauges and counters are
read from the engine's last snapshot when they are asked for, so they cannot go stale; histograms
are fed with the samples that come with each snapshot. Requests and tokens are counted here, from
what clients were given, so they equal the sum of `usage`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from octavo.core.plan import RunnerLimits
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.messages import Stats
from octavo.engine.stats import COUNT_BUCKETS, EngineStats, Observations, exported
from octavo.errors import QueueFullError
from octavo.outputs import FinishReason


def _full(name: str) -> str:
    return name if ":" in name else f"vllm:{name}"


_HISTOGRAMS = exported(Observations)
_STATISTICS = exported(EngineStats)
_COMPUTED, _FOUND = "local_compute", "local_cache_hit"


@dataclass(slots=True)
class Totals:
    """What was served since the start, for the last line of the log."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Metrics:
    """The registry of one server."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self.last: EngineStats | None = None
        self._capabilities: EngineCapabilities | None = None
        self.registry = CollectorRegistry()
        self.totals = Totals()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._histograms = [
            (metric.field, self._histogram(metric.name, metric.help, metric.buckets))
            for metric in _HISTOGRAMS
        ]
        self._params_n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._params_max = self._histogram(
            "request_params_max_tokens", "max_tokens.", COUNT_BUCKETS
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._cached = self._counter("prompt_tokens_cached", "Of these, found in the cache.")
        self._by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not found in the cache.",
            COUNT_BUCKETS,
        )
        self._generated = self._counter("generation_tokens", "Tokens that clients were given.")
        self._success = self._counter("request_success", "Choices by their end.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Refused requests.", "reason")
        # At 0 from the start: an alert on a rate misses a series that begins at 1.
        for source in (_COMPUTED, _FOUND):
            self._by_source.labels(**self._labels, source=source)
        for reason in get_args(FinishReason):
            self._success.labels(**self._labels, finished_reason=reason)
        self._rejected.labels(**self._labels, reason=QueueFullError.code)
        self._received = self._counter("octavo:requests_received", "Requests that were admitted.")
        self.registry.register(_Snapshot(self))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(
            _full(name), text, list(self._labels), buckets=buckets, registry=self.registry
        )
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str, *extra: str) -> Counter:
        metric = Counter(_full(name), text, [*self._labels, *extra], registry=self.registry)
        return metric if extra else metric.labels(**self._labels)

    def loaded(self, capabilities: EngineCapabilities) -> None:
        """An engine is ready. Its policy's gauges are shown from now on."""
        self._capabilities = capabilities

    def update(self, report: Stats) -> None:
        """A snapshot came from the engine."""
        self.last = report.stats
        for name, histogram in self._histograms:
            for value in getattr(report.fresh, name):
                histogram.observe(value)

    def received(self, n: int, max_tokens: int) -> None:
        self._received.inc()
        self.totals.requests += 1
        self._params_n.observe(n)
        self._params_max.observe(max_tokens)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(**self._labels, reason=reason).inc()

    def answered(self, prompt: int, cached: int, generated: int) -> None:
        """Tokens of one request, whole or as far as it came."""
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._by_source.labels(**self._labels, source=_COMPUTED).inc(prompt - cached)
        self._by_source.labels(**self._labels, source=_FOUND).inc(cached)
        self._computed.observe(prompt - cached)
        self._generated.inc(generated)
        self.totals.prompt_tokens += prompt
        self.totals.generated_tokens += generated

    def ended(self, reason: FinishReason, choices: int = 1) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc(choices)

    def text(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def snapshot(self) -> Iterator[Metric]:
        """What comes from the engine's last snapshot."""
        for metric in sorted(_STATISTICS, key=lambda metric: metric.kind == "counter"):
            value = getattr(self.last, metric.field, None) or 0
            yield self._family(_full(metric.name), metric.help, value, metric.kind == "counter")
        yield self._waiting_by_reason(self.last.waiting if self.last else 0)
        if self._capabilities:
            policy = re.sub(r"[^a-z0-9]", "_", self._capabilities.scheduler.lower())
            now = self.last.policy if self.last else {}
            for gauge in self._capabilities.gauges:
                name, value = f"octavo:{policy}_{gauge.name}", now.get(gauge.name, gauge.value)
                yield self._family(name, gauge.help, value, gauge.counter)
            yield self._cache_info(self._capabilities.limits)

    def _family(self, name: str, text: str, value: float, counter: bool) -> Metric:
        kind = CounterMetricFamily if counter else GaugeMetricFamily
        metric = kind(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _waiting_by_reason(self, waiting: int) -> Metric:
        """All wait for room: nothing is deferred to a remote transfer here."""
        metric = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to be scheduled, by reason.",
            labels=[*self._labels, "reason"],
        )
        for reason, value in (("capacity", waiting), ("deferred", 0)):
            metric.add_metric([*self._labels.values(), reason], value)
        return metric

    def _cache_info(self, limits: RunnerLimits) -> Metric:
        config = {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.num_blocks - 1),
            "num_cpu_blocks": str(limits.num_host_blocks),
            "cache_dtype": limits.kv_cache_dtype,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*self._labels, *config]
        )
        info.add_metric([*self._labels.values(), *config.values()], 1)
        return info


class _Snapshot:
    """The part of the registry that is made when it is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.snapshot()
