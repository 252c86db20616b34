"""A policy that holds latency targets: it measures, and sizes steps and concurrency to fit."""

import math
from itertools import chain, islice
from typing import Any

import msgspec

from octavo.core.policy import MIN_CHUNK, FIFOScheduler, Gains, Gauge, Load, positive
from octavo.core.rates import Window
from octavo.errors import ConfigError
from octavo.log import get_logger

logger = get_logger(__name__)


class SLOState(msgspec.Struct, frozen=True, gc=False):
    """What an `SLOScheduler` does now, and why. Times in seconds; None where nothing is known.

    share: of the inter-token target, what a step is planned to take. tokens, sequences: the
    last budget. changes: how often the share changed; shed: requests turned away.
    """

    share: float = 0.8
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
    the time to a first token and between tokens. min_throughput: generated tokens/s under which
    steps grow as long as the targets hold. shed: turn requests away (QueueFullError, HTTP 503)
    when those that wait will miss the target for their first token. `state` tells what it does
    and why.

    Steps and concurrency are sized, by measured step times, to a share of the inter-token
    target; the share follows the measured percentile, down at once and up slowly. A time to a
    first token over its target only raises the share while tokens come in time: what is due
    comes first.
    """

    name = "slo"

    def __init__(
        self,
        p99_ttft_ms: float | None = None,
        p99_itl_ms: float | None = None,
        min_throughput: float | None = None,
        *,
        window: float = 10.0,
        shed: bool = False,
    ) -> None:
        super().__init__(max_stretch=None)
        self.ttft = (positive("p99_ttft_ms", p99_ttft_ms) or math.inf) / 1e3
        self.itl = (positive("p99_itl_ms", p99_itl_ms) or math.inf) / 1e3
        self.floor = positive("min_throughput", min_throughput) or 0.0
        if self.ttft == self.itl == math.inf:
            raise ConfigError("the slo scheduler needs p99_ttft_ms or p99_itl_ms, in milliseconds")
        if shed and self.ttft == math.inf:
            raise ConfigError("shed needs p99_ttft_ms: it is what those who wait would miss")
        self.shed = shed
        self.state = SLOState()
        self._pressed = False  # whether a step was asked for more than it could give, since read
        self._meters = _Meters(positive("window", window) or 10.0)

    def budget(self, load: Load) -> tuple[int, int]:
        tokens, sequences = load.max_tokens, load.max_sequences
        if self.itl < math.inf:
            within = load.rates.tokens_within(self.itl * self.state.share)
            if load.due or len(load.waiting) > 1:
                tokens = min(tokens, max(within, len(load.due) + MIN_CHUNK // 4))
            # A quarter of the step is kept for prompts, or no more could start.
            sequences = min(sequences, max(within - within // 4, 1))
            asked = sum([request.lag for request in islice(chain(load.lagging, load.waiting), 8)])
            self._pressed = self._pressed or len(load.due) + asked > tokens
        self._set(tokens=tokens, sequences=sequences)
        return tokens, sequences

    def observe(self, gains: Gains) -> None:
        if self._meters.add(gains):
            itl, ttft, throughput = self._meters.read(gains.now)
            self._set(p99_itl=itl, p99_ttft=ttft, throughput=throughput)
            self._steer(*self._judge(itl or 0.0, ttft or 0.0, throughput))
            self._pressed = False

    def _judge(self, itl: float, ttft: float, throughput: float) -> tuple[float, str]:
        """(what to multiply the share by, why)."""
        if itl > self.itl:
            return 0.85, f"P99 between tokens is {itl:.4f} s, over {self.itl:.4f} s"
        if itl > 0.9 * self.itl:
            return 1.0, "P99 between tokens is just under its target"
        if ttft > self.ttft:
            return 1.1, f"P99 to the first token is {ttft:.3f} s, over {self.ttft:.3f} s"
        if throughput < self.floor:
            return 1.1, f"{throughput:.0f} tokens/s, under {self.floor:.0f}, and there is slack"
        if itl < 0.85 * self.itl < math.inf and self._pressed:
            return 1.05, f"P99 between tokens is {itl:.4f} s: there is slack"
        return 1.0, "all targets hold"

    def _steer(self, factor: float, reason: str) -> None:
        share = min(max(self.state.share * factor, 0.2), 1.0)
        if share != self.state.share:
            self._meters.restart()
            self._set(changes=self.state.changes + 1)
            logger.info("slo: a step may take %.2f of the target: %s", share, reason)
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
            Gauge("shed", "Requests turned away to hold the target.", state.shed, True),
        )

    def _set(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)


class _Meters:
    """What was gained in the last `span` seconds."""

    def __init__(self, span: float) -> None:
        self.gaps, self.firsts, self.tokens = Window(span), Window(span), Window(span)
        self._last: float | None = None

    def add(self, gains: Gains) -> bool:
        """Take in a step; whether it is time to read."""
        for window, values in ((self.gaps, gains.gaps), (self.firsts, gains.firsts)):
            for value in values:
                window.add(gains.now, value)
        self.tokens.add(gains.now, gains.num_tokens)
        self._last = gains.now if self._last is None else self._last
        return gains.now - self._last >= self.gaps.span / 8

    def read(self, now: float) -> tuple[float | None, float | None, float]:
        """(P99 of gaps, P99 of first tokens, both in seconds, tokens per second)."""
        self._last = now
        for window in (self.gaps, self.firsts, self.tokens):
            window.trim(now)
        throughput = self.tokens.total() / self.tokens.span
        return self.gaps.percentile(0.99), self.firsts.percentile(0.99), throughput

    def restart(self) -> None:
        """Forget the gaps: what was measured under one share says nothing about another."""
        self.gaps.clear()
