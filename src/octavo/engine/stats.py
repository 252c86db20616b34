"""Statistics of the engine: rates over a sliding window, latencies, memory.

`StatsRecorder` is called at every arrival, step and finish; `EngineStats` is a frozen snapshot. A
statistic is one field of `EngineStats`, or of `Observations` for a distribution: the field says
how it is read and, if it is exported, its name and help text on /metrics. Nothing else lists
them; the metrics of a policy come from the policy. No clock is read here: times are passed in, in
seconds of one monotonic clock.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import msgspec

from octavo.core.kv_manager import KVUsage
from octavo.core.plan import StepPlan
from octavo.core.policy_registry import policy_names
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, Update

WINDOW_SECONDS = 10.0
_SAMPLES = 8192
_ENDED = 64  # requests that are remembered
_UNREAD_STEPS = 16384  # a server drains them four times a second; offline they are never drained

# vLLM's buckets, preceded by finer ones: a small model on CPU is below vLLM's first.
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
COUNT_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_FEW = (0, 1, 2, 5, 10, 20, 50, 100)
_STEP_TOKENS = tuple(2**e for e in range(15))


@dataclass(frozen=True, slots=True)
class Metric:
    """How a statistic is exported. A name without a colon is vLLM's, and gets its prefix.

    field: where the value is, in `EngineStats` or `Observations`. buckets: of a histogram.
    """

    field: str
    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    buckets: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """The inputs of a snapshot. detailed: include what is expensive, or not exported."""

    recorder: "StatsRecorder"
    scheduler: Scheduler
    kv: KVUsage
    busy: float  # seconds of steps in the window
    generated: int  # tokens in the window
    prompt: int  # prompt tokens in the window
    span: float  # seconds of the window so far
    detailed: bool


def _statistic(
    read: Callable[[Sources], Any],
    gauge: str = "",
    counter: str = "",
    text: str = "",
    empty: Callable[[], Any] = int,
) -> Any:
    """A field of `EngineStats`: how it is read, and as which metric it is exported, if any."""
    kind = "gauge" if gauge else "counter"
    exported = (kind, gauge or counter, text) if gauge or counter else None
    return field(default_factory=empty, metadata={"read": read, "metric": exported})


def _samples(name: str, text: str, buckets: Sequence[float]) -> Any:
    """A field of `Observations`, exported as a histogram."""
    exported = ("histogram", name, text, buckets)
    return field(default_factory=list, metadata={"metric": exported})


def exported(kind: type) -> tuple[Metric, ...]:
    """The metrics that the fields of `EngineStats` or `Observations` declare."""
    return tuple(
        Metric(item.name, *item.metadata["metric"])
        for item in fields(kind)
        if item.metadata.get("metric")
    )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a sliding window of samples, in seconds; 0 where there is none."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Percentiles":
        ordered = sorted(samples)
        if not ordered:
            return cls()
        last = len(ordered) - 1
        at = [ordered[min(last, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
        return cls(at[0], at[1], at[2], sum(ordered) / len(ordered), len(ordered))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot.

    throughput, prompt_throughput: generated and prompt tokens per second over the window.
    gpu_utilization: share of wall time in which the device was computing, 0..1.
    cache_hit_rate: cached prompt tokens / prompt tokens looked up, 0..1.
    kv_usage: written slots / all slots. kv_blocks_usage: held blocks / all blocks.
    fragmentation: unwritten slots in held blocks / slots in held blocks.
    most_held_slots, most_written_slots: high-water marks since the start; shared_slots: held by
    more than one request. swapped_out_blocks, swapped_in_blocks: copied to the host and back so
    far; discarded_tokens: computed for requests that had ended, since the next step is planned
    while one is computed (`async_scheduling`); displaced: preemptions in favour of a more urgent
    request. policy_errors: how often the scheduling policy, or its weight_fn, failed.
    swap_block_seconds: measured time to copy a block. ttft, itl, e2e: seconds. policy: the gauges
    of the policy, by name.

    The state of the policy in use is an attribute with the policy's name; None for other built-in
    policies.
    """

    throughput: float = _statistic(
        lambda s: s.generated / s.span if s.generated else 0.0,
        gauge="octavo:generation_tokens_per_second",
        text="Over the last 10 s.",
    )
    prompt_throughput: float = _statistic(
        lambda s: s.prompt / s.span if s.prompt else 0.0,
        gauge="octavo:prompt_tokens_per_second",
        text="Over the last 10 s.",
    )
    gpu_utilization: float = _statistic(
        lambda s: min(1.0, s.busy / s.span) if s.busy else 0.0,
        gauge="octavo:device_utilization",
        text="Share of time spent computing.",
    )
    cache_hit_rate: float = _statistic(
        lambda s: s.kv.cached_tokens / s.kv.queried_tokens if s.kv.queried_tokens else 0.0
    )
    kv_usage: float = _statistic(
        lambda s: s.kv.written_slots / s.kv.total_slots,
        gauge="octavo:kv_slots_usage",
        text="Written KV slots, 0 to 1.",
    )
    kv_blocks_usage: float = _statistic(
        lambda s: s.kv.held_slots / s.kv.total_slots,
        gauge="kv_cache_usage_perc",
        text="Held KV blocks, 0 to 1.",
    )
    fragmentation: float = _statistic(
        lambda s: s.kv.fragmentation,
        gauge="octavo:kv_fragmentation",
        text="Unwritten share of held slots, 0 to 1.",
    )
    running: int = _statistic(
        lambda s: s.scheduler.num_running,
        gauge="num_requests_running",
        text="Requests in the running batch.",
    )
    waiting: int = _statistic(
        lambda s: s.scheduler.num_waiting,
        gauge="num_requests_waiting",
        text="Requests waiting to be scheduled.",
    )
    swapped: int = _statistic(
        lambda s: s.scheduler.num_swapped,
        gauge="octavo:num_requests_swapped",
        text="Requests whose KV is in host memory.",
    )
    preemptions: int = _statistic(
        lambda s: s.scheduler.num_preemptions,
        counter="num_preemptions",
        text="Preemptions, each of which released a request's blocks.",
    )
    steps: int = _statistic(
        lambda s: s.recorder.steps, counter="octavo:steps", text="Steps of the engine."
    )
    prompt_tokens: int = _statistic(lambda s: s.recorder.prompt_tokens)
    generation_tokens: int = _statistic(lambda s: s.recorder.generation_tokens)
    cached_tokens: int = _statistic(
        lambda s: s.kv.cached_tokens,
        counter="prefix_cache_hits",
        text="Prompt tokens found in the prefix cache.",
    )
    queried_tokens: int = _statistic(
        lambda s: s.kv.queried_tokens,
        counter="prefix_cache_queries",
        text="Prompt tokens looked up in the prefix cache.",
    )
    finished: dict[str, int] = _statistic(lambda s: dict(s.recorder.finished), empty=dict)
    ttft: Percentiles = _statistic(
        lambda s: s.recorder.percentiles("ttft", s.detailed), empty=Percentiles
    )
    itl: Percentiles = _statistic(
        lambda s: s.recorder.percentiles("itl", s.detailed), empty=Percentiles
    )
    e2e: Percentiles = _statistic(
        lambda s: s.recorder.percentiles("e2e", s.detailed), empty=Percentiles
    )
    most_held_slots: int = _statistic(
        lambda s: s.kv.most_held_slots,
        gauge="octavo:kv_most_held_slots",
        text="Most KV slots held so far.",
    )
    most_written_slots: int = _statistic(
        lambda s: s.kv.most_written_slots,
        gauge="octavo:kv_most_written_slots",
        text="Most KV slots written so far.",
    )
    shared_slots: int = _statistic(
        lambda s: s.kv.shared_slots,
        gauge="octavo:kv_shared_slots",
        text="KV slots held by more than one request.",
    )
    swapped_out_blocks: int = _statistic(
        lambda s: s.kv.swapped_out_blocks,
        counter="octavo:swapped_out_blocks",
        text="KV blocks copied to the host.",
    )
    swapped_in_blocks: int = _statistic(
        lambda s: s.kv.swapped_in_blocks,
        counter="octavo:swapped_in_blocks",
        text="KV blocks copied back.",
    )
    discarded_tokens: int = _statistic(
        lambda s: s.scheduler.num_discarded_tokens,
        counter="octavo:discarded_tokens",
        text="Tokens computed for requests that had ended meanwhile.",
    )
    displaced: int = _statistic(
        lambda s: s.scheduler.num_displaced,
        counter="octavo:displaced",
        text="Preemptions in favour of an earlier request.",
    )
    policy_errors: int = _statistic(
        lambda s: s.scheduler.policy_errors,
        counter="octavo:policy_errors",
        text="Failures of the scheduling policy or weight_fn.",
    )
    swap_block_seconds: float = _statistic(
        lambda s: s.scheduler.rates.block_seconds or 0.0,
        gauge="octavo:swap_block_seconds",
        text="Seconds to copy one swapped block.",
    )
    policy: dict[str, float] = _statistic(
        lambda s: {gauge.name: gauge.value for gauge in s.scheduler.fallback.gauges()},
        empty=dict,
    )
    policy_name: str = _statistic(lambda s: str(s.scheduler.policy.name), empty=str)
    policy_state: Any = _statistic(
        lambda s: getattr(s.scheduler.policy, "state", None) if s.detailed else None,
        empty=type(None),
    )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, under the attributes' names; percentiles are dicts.

        The state of the policy is under the policy's name, as it is an attribute.
        """
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        if (state := found.pop("policy_state")) is not None:
            found[self.policy_name] = state
        plain: dict[str, Any] = msgspec.to_builtins(found, enc_hook=str)
        return plain

    def __str__(self) -> str:
        """One statistic a line."""
        values = self.as_dict()
        width = max(map(len, values))
        return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in values.items())

    def __getattr__(self, name: str) -> Any:
        """The state of the policy of this name."""
        if not name.startswith("policy"):
            if name == self.policy_name:
                return self.policy_state
            if name in policy_names():
                return None
        raise AttributeError(f"the statistics have no {name!r}")


# What is no sum over engines. Pools of one configuration are alike, so a mean serves for shares.
_MEANS = ("gpu_utilization", "kv_usage", "kv_blocks_usage", "fragmentation", "swap_block_seconds")


def merged(parts: Sequence[EngineStats]) -> EngineStats:
    """The statistics of several engines as one: sums, and means of shares.

    Of several, percentiles and the state of the policy are left out: they do not add up.
    """
    if len(parts) < 2:
        return parts[0] if parts else EngineStats()
    found: dict[str, Any] = {"policy_name": parts[0].policy_name, "finished": {}}
    for item in fields(EngineStats):
        values = [getattr(part, item.name) for part in parts]
        if all(isinstance(value, int | float) for value in values):
            total = sum(values)
            found[item.name] = total / len(parts) if item.name in _MEANS else total
    for part in parts:
        for reason, count in part.finished.items():
            found["finished"][reason] = found["finished"].get(reason, 0) + count
    queried = found["queried_tokens"]
    found["cache_hit_rate"] = found["cached_tokens"] / queried if queried else 0.0
    return EngineStats(**found)


# Counts that are not exported: those of `server.metrics` are of what clients were given.
_COUNTS = ("prompt_tokens", "generation_tokens")


class LatestStats:
    """The latest statistics of each engine, by its number.

    Counts never fall: those of an engine that was started again go on from where they were.
    counters: names of those gauges of the policy that count.
    """

    def __init__(self) -> None:
        self.by_engine: dict[int, EngineStats] = {}
        self.counters: Collection[str] = ()
        self._before: dict[int, EngineStats] = {}

    def update(self, engine: int, stats: EngineStats) -> None:
        if before := self._before.get(engine):
            stats = _going_on(before, stats, self.counters)
        self.by_engine[engine] = stats

    def lost(self, engine: int) -> None:
        """It is dead."""
        if engine in self.by_engine:
            self.by_engine[engine] = self._before[engine] = at_rest(self.by_engine[engine])


def _going_on(before: EngineStats, stats: EngineStats, counters: Collection[str]) -> EngineStats:
    """With the counts of the engine whose place this one has taken."""
    names = [*_COUNTS, *(one.field for one in exported(EngineStats) if one.kind == "counter")]
    counts = {name: getattr(before, name) + getattr(stats, name) for name in names}
    looked_up = counts["queried_tokens"]
    return replace(
        stats,
        **counts,
        cache_hit_rate=counts["cached_tokens"] / looked_up if looked_up else 0.0,
        finished=_sums(before.finished, stats.finished),
        policy={**stats.policy, **{
            name: before.policy.get(name, 0) + stats.policy.get(name, 0) for name in counters
        }},
    )  # fmt: skip


def _sums(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def at_rest(stats: EngineStats) -> EngineStats:
    """The counts of an engine that has ended: what it held and did at the moment is nothing."""
    gauges = {
        item.name: item.default_factory()
        for item in fields(EngineStats)
        if (metric := item.metadata["metric"])
        and metric[0] == "gauge"
        and callable(item.default_factory)
    }
    return replace(stats, **gauges)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(slots=True)
class Observations:
    """Samples since the last drain, for histograms. Seconds or tokens.

    Of a request that ended: queue (arrival to first step), prefill (first step to first token),
    decode (first token to last), inference (first step to last token), tpot (decode per token
    after the first), e2e; most_tokens: of its longest choice.
    """

    ttft: list[float] = _samples("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
    itl: list[float] = _samples(
        "inter_token_latency_seconds", "Between tokens of one choice.", _ITL
    )
    e2e: list[float] = _samples("e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
    queue: list[float] = _samples("request_queue_time_seconds", "Arrival to first step.", _SECONDS)
    prefill: list[float] = _samples(
        "request_prefill_time_seconds", "First step to first token.", _SECONDS
    )
    decode: list[float] = _samples("request_decode_time_seconds", "First token to last.", _SECONDS)
    inference: list[float] = _samples(
        "request_inference_time_seconds", "First step to last token.", _SECONDS
    )
    tpot: list[float] = _samples(
        "request_time_per_output_token_seconds", "Per token after the first.", _ITL
    )
    prompt_tokens: list[int] = _samples(
        "request_prompt_tokens", "Prompt tokens per request.", COUNT_BUCKETS
    )
    generation_tokens: list[int] = _samples(
        "request_generation_tokens", "Generated tokens per request.", COUNT_BUCKETS
    )
    most_tokens: list[int] = _samples(
        "request_max_num_generation_tokens", "Tokens of a request's longest choice.", COUNT_BUCKETS
    )
    preemptions: list[int] = _samples("request_num_preemptions", "Preemptions of a request.", _FEW)
    step_tokens: list[int] = _samples(
        "iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS
    )


@dataclass(slots=True)
class RequestTimes:
    """Of one request. For reading: only the recorder changes it."""

    arrival: float
    prompt_tokens: int
    choices: int
    max_tokens: int
    priority: int
    scheduled: float | None = None
    first: float | None = None  # time of its first token
    generated: dict[int, int] = field(default_factory=dict)  # choice -> its tokens
    cached: int = 0  # prompt tokens found in the cache
    preemptions: int = 0
    last: dict[int, float] = field(default_factory=dict)  # choice -> time of its last token
    resumed: bool = False  # its first token came from another engine


class EndedRequest(NamedTuple):
    """A request that has ended at a time, and why."""

    request_id: str
    reason: str
    at: float
    times: RequestTimes


class StatsRecorder:
    """Records events; independent of how the numbers are used.

    ended: the requests that ended last; num_ended: all that have.
    """

    steps: int
    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = {}
        self.ended: deque[EndedRequest] = deque(maxlen=_ENDED)
        self.num_ended = 0
        self._times: dict[str, RequestTimes] = {}
        self._window: deque[tuple[float, float, int, int]] = deque()
        self._latencies: dict[str, deque[float]] = {
            name: deque(maxlen=_SAMPLES) for name in ("ttft", "itl", "e2e")
        }
        self._fresh = Observations()

    def arrived(self, request: Request) -> None:
        count = request.num_prompt_tokens
        self._times[request.request_id] = RequestTimes(
            request.arrival_time, count, request.params.n, request.max_tokens, request.priority
        )
        self.prompt_tokens += count
        self._fresh.prompt_tokens.append(count)

    def resumed(self, choices: Sequence[Request], now: float) -> None:
        """The unfinished choices of a request that another engine has accepted, and counted.

        Its tokens so far count in its length alone, and what lies in the other engine's time is
        not observed. Without a token it is as one that arrives.
        """
        first = choices[0]
        count = first.num_prompt_tokens
        times = RequestTimes(
            first.arrival_time, count, len(choices), first.max_tokens, first.priority
        )
        self._times[first.request_id] = times
        if not first.num_output_tokens:
            times.choices = first.params.n
            return
        times.resumed, times.scheduled = True, now
        for request in choices:
            times.last[request.index] = now
            times.generated[request.index] = request.num_output_tokens

    def step(
        self,
        plan: StepPlan,
        updates: list[Update],
        started: float,
        ended: float,
        discarded: int = 0,
    ) -> None:
        """One step ran from `started` to `ended` and gave `updates`; of its tokens, `discarded`
        were computed for requests that had ended."""
        self.steps += 1
        for row in plan.rows:
            times = self._times.get(row.request_id)
            if times and times.scheduled is None:
                times.scheduled = started
                self._fresh.queue.append(started - times.arrival)
        generated = sum(self._note(update, ended) for update in updates)
        computed = plan.num_tokens
        if len(self._fresh.step_tokens) >= _UNREAD_STEPS:
            self._fresh = Observations()
        self._fresh.step_tokens.append(computed)
        self.generation_tokens += generated
        prompt = max(0, computed - generated - discarded)
        self._window.append((ended, ended - started, generated, prompt))
        self._trim(ended)

    def aborted(self, request_id: str, now: float) -> None:
        if times := self._times.pop(request_id, None):
            self._count("abort", request_id, times, now)

    def choice_stopped(self, request_id: str, now: float) -> None:
        """A stop string, detected outside the engine, ended one choice."""
        if times := self._times.get(request_id):
            self._end(request_id, times, "stop", now)

    def times(self, request_id: str) -> RequestTimes | None:
        """Of a request that has not ended."""
        return self._times.get(request_id)

    def drain(self) -> Observations:
        """The samples since the last call."""
        fresh, self._fresh = self._fresh, Observations()
        return fresh

    @property
    def fading(self) -> bool:
        """Whether the rates of the last snapshot will change without any event, with time."""
        return bool(self._window)

    def percentiles(self, name: str, detailed: bool = True) -> Percentiles:
        """Of the latest samples of ttft, itl or e2e; 0 unless `detailed`, since sorting is slow."""
        return Percentiles.of(self._latencies[name] if detailed else ())

    def snapshot(self, scheduler: Scheduler, now: float, detailed: bool = True) -> EngineStats:
        """`detailed=False` leaves out percentiles and the policy's state: it is for export."""
        self._trim(now)
        begin = self._window[0][0] - self._window[0][1] if self._window else now
        sources = Sources(
            self,
            scheduler,
            scheduler.kv.usage(),
            busy=sum(step[1] for step in self._window),
            generated=sum(step[2] for step in self._window),
            prompt=sum(step[3] for step in self._window),
            span=max(now - begin, 1e-9),
            detailed=detailed,
        )
        return EngineStats(**{f.name: f.metadata["read"](sources) for f in fields(EngineStats)})

    def _note(self, update: Update, now: float) -> int:
        times = self._times.get(update.request_id)
        count = len(update.token_ids)
        if times is None:
            return count
        if count:
            last = times.last.get(update.index)
            if last is None:
                times.cached = update.num_cached_tokens
                self._latencies["ttft"].append(now - times.arrival)
                self._fresh.ttft.append(now - times.arrival)
            else:
                self._latencies["itl"].append(now - last)
                self._fresh.itl.append(now - last)
            if times.first is None and not times.resumed:
                times.first = now
            times.last[update.index] = now
            times.generated[update.index] = times.generated.get(update.index, 0) + count
        if update.finish_reason:
            times.preemptions += update.num_preemptions
            self._end(update.request_id, times, update.finish_reason, now)
        return count

    def _end(self, request_id: str, times: RequestTimes, reason: str, now: float) -> None:
        """One choice ended; the last one ends the request."""
        times.choices -= 1
        if times.choices > 0 and reason not in ("abort", "error"):
            return
        del self._times[request_id]
        self._count(reason, request_id, times, now)
        self._latencies["e2e"].append(now - times.arrival)
        self._fresh.e2e.append(now - times.arrival)
        generated = sum(times.generated.values())
        self._fresh.generation_tokens.append(generated)
        self._fresh.most_tokens.append(max(times.generated.values(), default=0))
        self._fresh.preemptions.append(times.preemptions)
        if times.scheduled is not None and times.first is not None:
            decode = max(times.last.values()) - times.first
            self._fresh.prefill.append(times.first - times.scheduled)
            self._fresh.decode.append(decode)
            self._fresh.inference.append(max(times.last.values()) - times.scheduled)
            if generated > 1:
                self._fresh.tpot.append(decode / (generated - 1))

    def _count(self, reason: str, request_id: str, times: RequestTimes, now: float) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.num_ended += 1
        self.ended.append(EndedRequest(request_id, reason, now, times))

    def _trim(self, now: float) -> None:
        while self._window and self._window[0][0] < now - WINDOW_SECONDS:
            self._window.popleft()
