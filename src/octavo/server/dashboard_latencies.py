"""Percentiles of latencies over the last seconds, from the samples that engines report anyway."""

from collections import deque
from itertools import chain

from octavo.engine.stats import WINDOW_SECONDS, Observations
from octavo.server.dashboard_feed import Latencies, Quantiles

MOST_SAMPLES = 1 << 16  # of one kind; of more, the oldest are left out
_SHARES = (50, 90, 99)


class LatencyWindow:
    """The samples of one engine. Times are seconds of any one clock."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._kinds = {kind: _Samples() for kind in ("ttft", "itl", "e2e")}

    def add(self, fresh: Observations, now: float) -> None:
        """Samples that have just come."""
        for kind, samples in self._kinds.items():
            samples.add(getattr(fresh, kind), now)

    def read(self, now: float) -> Latencies:
        """The percentiles of the samples of the last `WINDOW_SECONDS`."""
        window = min(WINDOW_SECONDS, now - self._since)
        found = {kind: samples.read(now) for kind, samples in self._kinds.items()}
        return Latencies(round(window, 3), **found)


class _Samples:
    def __init__(self) -> None:
        self._parts: deque[tuple[float, list[float]]] = deque()  # by when they came
        self._count = 0

    def add(self, values: list[float], now: float) -> None:
        if values:
            self._parts.append((now, values[-MOST_SAMPLES:]))
            self._count += len(self._parts[-1][1])
            while self._count > MOST_SAMPLES:
                self._drop()

    def read(self, now: float) -> Quantiles:
        while self._parts and self._parts[0][0] < now - WINDOW_SECONDS:
            self._drop()
        if not self._count:
            return Quantiles(None, None, None, 0)
        import numpy as np  # not at the server's start, which it would slow

        values = np.fromiter(chain.from_iterable(part for _, part in self._parts), np.float64)
        p50, p90, p99 = np.percentile(values, _SHARES, method="higher").tolist()
        return Quantiles(p50, p90, p99, self._count)

    def _drop(self) -> None:
        _, values = self._parts.popleft()
        self._count -= len(values)
