"""What the engine counts: rates over a sliding window, latencies, memory, all from one place.

`StatsRecorder` is told of every arrival, step and end; `EngineStats` is a frozen snapshot. The
server turns snapshots and drained observations into Prometheus metrics. No clock is read here:
times are the caller's, in seconds of one monotonic clock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.core.plan import StepPlan
from octavo.core.scheduler import Scheduler, Update
from octavo.core.slo import SLOScheduler, SLOState

WINDOW_SECONDS = 10.0
_SAMPLES = 8192
_UNREAD_STEPS = 16384  # a server reads four times a second; offline nobody does


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
    far; displaced: of the preemptions, those for a request that was earlier. policy_errors: how
    often the scheduling policy, or its weight_fn, failed. slo: what an SLOScheduler does, and
    why. swap_block_seconds: what copying a block has taken. ttft, itl, e2e: seconds.
    """

    throughput: float
    prompt_throughput: float
    gpu_utilization: float
    cache_hit_rate: float
    kv_usage: float
    kv_blocks_usage: float
    fragmentation: float
    running: int
    waiting: int
    swapped: int
    preemptions: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    queried_tokens: int
    finished: dict[str, int]
    ttft: Percentiles
    itl: Percentiles
    e2e: Percentiles
    most_held_slots: int = 0
    most_written_slots: int = 0
    shared_slots: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    displaced: int = 0
    policy_errors: int = 0
    swap_block_seconds: float = 0.0
    slo: SLOState | None = None


@dataclass(slots=True)
class Observations:
    """Samples since the last drain, for histograms. Seconds or tokens.

    Of a request that ended: queue (arrival to first step), prefill (first step to first token),
    decode (first token to last), tpot (decode per token after the first), e2e.
    """

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    generation_tokens: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Times:
    arrival: float
    prompt_tokens: int
    choices: int
    scheduled: float | None = None
    first: float | None = None  # time of its first token
    generated: int = 0
    last: dict[int, float] = field(default_factory=dict)  # choice -> time of its last token


class StatsRecorder:
    """Counts; knows nothing of what the numbers are used for."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {}
        self._times: dict[str, _Times] = {}
        self._window: deque[tuple[float, float, int, int]] = deque()
        self._ttft: deque[float] = deque(maxlen=_SAMPLES)
        self._itl: deque[float] = deque(maxlen=_SAMPLES)
        self._e2e: deque[float] = deque(maxlen=_SAMPLES)
        self._fresh = Observations()

    def arrived(self, request_id: str, arrival: float, prompt_tokens: int, choices: int) -> None:
        self._times[request_id] = _Times(arrival, prompt_tokens, choices)
        self.prompt_tokens += prompt_tokens
        self._fresh.prompt_tokens.append(prompt_tokens)

    def step(self, plan: StepPlan, updates: list[Update], started: float, ended: float) -> None:
        """One step ran from `started` to `ended` and gave `updates`."""
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
        self._window.append((ended, ended - started, generated, max(0, computed - generated)))
        self._trim(ended)

    def aborted(self, request_id: str) -> None:
        if self._times.pop(request_id, None):
            self._count("abort")

    def choice_stopped(self, request_id: str, now: float) -> None:
        """A stop string, seen outside the engine, ended one choice."""
        if times := self._times.get(request_id):
            self._end(request_id, times, "stop", now)

    def drain(self) -> Observations:
        """The samples since the last call."""
        fresh, self._fresh = self._fresh, Observations()
        return fresh

    def snapshot(self, scheduler: Scheduler, now: float, percentiles: bool = True) -> EngineStats:
        """`percentiles=False` leaves them 0: they sort thousands of samples."""
        self._trim(now)
        begin = self._window[0][0] - self._window[0][1] if self._window else now
        span = max(now - begin, 1e-9)
        busy, generated, prompt = (sum(w[i] for w in self._window) for i in (1, 2, 3))
        kv = scheduler.kv.usage()
        return EngineStats(
            throughput=generated / span if self._window else 0.0,
            prompt_throughput=prompt / span if self._window else 0.0,
            gpu_utilization=min(1.0, busy / span) if self._window else 0.0,
            cache_hit_rate=kv.cached_tokens / kv.queried_tokens if kv.queried_tokens else 0.0,
            kv_usage=kv.written_slots / kv.total_slots,
            kv_blocks_usage=kv.held_slots / kv.total_slots,
            fragmentation=kv.fragmentation,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            swapped=scheduler.num_swapped,
            preemptions=scheduler.num_preemptions,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            cached_tokens=kv.cached_tokens,
            queried_tokens=kv.queried_tokens,
            finished=dict(self.finished),
            ttft=Percentiles.of(self._ttft if percentiles else ()),
            itl=Percentiles.of(self._itl if percentiles else ()),
            e2e=Percentiles.of(self._e2e if percentiles else ()),
            most_held_slots=kv.most_held_slots,
            most_written_slots=kv.most_written_slots,
            shared_slots=kv.shared_slots,
            swapped_out_blocks=kv.swapped_out_blocks,
            swapped_in_blocks=kv.swapped_in_blocks,
            displaced=scheduler.num_displaced,
            policy_errors=scheduler.policy_errors,
            swap_block_seconds=scheduler.rates.block_seconds or 0.0,
            slo=scheduler.policy.state if isinstance(scheduler.policy, SLOScheduler) else None,
        )

    def _note(self, update: Update, now: float) -> int:
        times = self._times.get(update.request_id)
        count = len(update.token_ids)
        if times is None:
            return count
        if count:
            last = times.last.get(update.index)
            if last is None:
                self._ttft.append(now - times.arrival)
                self._fresh.ttft.append(now - times.arrival)
            else:
                self._itl.append(now - last)
                self._fresh.itl.append(now - last)
            if times.first is None:
                times.first = now
            times.last[update.index] = now
            times.generated += count
        if update.finish_reason:
            self._end(update.request_id, times, update.finish_reason, now)
        return count

    def _end(self, request_id: str, times: _Times, reason: str, now: float) -> None:
        """One choice ended; the last one ends the request."""
        times.choices -= 1
        if times.choices > 0 and reason not in ("abort", "error"):
            return
        del self._times[request_id]
        self._count(reason)
        self._e2e.append(now - times.arrival)
        self._fresh.e2e.append(now - times.arrival)
        self._fresh.generation_tokens.append(times.generated)
        if times.scheduled is not None and times.first is not None:
            decode = max(times.last.values()) - times.first
            self._fresh.prefill.append(times.first - times.scheduled)
            self._fresh.decode.append(decode)
            if times.generated > 1:
                self._fresh.tpot.append(decode / (times.generated - 1))

    def _count(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def _trim(self, now: float) -> None:
        while self._window and self._window[0][0] < now - WINDOW_SECONDS:
            self._window.popleft()
