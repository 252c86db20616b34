"""The latency policy on a modelled device: it holds its target, and says what it does."""

import logging
import random

import pytest
from tests.core.harness import Bench, make, modelled

from octavo.core.policy import FIFOScheduler, Policy
from octavo.core.slo import SLOScheduler
from octavo.errors import QueueFullError


def ramp(
    policy: Policy, seconds: float = 40.0, seed: int = 1
) -> tuple[Bench, dict[int, float], float]:
    """Poisson arrivals, to about 150% of what the device can do, and back.

    Returns the P99 gap of each 5 s window, and tokens per second.
    """
    rng = random.Random(1)
    bench = Bench(
        blocks=3000, budget=2048, seqs=128, policy=policy, caching=False, quick=True,
        cost=modelled(0.01, 2e-4, 8e-7),
    )  # fmt: skip
    arrivals: list[float] = [0.0]
    while arrivals[-1] < seconds:
        share = 1 - abs(2 * arrivals[-1] / seconds - 1)
        arrivals.append(arrivals[-1] + rng.expovariate(2.0 + 9.0 * share))
    last: dict[str, float] = {}
    gaps: dict[int, list[float]] = {}
    tokens = 0
    while arrivals or bench.scheduler.has_work():
        while arrivals and arrivals[0] <= bench.now:
            when, number = arrivals.pop(0), len(arrivals)
            length, output = rng.choice([50, 200, 400, 800]), rng.choice([20, 60, 150])
            bench.add(make(f"r{number}", [number] * length, output, arrival=when))
        if not bench.scheduler.has_work():
            bench.now = arrivals[0]
            continue
        for update in bench.step():
            tokens += 1
            if update.request_id in last:
                gap = bench.now - last[update.request_id]
                gaps.setdefault(int(bench.now / 5), []).append(gap)
            last[update.request_id] = bench.now
        bench.plans.clear()
    p99 = {window: sorted(g)[int(len(g) * 0.99)] for window, g in gaps.items() if len(g) > 100}
    return p99, tokens / bench.now


def test_the_target_is_held_through_an_overload_at_little_cost() -> None:
    loose, usual = ramp(FIFOScheduler(max_stretch=None))
    policy = SLOScheduler(p99_itl_ms=50)
    held, throughput = ramp(policy)
    assert sum(p99 > 0.055 for p99 in loose.values()) >= 0.7 * len(loose)
    assert sum(p99 > 0.055 for p99 in held.values()) <= 0.05 * len(held)
    assert throughput >= 0.85 * usual
    assert policy.state.p99_itl is not None
    assert policy.state.p99_itl <= 0.055
    assert policy.state.throughput > 0


def test_a_broken_target_shrinks_steps_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    policy = SLOScheduler(p99_itl_ms=40, window=2.0)
    rng = random.Random(3)
    slow = modelled(0.01, 2e-4)
    # The model of step times cannot know of this: one step in thirty takes half as long again.
    bench = Bench(
        blocks=2000, budget=1024, policy=policy, caching=False, quick=True,
        cost=lambda plan: slow(plan) * (1.6 if rng.random() < 0.03 else 1.0),
    )  # fmt: skip
    for number in range(60):
        bench.add(make(f"r{number}", [number] * 500, 100))
    shares: list[float] = []
    with caplog.at_level(logging.INFO):
        while bench.scheduler.has_work():
            bench.step()
            shares.append(policy.state.share)
    assert min(shares) < 0.7
    assert policy.state.changes > 0
    assert any("over 0.0400 s" in record.message for record in caplog.records)
    assert all(0.2 <= share <= 1.0 for share in shares)


def test_slack_that_nobody_asks_for_does_not_loosen_the_steps() -> None:
    """Small steps because little is asked for say nothing about larger ones."""
    policy = SLOScheduler(p99_itl_ms=100, window=1.0)
    bench = Bench(blocks=2000, budget=1024, policy=policy, cost=modelled(), quick=True)
    bench.run(make(f"r{i}", [i] * 20, 400) for i in range(3))
    assert policy.state.p99_itl is not None
    assert policy.state.p99_itl < 0.02
    assert policy.state.changes <= 1  # once at the start, when three prompts came at once
    before = policy.state.share
    bench.run(make(f"s{i}", [i] * 900, 30, arrival=bench.now) for i in range(30))
    assert policy.state.share > before


def test_slack_is_used_when_throughput_is_under_its_floor() -> None:
    policy = SLOScheduler(p99_itl_ms=200, min_throughput=1e6, window=1.0)
    bench = Bench(blocks=2000, budget=1024, policy=policy, cost=modelled(), quick=True)
    bench.run(make(f"r{i}", [i] * 50, 100) for i in range(20))
    assert policy.state.share == 1.0


def test_an_impossible_target_still_serves_everybody() -> None:
    policy = SLOScheduler(p99_itl_ms=1, window=0.5)
    bench = Bench(policy=policy, cost=modelled())
    bench.run(make(f"r{i}", [i] * 50, 10) for i in range(6))
    assert len(bench.outcomes) == 6
    assert "over" in policy.state.reason


def test_shedding_turns_away_those_who_would_wait_too_long() -> None:
    policy = SLOScheduler(p99_ttft_ms=300, shed=True)
    bench = Bench(blocks=100, seqs=4, policy=policy, cost=modelled(), quick=True)
    refused = 0
    for number in range(100):
        try:
            bench.add(make(f"r{number}", [number] * 60, 20, arrival=bench.now))
        except QueueFullError as error:
            refused += "0.30 s" in str(error)
        bench.step()
    bench.run()
    assert refused == policy.state.shed > 20
    gauges = {gauge.name: gauge for gauge in policy.gauges()}
    assert gauges["shed"].value == refused
    assert gauges["shed"].counter
    assert not gauges["p99_ttft_seconds"].counter
    assert len(bench.outcomes) == 100 - refused
    patient = Bench(policy=SLOScheduler(p99_ttft_ms=300), seqs=1, cost=modelled(), quick=True)
    patient.run(make(f"r{i}", [i] * 60, 20) for i in range(30))
    assert len(patient.outcomes) == 30
