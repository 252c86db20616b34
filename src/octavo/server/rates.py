"""Lines in the log with what the engine does: one per interval while it serves, one when it rests.

The figures are differences between the engine's counters, so they are those of the interval.
"""

import asyncio
import time
from collections.abc import Callable

from octavo.engine.stats import EngineStats, merged
from octavo.log import get_logger
from octavo.server.metrics import Metrics

logger = get_logger(__name__)


class RatesLog:
    """Call `tick` once per interval, or let `run` do it."""

    def __init__(
        self, metrics: Metrics, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._interval = interval
        self._clock = clock
        self._before: dict[int, EngineStats] = {}
        self._at = clock()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self.tick()

    def tick(self) -> None:
        """Log a line, unless nothing has happened since the last one and nothing is in flight."""
        before, now = self._before, self._clock()
        seconds, self._at = now - self._at, now
        self._before = latest = dict(self._metrics.last)
        if not latest:
            return
        earlier = [before.get(engine, EngineStats()) for engine in latest]
        total, past = merged(list(latest.values())), merged(earlier)
        if total.running + total.waiting + total.swapped or total.steps != past.steps:
            running = [latest[engine].running for engine in sorted(latest)]
            _log(past, total, seconds, running)


def _log(before: EngineStats, stats: EngineStats, seconds: float, running: list[int]) -> None:
    """running: requests of each engine."""
    looked_up = stats.queried_tokens - before.queried_tokens
    hit_rate = (stats.cached_tokens - before.cached_tokens) / looked_up if looked_up else 0.0
    prompt = (stats.prompt_tokens - before.prompt_tokens) / seconds
    output = (stats.generation_tokens - before.generation_tokens) / seconds
    preemptions = stats.preemptions - before.preemptions
    fields: dict[str, object] = {
        "event": "rates",
        "running": stats.running,
        "waiting": stats.waiting,
        "swapped": stats.swapped,
        "prompt_tokens_per_second": round(prompt, 3),
        "output_tokens_per_second": round(output, 3),
        "kv_cache_usage": round(stats.kv_blocks_usage, 4),
        "prefix_cache_hit_rate": round(hit_rate, 4),
        "preemptions": preemptions,
    }
    several = ""
    if len(running) > 1:
        fields["running_by_engine"] = running
        several = f"; running by engine: {', '.join(map(str, running))}"
    logger.info(
        "%d running, %d waiting, %d swapped; tokens/s: %.1f in, %.1f out; KV cache %.1f%% held; "
        "prefix cache hits %.1f%%; %d preemptions%s",
        stats.running, stats.waiting, stats.swapped, prompt, output,
        100 * stats.kv_blocks_usage, 100 * hit_rate, preemptions, several,
        extra={"fields": fields},
    )  # fmt: skip
