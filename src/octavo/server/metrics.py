"""Prometheus metrics: vLLM's names and labels, and `octavo:` ones for what vLLM does not have.

Gauges are read from the engine's last snapshot when they are asked for, so they cannot go
stale; histograms are fed with the samples that come with each snapshot; counters of requests
and tokens are counted here, from what clients were given, so they equal the sum of `usage`.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from octavo.core.plan import RunnerLimits
from octavo.engine.messages import Stats
from octavo.engine.stats import EngineStats
from octavo.outputs import FinishReason

# vLLM's buckets, with finer ones in front: a small model on CPU is below vLLM's first.
_TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
_ITL = (
    .001, .002, .004, .006, .008, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
_SECONDS = (
    .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960, 1920, 7680,
)  # fmt: skip
_COUNTS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_STEP_TOKENS = tuple(2**e for e in range(15))

# vLLM's name -> (field of Observations, help, buckets)
_HISTOGRAMS: dict[str, tuple[str, str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("ttft", "Arrival to first token.", _TTFT),
    "inter_token_latency_seconds": ("itl", "Between tokens of one choice.", _ITL),
    "request_time_per_output_token_seconds": ("tpot", "Per token after the first.", _ITL),
    "e2e_request_latency_seconds": ("e2e", "Arrival to end.", _SECONDS),
    "request_queue_time_seconds": ("queue", "Arrival to first step.", _SECONDS),
    "request_prefill_time_seconds": ("prefill", "First step to first token.", _SECONDS),
    "request_decode_time_seconds": ("decode", "First token to last.", _SECONDS),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens per request.", _COUNTS),
    "request_generation_tokens": ("generation_tokens", "Tokens made per request.", _COUNTS),
    "iteration_tokens_total": ("step_tokens", "Tokens computed in a step.", _STEP_TOKENS),
}

# name -> (field of EngineStats, help). A name without a colon gets vLLM's prefix.
_GAUGES = {
    "num_requests_running": ("running", "Requests in the running batch."),
    "num_requests_waiting": ("waiting", "Requests that wait for their turn."),
    "kv_cache_usage_perc": ("kv_blocks_usage", "Held KV blocks, 0 to 1."),
    "octavo:kv_slots_usage": ("kv_usage", "Written KV slots, 0 to 1."),
    "octavo:kv_fragmentation": ("fragmentation", "Unwritten share of held slots, 0 to 1."),
    "octavo:kv_most_held_slots": ("most_held_slots", "Most KV slots held so far."),
    "octavo:kv_most_written_slots": ("most_written_slots", "Most KV slots written so far."),
    "octavo:kv_shared_slots": ("shared_slots", "KV slots that several requests hold."),
    "octavo:num_requests_swapped": ("swapped", "Requests whose KV is in host memory."),
    "octavo:swap_block_seconds": ("swap_block_seconds", "Seconds to copy one swapped block."),
    "octavo:device_utilization": ("gpu_utilization", "Share of time spent computing."),
    "octavo:generation_tokens_per_second": ("throughput", "Over the last 10 s."),
    "octavo:prompt_tokens_per_second": ("prompt_throughput", "Over the last 10 s."),
}
_ENGINE_COUNTERS = {
    "num_preemptions": ("preemptions", "Requests that gave up their blocks."),
    "prefix_cache_queries": ("queried_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "octavo:displaced": ("displaced", "Preemptions in favour of an earlier request."),
    "octavo:swapped_out_blocks": ("swapped_out_blocks", "KV blocks copied to the host."),
    "octavo:swapped_in_blocks": ("swapped_in_blocks", "KV blocks copied back."),
    "octavo:policy_errors": ("policy_errors", "Failures of the scheduling policy or weight_fn."),
    "octavo:steps": ("steps", "Steps of the engine."),
}
# name -> (field of SLOState, help): only with an SLOScheduler.
_SLO_GAUGES = {
    "octavo:slo_p99_itl_seconds": ("p99_itl", "P99 between tokens over the policy's window."),
    "octavo:slo_p99_ttft_seconds": ("p99_ttft", "P99 to the first token over that window."),
    "octavo:slo_step_share": ("share", "Share of the target that a step may take."),
    "octavo:slo_step_tokens": ("tokens", "Tokens that a step may compute now."),
    "octavo:slo_sequences": ("sequences", "Requests that may run now."),
}
_SLO_COUNTERS = {
    "octavo:slo_changes": ("changes", "Times that the share was changed."),
    "octavo:slo_shed": ("shed", "Requests turned away to hold the target."),
}


def _full(name: str) -> str:
    return name if ":" in name else f"vllm:{name}"


class Metrics:
    """The registry of one server."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last: EngineStats | None = None
        self._limits: RunnerLimits | None = None
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._histograms = {
            name: self._histogram(name, text, buckets)
            for name, (_, text, buckets) in _HISTOGRAMS.items()
        }
        self._params_n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._params_max = self._histogram("request_params_max_tokens", "max_tokens.", _COUNTS)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._cached = self._counter("prompt_tokens_cached", "Of these, found in the cache.")
        self._generated = self._counter("generation_tokens", "Tokens that clients were given.")
        self._success = self._counter("request_success", "Choices by their end.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Refused requests.", "reason")
        self._received = self._counter("octavo:requests_received", "Requests that were admitted.")
        self._registry.register(_Snapshot(self))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(
            _full(name), text, list(self._labels), buckets=buckets, registry=self._registry
        )
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str, *extra: str) -> Counter:
        metric = Counter(_full(name), text, [*self._labels, *extra], registry=self._registry)
        return metric if extra else metric.labels(**self._labels)

    def loaded(self, limits: RunnerLimits) -> None:
        self._limits = limits

    def update(self, report: Stats) -> None:
        """A snapshot came from the engine."""
        self._last = report.stats
        for name, (source, _, _) in _HISTOGRAMS.items():
            observe = self._histograms[name].observe
            for value in getattr(report.fresh, source):
                observe(value)

    def received(self, n: int, max_tokens: int) -> None:
        self._received.inc()
        self._params_n.observe(n)
        self._params_max.observe(max_tokens)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(**self._labels, reason=reason).inc()

    def answered(self, prompt: int, cached: int, generated: int) -> None:
        """Tokens of one request, whole or as far as it came."""
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._generated.inc(generated)

    def ended(self, reason: FinishReason, choices: int = 1) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc(choices)

    def text(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def snapshot(self) -> Iterator[Metric]:
        """What comes from the engine's last snapshot."""
        keys, values = list(self._labels), list(self._labels.values())
        stats = self._last
        slo = stats.slo if stats else None
        for owner, gauges, counters in (
            (stats, _GAUGES, _ENGINE_COUNTERS),
            (slo, _SLO_GAUGES if slo else {}, _SLO_COUNTERS if slo else {}),
        ):
            for kind, names in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
                for name, (source, text) in names.items():
                    metric = kind(_full(name), text, labels=keys)
                    metric.add_metric(values, getattr(owner, source, 0) or 0)
                    yield metric
        if self._limits:
            config = {
                "block_size": str(self._limits.block_size),
                "num_gpu_blocks": str(self._limits.num_blocks - 1),
                "num_cpu_blocks": str(self._limits.num_host_blocks),
                "cache_dtype": self._limits.kv_cache_dtype,
            }
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache.", labels=[*keys, *config]
            )
            info.add_metric([*values, *config.values()], 1)
            yield info


class _Snapshot:
    """The part of the registry that is made when it is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.snapshot()
