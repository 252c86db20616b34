"""The periodic line with rates, on a clock of its own."""

import logging

import pytest

from octavo.engine.messages import Stats
from octavo.engine.stats import EngineStats, Observations
from octavo.server.metrics import Metrics
from octavo.server.rates import RatesLog


@pytest.fixture
def tick(caplog):
    """`tick(**stats)` moves the clock by 10 s; the record that was logged, or None."""
    caplog.set_level(logging.INFO)
    now = [1000.0]
    metrics = Metrics("m")
    log = RatesLog(metrics, 10, lambda: now[0])

    def move(restarted=False, **values):
        caplog.clear()
        now[0] += 10
        if restarted:
            metrics.lost(0)
        if values:
            metrics.update(0, Stats(EngineStats(**values), Observations()))
        log.tick()
        return caplog.records[0] if caplog.records else None

    return move


def test_rates_are_those_of_the_interval_and_rest_is_silent(tick):
    assert tick() is None  # nothing came from the engine yet
    assert tick(steps=0) is None
    line = tick(
        steps=5, running=12, waiting=3, prompt_tokens=1000, generation_tokens=500,
        kv_blocks_usage=0.45, cached_tokens=250, queried_tokens=1000, preemptions=2,
    )  # fmt: skip
    assert line.getMessage() == (
        "12 running, 3 waiting, 0 swapped; tokens/s: 100.0 in, 50.0 out; KV cache 45.0% held; "
        "prefix cache hits 25.0%; 2 preemptions"
    )
    same = {"prompt_tokens": 1000, "cached_tokens": 250, "queried_tokens": 1000, "preemptions": 2}
    line = tick(steps=6, running=1, generation_tokens=510, **same)  # a step that takes long
    assert line.fields["output_tokens_per_second"] == 1.0
    assert line.fields["prefix_cache_hit_rate"] == 0.0
    assert tick(steps=6, running=1, generation_tokens=510, **same) is not None
    line = tick(steps=9, generation_tokens=520, **same)  # the line when it becomes idle
    assert line.getMessage().startswith("0 running, 0 waiting")
    assert tick(steps=9, generation_tokens=520, **same) is None
    assert tick() is None


def test_an_engine_that_was_restarted_counts_from_zero(tick):
    tick(steps=100, generation_tokens=5000)
    line = tick(restarted=True, steps=2, running=1, generation_tokens=20)
    assert line.fields["output_tokens_per_second"] == 2.0
    # In this interval the new one did more than the old one in all its life.
    line = tick(restarted=True, steps=900, running=1, generation_tokens=100, queried_tokens=50)
    assert line.fields["output_tokens_per_second"] == 10.0
