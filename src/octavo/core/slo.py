"""The SLO policy: sizes steps and concurrency so that measured latencies meet their targets."""

import math
from collections import deque
from typing import Any

import msgspec

from octavo.core.policy import MIN_CHUNK, FIFOScheduler, Gauge, Load, StepLatencies, positive
from octavo.core.rates import StepModel, Window
from octavo.errors import ConfigError
from octavo.log import get_logger

logger = get_logger(__name__)


DEFAULT_P99_ITL_MS = 200.0  # of "adaptive": that of Llama 2 70B in MLPerf Inference's server runs


# Measured over expected time of a step. Until _SEEN steps have been compared, the worst of them is
# taken to be _ASSUMED: a target is missed by the few slow steps of a window, so they must be
# allowed for before the first one comes. A worse one than _WORST is no matter of step size.
_ASSUMED, _SEEN, _WORST, _BEST = 1.6, 1000, 2.0, 1.2
_RESERVE = 1.05  # slow steps are not equally slow
_LEARNING = 20  # steps before the model is compared with what it expects


class SLOState(msgspec.Struct, frozen=True, gc=False):
    """The state of an `SLOScheduler`. Times in seconds; None before the first measurement.

    share: the fraction of the inter-token target that a step is planned to take. tokens,
    sequences: the last budget. reason: why the share is what it is. changes: how often the share
    changed; shed: requests refused.
    """

    share: float = 1 / (_RESERVE * _ASSUMED)
    tokens: int = 0
    sequences: int = 0
    p99_itl: float | None = None
    p99_ttft: float | None = None
    throughput: float = 0.0
    reason: str = "nothing measured yet"
    changes: int = 0
    shed: int = 0


