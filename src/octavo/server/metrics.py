"""Prometheus metrics: vLLM's names and labels, and `octavo:` ones for what vLLM does not have.

What the engine exports is declared in `engine.stats`, and by the policy: gauges and counters are
read from the engine's last snapshot when they are asked for, so they cannot go stale; histograms
are fed with the samples that come with each snapshot. Requests and tokens are counted here, from
what clients were given, so they equal the sum of `usage`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.client import Observer
from octavo.engine.messages import Stats
from octavo.engine.routing import REASONS, Reason
from octavo.engine.stats import COUNT_BUCKETS, EngineStats, LatestStats, Observations, exported
from octavo.errors import QueueFullError
from octavo.outputs import FinishReason


def _full(name: str) -> str:
    return name if ":" in name else f"vllm:{name}"


_HISTOGRAMS = exported(Observations)
_STATISTICS = exported(EngineStats)
_COMPUTED, _FOUND = "local_compute", "local_cache_hit"


# By the value of an extra label, "" where there is none.
_Counters = dict[str, Counter]


@dataclass(slots=True)
class Totals:
    """What was served since the start, for the last line of the log."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Metrics(Observer):
    """The registry of one server. engines: each has its own series, by the label `engine`."""

    def __init__(self, model_name: str, engines: int = 1) -> None:
        self._engines = [{"model_name": model_name, "engine": str(i)} for i in range(engines)]
        self._latest = LatestStats()
        self.down: Callable[[], Collection[int]] = dict  # those that do not answer
        self.config: Mapping[str, str] = {}  # settings, as `config_info` has them
        self.unread: Callable[[], int] = int  # connections whose clients do not read
        self.stalled: Callable[[], int] = int  # those that ended for it
        self._capabilities: dict[int, EngineCapabilities] = {}
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
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from.",
            source=(_COMPUTED, _FOUND),
        )  # fmt: skip
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not found in the cache.",
            COUNT_BUCKETS,
        )
        self._generated = self._counter("generation_tokens", "Tokens that clients were given.")
        self._success = self._counter(
            "request_success", "Choices by their end.", finished_reason=get_args(FinishReason)
        )
        self._parsed = self._counter(
            "tool_call_parser_invocations",
            "Choices that were parsed for tool calls, by whether they had some.",
            outcome=("calls", "no_calls"),
        )
        self._rejected = self._counter(
            "admission_rejections", "Refused requests.", reason=(QueueFullError.code,)
        )
        self._received = self._counter("octavo:requests_received", "Requests that were admitted.")
        self._resumed = self._counter(
            "octavo:requests_resumed",
            "Requests that this engine continues after the death of the one that had them.",
        )
        self._deaths = self._counter(
            "octavo:engine_deaths", "How often this engine has died or ended by itself."
        )
        if engines > 1:
            self._routed = self._counter(
                "octavo:requests_routed",
                "Requests by why this engine was chosen: prefix (it had most of the prompt in its "
                "cache), busy (another one had, and was too busy), load (none had more).",
                reason=REASONS,
            )
        self.registry.register(_Snapshot(self))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
        """Of each engine."""
        labels = list(self._engines[0])
        metric = Histogram(_full(name), text, labels, buckets=buckets, registry=self.registry)
        return [metric.labels(**labels) for labels in self._engines]

    def _counter(self, name: str, text: str, **extra: Sequence[str]) -> list[_Counters]:
        """Of each engine, and each value of an extra label.

        At 0 from the start: an alert on a rate misses a series that begins at 1.
        """
        metric = Counter(_full(name), text, [*self._engines[0], *extra], registry=self.registry)
        (label, values) = next(iter(extra.items()), ("", ("",)))
        return [
            {
                value: metric.labels(**engine, **({label: value} if label else {}))
                for value in values
            }
            for engine in self._engines
        ]

    @property
    def last(self) -> dict[int, EngineStats]:
        """The latest statistics of each engine, by its number."""
        return self._latest.by_engine

    def loaded(self, engine: int, capabilities: EngineCapabilities) -> None:
        """An engine is ready. Its policy's gauges are shown from now on."""
        self._capabilities[engine] = capabilities
        self._latest.counters = [gauge.name for gauge in capabilities.gauges if gauge.counter]

    def update(self, engine: int, report: Stats) -> None:
        """A snapshot came from an engine."""
        self._latest.update(engine, report.stats)
        for name, histograms in self._histograms:
            for value in getattr(report.fresh, name):
                histograms[engine].observe(value)

    def lost(self, engine: int) -> None:
        """An engine is dead: nothing runs there."""
        self._deaths[engine][""].inc()
        self._latest.lost(engine)

    def routed(self, engine: int, reason: Reason) -> None:
        self._routed[engine][reason].inc()

    def resumed(self, engine: int) -> None:
        self._resumed[engine][""].inc()

    def received(self, n: int, max_tokens: int, engine: int = 0) -> None:
        self._received[engine][""].inc()
        self.totals.requests += 1
        self._params_n[engine].observe(n)
        self._params_max[engine].observe(max_tokens)

    def parsed(self, calls: bool, engine: int = 0) -> None:
        """A choice of a request with tools has ended."""
        self._parsed[engine]["calls" if calls else "no_calls"].inc()

    def rejected(self, reason: str) -> None:
        """Before an engine was chosen: counted as the first one's."""
        self._rejected[0][reason].inc()

    def answered(self, prompt: int, cached: int, generated: int, engine: int = 0) -> None:
        """Tokens of one request, whole or as far as it came."""
        self._prompt[engine][""].inc(prompt)
        self._cached[engine][""].inc(cached)
        self._by_source[engine][_COMPUTED].inc(prompt - cached)
        self._by_source[engine][_FOUND].inc(cached)
        self._computed[engine].observe(prompt - cached)
        self._generated[engine][""].inc(generated)
        self.totals.prompt_tokens += prompt
        self.totals.generated_tokens += generated

    def ended(self, reason: FinishReason, choices: int = 1, engine: int = 0) -> None:
        self._success[engine][reason].inc(choices)

    def text(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def snapshot(self) -> Iterator[Metric]:
        """What comes from the engines' last snapshots."""
        stats = [self.last.get(engine) for engine in range(len(self._engines))]
        for metric in sorted(_STATISTICS, key=lambda metric: metric.kind == "counter"):
            values = [getattr(one, metric.field, None) or 0 for one in stats]
            yield self._family(_full(metric.name), metric.help, values, metric.kind == "counter")
        down = self.down()
        yield self._family(
            "octavo:engine_up", "Whether the engine answers.",
            [int(engine not in down) for engine in range(len(stats))], counter=False,
        )  # fmt: skip
        yield from self._clients()
        if self.config:
            yield self._config_info()
        yield self._waiting_by_reason([one.waiting if one else 0 for one in stats])
        if self._capabilities:
            yield from self._policy(stats)
            yield self._cache_info()

    def _policy(self, stats: Sequence[EngineStats | None]) -> Iterator[Metric]:
        """The gauges of the policy, which all engines have."""
        capabilities = next(iter(self._capabilities.values()))
        policy = re.sub(r"[^a-z0-9]", "_", capabilities.scheduler.lower())
        for gauge in capabilities.gauges:
            now = [(one.policy if one else {}).get(gauge.name, gauge.value) for one in stats]
            yield self._family(f"octavo:{policy}_{gauge.name}", gauge.help, now, gauge.counter)

    def _family(self, name: str, text: str, values: Sequence[float], counter: bool) -> Metric:
        """values: of each engine."""
        kind = CounterMetricFamily if counter else GaugeMetricFamily
        metric = kind(name, text, labels=list(self._engines[0]))
        for labels, value in zip(self._engines, values, strict=True):
            metric.add_metric(list(labels.values()), value)
        return metric

    def _clients(self) -> Iterator[Metric]:
        """Of the whole server: a connection belongs to no engine."""
        model, names = [self._engines[0]["model_name"]], ["model_name"]
        unread = GaugeMetricFamily(
            "octavo:connections_unread", "Connections whose client takes nothing now.", labels=names
        )
        stalled = CounterMetricFamily(
            "octavo:connections_stalled", "Connections that ended since their client read nothing.",
            labels=names,
        )  # fmt: skip
        unread.add_metric(model, self.unread())
        stalled.add_metric(model, self.stalled())
        return iter((unread, stalled))

    def _config_info(self) -> Metric:
        info = GaugeMetricFamily(
            "octavo:config_info", "Settings, and the processors that there are for the server.",
            labels=["model_name", *self.config],
        )  # fmt: skip
        info.add_metric([self._engines[0]["model_name"], *self.config.values()], 1)
        return info

    def _waiting_by_reason(self, waiting: Sequence[int]) -> Metric:
        """All wait for room: nothing is deferred to a remote transfer here."""
        metric = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to be scheduled, by reason.",
            labels=[*self._engines[0], "reason"],
        )
        for labels, count in zip(self._engines, waiting, strict=True):
            for reason, value in (("capacity", count), ("deferred", 0)):
                metric.add_metric([*labels.values(), reason], value)
        return metric

    def _cache_info(self) -> Metric:
        names = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype")
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*self._engines[0], *names]
        )
        for engine, capabilities in sorted(self._capabilities.items()):
            limits = capabilities.limits
            config = (
                str(limits.block_size),
                str(limits.num_blocks - 1),
                str(limits.num_host_blocks),
                limits.kv_cache_dtype,
            )
            info.add_metric([*self._engines[engine].values(), *config], 1)
        return info


class _Snapshot:
    """The part of the registry that is made when it is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.snapshot()
