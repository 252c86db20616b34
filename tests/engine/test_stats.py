"""Numbers that add up: each statistic against what was put in, on a clock that the test moves."""

import json
from dataclasses import fields

import msgspec
import pytest
from tests.core.harness import Bench, make

from octavo.core.plan import PlanRow, StepPlan
from octavo.core.policy import FIFOScheduler, Gauge
from octavo.core.scheduler import Update
from octavo.core.slo import SLOScheduler, SLOState
from octavo.engine import stats as module
from octavo.engine.stats import EngineStats, Observations, Percentiles, StatsRecorder, exported


def plan(step, **tokens):
    """A step that computes so many tokens of each request, one after the other."""
    rows = [PlanRow(name, tuple(range(count)), 0, ((1,),)) for name, count in tokens.items()]
    return StepPlan(step, tuple(rows))


@pytest.fixture
def recorder():
    return StatsRecorder()


@pytest.fixture
def scheduler():
    return Bench().scheduler


def test_percentiles_are_samples_that_were_seen():
    found = Percentiles.of([4.0, 1.0, 3.0, 2.0])
    assert found == Percentiles(p50=3.0, p90=4.0, p99=4.0, mean=2.5, count=4)
    assert Percentiles.of([]) == Percentiles()
    hundred = Percentiles.of(float(i) for i in range(100))
    assert (hundred.p50, hundred.p90, hundred.p99) == (50.0, 90.0, 99.0)


def test_rates_are_of_the_window(recorder, scheduler):
    """Two steps of a second each, then a wait: 40 prompt tokens and 3 new ones in 4 seconds."""
    recorder.arrived(make("a", range(40), arrival=10.0))
    recorder.step(plan(1, a=40), [Update("a", 0, (7,))], 10.0, 11.0)
    recorder.step(plan(2, a=1), [Update("a", 0, (8, 9))], 11.0, 12.0)
    found = recorder.snapshot(scheduler, 14.0)
    assert found.throughput == pytest.approx(3 / 4)
    assert found.prompt_throughput == pytest.approx(39 / 4)  # the last one drew a token
    assert found.gpu_utilization == pytest.approx(2 / 4)
    assert (found.steps, found.prompt_tokens, found.generation_tokens) == (2, 40, 3)
    later = recorder.snapshot(scheduler, 14.0 + module.WINDOW_SECONDS)
    assert later.throughput == later.prompt_throughput == later.gpu_utilization == 0.0
    assert later.generation_tokens == 3


def test_the_times_of_one_request(recorder, scheduler):
    """Waits 1 s, computes its prompt for 2 s, then a token after 0.5 s and one after 1.5 s."""
    recorder.arrived(make("a", [1, 2, 3], arrival=0.0))
    recorder.step(plan(1, a=3), [Update("a", 0, (7,))], 1.0, 3.0)
    recorder.step(plan(2, a=1), [Update("a", 0, (8,))], 3.0, 3.5)
    recorder.step(plan(3, a=1), [Update("a", 0, (9,), finish_reason="length")], 3.5, 5.0)
    assert recorder.drain() == Observations(
        ttft=[3.0], itl=[0.5, 1.5], e2e=[5.0], queue=[1.0], prefill=[2.0], decode=[2.0],
        tpot=[1.0], prompt_tokens=[3], generation_tokens=[3], step_tokens=[3, 1, 1],
        inference=[4.0], most_tokens=[3], preemptions=[0],
    )  # fmt: skip
    assert recorder.drain() == Observations()
    found = recorder.snapshot(scheduler, 5.0)
    assert found.finished == {"length": 1}
    assert (found.ttft.p50, found.itl.mean, found.e2e.count) == (3.0, 1.0, 1)