class SLOScheduler(FIFOScheduler):
    """First come, first served, in steps as large as the latency targets allow.

    p99_ttft_ms, p99_itl_ms: targets for the 99th percentile, over the last `window` seconds, of
    the time to first token and the inter-token latency (target_p99_ms is another name of the
    second). min_throughput: output tokens/s below which the margin is given up while the targets
    hold. shed: refuse requests (QueueFullError, HTTP 503) while waiting ones will miss the target
    for their first token. `state` shows the current budget and the reason for it.

    A linear model of step time, fitted to the steps so far, says how many tokens a step may
    compute and how many requests may run. A step is planned to take the inter-token target
    divided by the worst ratio of measured to expected time among the last `_SEEN` steps, with a
    reserve: the margin of split conformal prediction, at the level that a P99 over seconds needs.
    While the inter-token P99 is under 0.9 of its target, and the first token's P99 is over its
    own or throughput under its floor, no margin is kept.
    """

    name = "slo"

    def __init__(
        self,
        p99_ttft_ms: float | None = None,
        p99_itl_ms: float | None = None,
        min_throughput: float | None = None,
        *,
        target_p99_ms: float | None = None,
        window: float = 10.0,
        shed: bool = False,
    ) -> None:
        super().__init__(max_stretch=None)
        if target_p99_ms is not None and p99_itl_ms is not None:
            raise ConfigError(
                f"target_p99_ms ({target_p99_ms}) is another name of p99_itl_ms ({p99_itl_ms}); "
                "give one of them"
            )
        if target_p99_ms is not None:
            p99_itl_ms = positive("target_p99_ms", target_p99_ms)
        self.ttft = (positive("p99_ttft_ms", p99_ttft_ms) or math.inf) / 1e3
        self.itl = (positive("p99_itl_ms", p99_itl_ms) or math.inf) / 1e3
        self.floor = positive("min_throughput", min_throughput) or 0.0
        if self.ttft == self.itl == math.inf:
            raise ConfigError("the slo scheduler needs p99_ttft_ms or p99_itl_ms, in milliseconds")
        if shed and self.ttft == math.inf:
            raise ConfigError("shed needs p99_ttft_ms: requests are shed when they would miss it")
        self.shed = shed
        self.state = SLOState()
        self._model = StepModel()
        self._ratios = deque([_ASSUMED], maxlen=_SEEN)  # of measured to expected step times
        self._meters = _Meters(positive("window", window) or 10.0)

    def budget(self, load: Load) -> tuple[int, int]:
        tokens, sequences = load.max_tokens, load.max_sequences
        if self.itl < math.inf:
            aim, due = self.itl * self.state.share, len(load.due)
            if load.due or len(load.waiting) > 1:
                tokens = min(tokens, due + self._others_within(aim, due))
            # A quarter of the step is reserved for prompts, or no further request could start.
            if self._model.row > 0:
                room = 0.75 * (aim - self._model.fixed) / self._model.row
                sequences = min(sequences, max(int(room), 1))
        self._set(tokens=tokens, sequences=sequences)
        return tokens, sequences

    def _others_within(self, aim: float, due: int) -> int:
        """Tokens of prompts that a step of `aim` seconds may compute beside `due` next ones."""
        model = self._model
        if model.token <= 0:
            return MIN_CHUNK // 4
        # A line that was fitted to small steps is trusted up to twice their size.
        fitting = int((aim - model.seconds(due, 0)) / model.token)
        return max(min(fitting, 2 * model.largest), 1)

    def observe(self, latencies: StepLatencies) -> None:
        due, others, model = latencies.num_due, latencies.num_other, self._model
        expected = model.seconds(due, others)
        if latencies.gaps and model.steps >= _LEARNING and expected > 0.5 * self.itl:
            # The median: a request that was preempted has waited for more than this step.
            gap = sorted(latencies.gaps)[len(latencies.gaps) // 2]
            self._ratios.append(gap / expected)
        model.note(due, others, latencies.seconds)
        if self._meters.add(latencies):
            itl, ttft, throughput = self._meters.read(latencies.now)
            self._set(p99_itl=itl, p99_ttft=ttft, throughput=throughput)
            self._adjust(*self._assess(itl or 0.0, ttft or 0.0, throughput))

    def _assess(self, itl: float, ttft: float, throughput: float) -> tuple[float, str]:
        """(the share of the target to plan for, reason)."""
        if itl < 0.9 * self.itl:
            if ttft > self.ttft:
                return 1.0, f"P99 to the first token is {ttft:.3f} s, over {self.ttft:.3f} s"
            if throughput < self.floor:
                return 1.0, f"{throughput:.0f} tokens/s, under {self.floor:.0f}, and there is slack"
        worst = min(max(_RESERVE * max(self._ratios), _BEST), _WORST)
        reason = f"a step may take {worst:.2f} times as long as expected"
        if itl > self.itl:
            reason += f"; P99 between tokens is {itl:.4f} s, over {self.itl:.4f} s"
        return 1 / worst, reason

    def _adjust(self, share: float, reason: str) -> None:
        if self.itl == math.inf:
            share = self.state.share
        elif abs(share - self.state.share) > 0.01:
            self._set(changes=self.state.changes + 1)
            logger.info("slo: step time set to %.2f of the target: %s", share, reason)
        self._set(share=share, reason=reason)

    def refusal(self, load: Load) -> str | None:
        if not self.shed or load.longest_wait < 0.7 * self.ttft:
            return None
        self._set(shed=self.state.shed + 1)
        wait, target = load.longest_wait, self.ttft
        return f"requests wait {wait:.2f} s, too long for a first token in {target:.2f} s"

    def gauges(self) -> tuple[Gauge, ...]:
        state = self.state
        itl, ttft = state.p99_itl or 0.0, state.p99_ttft or 0.0
        return (
            Gauge("p99_itl_seconds", "P99 between tokens over the policy's window.", itl),
            Gauge("p99_ttft_seconds", "P99 to the first token over that window.", ttft),
            Gauge("step_share", "Share of the target that a step may take.", state.share),
            Gauge("step_tokens", "Tokens that a step may compute now.", state.tokens),
            Gauge("sequences", "Requests that may run now.", state.sequences),
            Gauge("changes", "Times that the share was changed.", state.changes, True),
            Gauge("shed", "Requests refused to hold the target.", state.shed, True),
        )

    def _set(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)


def adaptive(**options: Any) -> SLOScheduler:
    """The scheduler "adaptive": `SLOScheduler`, with `DEFAULT_P99_ITL_MS` if no target is given."""
    if not options.keys() & {"p99_itl_ms", "target_p99_ms", "p99_ttft_ms"}:
        options["p99_itl_ms"] = DEFAULT_P99_ITL_MS
    return SLOScheduler(**options)


class _Meters:
    """Latencies and output tokens of the last `span` seconds."""

    def __init__(self, span: float) -> None:
        self.gaps, self.firsts, self.tokens = Window(span), Window(span), Window(span)
        self._last: float | None = None

    def add(self, latencies: StepLatencies) -> bool:
        """Record a step; returns whether the next reading is due."""
        now = latencies.now
        for window, values in ((self.gaps, latencies.gaps), (self.firsts, latencies.firsts)):
            for value in values:
                window.add(now, value)
        self.tokens.add(now, latencies.num_tokens)
        self._last = now if self._last is None else self._last
        return now - self._last >= self.gaps.span / 8

    def read(self, now: float) -> tuple[float | None, float | None, float]:
        """(P99 of gaps, P99 of first tokens, both in seconds, tokens per second)."""
        self._last = now
        for window in (self.gaps, self.firsts, self.tokens):
            window.trim(now)
        throughput = self.tokens.total() / self.tokens.span
        return self.gaps.percentile(0.99), self.firsts.percentile(0.99), throughput
