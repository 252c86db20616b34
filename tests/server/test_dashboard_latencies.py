"""Percentiles over a sliding window."""

import pytest

from octavo.engine.stats import WINDOW_SECONDS, Observations
from octavo.server import dashboard_latencies
from octavo.server.dashboard_feed import Quantiles
from octavo.server.dashboard_latencies import LatencyWindow


def test_of_the_samples_of_the_last_seconds():
    window = LatencyWindow(100.0)
    assert window.read(100.0).itl == Quantiles(None, None, None, 0)
    window.add(Observations(itl=[number / 100 for number in range(1, 101)], ttft=[2.0]), 101.0)
    found = window.read(104.0)
    assert found.window == 4.0
    assert found.ttft == Quantiles(2.0, 2.0, 2.0, 1)
    assert found.e2e.count == 0
    assert (found.itl.p50, found.itl.p90, found.itl.p99) == pytest.approx((0.51, 0.91, 1.0))
    window.add(Observations(itl=[7.0]), 109.0)
    late = window.read(101.5 + WINDOW_SECONDS)
    assert (late.window, late.itl, late.ttft.count) == (
        WINDOW_SECONDS,
        Quantiles(7.0, 7.0, 7.0, 1),
        0,
    )


def test_its_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(dashboard_latencies, "MOST_SAMPLES", 100)
    window = LatencyWindow(0.0)
    for step in range(50):
        window.add(Observations(itl=[float(step)] * 30), 1.0)
    assert window.read(1.0).itl.count <= 100
    window.add(Observations(itl=[9.0] * 1000), 1.0)
    assert window.read(1.0).itl == Quantiles(9.0, 9.0, 9.0, 100)