def test_a_request_ends_with_its_last_choice(recorder, scheduler):
    recorder.arrived(make("a", [1], n=3))
    updates = [Update("a", i, (7,), finish_reason="stop" if i else None) for i in range(3)]
    recorder.step(plan(1, a=1), updates, 0.0, 1.0)
    assert recorder.finished == {}
    recorder.choice_stopped("a", 2.0)
    assert recorder.finished == {"stop": 1}
    recorder.choice_stopped("a", 3.0)  # it has ended already
    recorder.arrived(make("b", [1], n=2))
    recorder.step(plan(2, b=1), [Update("b", 0, finish_reason="error", error="x")], 3.0, 4.0)
    recorder.aborted("b", 9.0)
    recorder.arrived(make("c", [1]))
    recorder.aborted("c", 9.0)
    assert recorder.finished == {"stop": 1, "error": 1, "abort": 1}


def test_samples_that_are_not_read_are_bounded(recorder, monkeypatch):
    monkeypatch.setattr(module, "_UNREAD_STEPS", 5)
    for number in range(100):
        recorder.step(plan(number, a=1), [], float(number), number + 0.5)
    assert len(recorder.drain().step_tokens) <= 5
    assert recorder.steps == 100


def test_a_snapshot_for_export_leaves_out_what_is_expensive(recorder):
    bench = Bench(policy=SLOScheduler(p99_itl_ms=50))
    recorder.arrived(make("a", [1]))
    recorder.step(plan(1, a=1), [Update("a", 0, (7,))], 0.0, 1.0)
    whole = recorder.snapshot(bench.scheduler, 1.0)
    lean = recorder.snapshot(bench.scheduler, 1.0, detailed=False)
    assert whole.ttft.count == 1
    assert whole.policy_state == SLOState()
    assert lean.ttft == Percentiles()
    assert lean.policy_state is None
    assert lean.policy == whole.policy
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(lean), type=EngineStats) == lean


def test_the_state_of_the_policy_goes_by_its_name(recorder):
    slo = recorder.snapshot(Bench(policy=SLOScheduler(p99_itl_ms=50)).scheduler, 0.0)
    assert slo.slo.reason == "nothing measured yet"
    assert slo.fifo is None
    assert slo.policy["step_share"] == SLOState().share
    fifo = recorder.snapshot(Bench().scheduler, 0.0)
    assert fifo.slo is None
    assert fifo.policy == {}
    with pytest.raises(AttributeError, match="no 'troughput'"):
        fifo.troughput  # noqa: B018


def test_a_snapshot_as_a_dict_is_json_and_printed_one_statistic_a_line(recorder):
    recorder.arrived(make("a", [1]))
    recorder.step(plan(1, a=1), [Update("a", 0, (7,), finish_reason="stop")], 0.0, 1.5)
    found = recorder.snapshot(Bench(policy=SLOScheduler(p99_itl_ms=50)).scheduler, 3.0)
    plain = found.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["throughput"] == pytest.approx(1 / 3)
    assert plain["finished"] == {"stop": 1}
    assert plain["ttft"]["p99"] == 1.5
    assert plain["slo"]["reason"] == "nothing measured yet"
    assert "policy_state" not in plain
    lines = str(found).splitlines()
    assert len(lines) == len(plain)
    assert lines[0].split() == ["throughput", "0.3333"]


def test_what_a_policy_publishes_is_there_by_name(recorder):
    class Shows(FIFOScheduler):
        name = "shows"
        state = (1, 2)

        def gauges(self):
            return [Gauge("depth", "How deep.", 3)]

    found = recorder.snapshot(Bench(policy=Shows()).scheduler, 0.0)
    assert found.policy == {"depth": 3.0}
    assert found.shows == (1, 2)


def test_every_statistic_says_how_it_is_read_and_is_described():
    for field in fields(EngineStats):
        assert callable(field.metadata["read"]), field.name
    for kind in (EngineStats, Observations):
        for metric in exported(kind):
            assert hasattr(kind, metric.field)
            assert metric.help.endswith(".")
            assert (metric.kind == "histogram") == bool(metric.buckets)
            assert list(metric.buckets) == sorted(set(metric.buckets))
