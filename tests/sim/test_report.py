"""Figures are those of their samples; tables and charts show them."""

import json
import random
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.sim.kit import simulated

from octavo.sim.record import Record
from octavo.sim.report import TABLE_PERCENTILES, figures, sweep_chart, sweep_table, table
from octavo.utils.charts import svg


def record() -> Record:
    made = Record(total_slots=1000, started_at=2.0)
    made.end(2.0, 3.0, 5.0, 10, 3, 5.0)
    made.end(2.0, 2.5, 2.5, 7, 1, 2.5)
    made.gap(1.0, 2)
    made.step(2.0, 2, 500, 100)
    made.step(1.0, 1, 200, 50)
    made.refuse("late")
    return made


def test_the_sums() -> None:
    found = figures(record(), ("ttft", "e2el"), (99.0,))
    assert found["duration"] == 3.0
    assert (found["completed"], found["failed"], found["failures"]) == (2, 1, {"late": 1})
    assert found["output_throughput"] == 4 / 3
    assert found["mean_concurrent_requests"] == 5 / 3
    assert found["mean_kv_held"] == pytest.approx(0.4)
    assert found["mean_kv_written"] == pytest.approx(0.4 - 250 / 3000)
    assert found["kv_fragmentation"] == pytest.approx(250 / 1200)
    assert found["mean_ttft_ms"] == 750.0
    assert "mean_itl_ms" not in found
    json.dumps(found)


def test_percentiles_count_each_gap_as_often_as_it_came() -> None:
    draw, made = random.Random(0), record()
    for _ in range(200):
        made.gap(draw.random(), draw.randint(1, 9))
    each = np.repeat(np.array(made.gaps) * 1e3, np.array(made.gap_counts))
    found = figures(made, ("itl",), (0.0, 12.5, 90.0, 100.0))
    for key, wanted in (("p0", 0), ("p12.5", 12.5), ("median", 50), ("p90", 90), ("p100", 100)):
        assert found[f"{key}_itl_ms"] == pytest.approx(np.percentile(each, wanted)), key
    assert found["std_itl_ms"] == pytest.approx(np.std(each))


def test_nothing_that_ran_has_no_latencies() -> None:
    found = figures(Record())
    assert not [key for key in found if key.endswith("_ms")]
    assert found["output_throughput"] == found["mean_kv_held"] == 0.0


def test_the_table_has_every_part() -> None:
    found = figures(simulated("fifo", 0).run(), ("ttft", "itl"), (99.0,))
    text = table("Simulated Result", found, ("ttft", "itl"), (99.0,))
    for part in ("Completed requests:", "KV cache", "P99 TTFT (ms):", "Preemptions, swapped:"):
        assert part in text


def test_a_sweep_is_a_table_and_a_chart() -> None:
    found = figures(record(), percentiles=TABLE_PERCENTILES)
    rows = [("64", found), ("256", {**found, "output_throughput": 9.0})]
    lines = sweep_table("max_num_seqs", rows).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:3] == ["max_num_seqs", "req/s", "tok/s"]
    for values in (rows, [("fifo", found), ("slo,p99_itl_ms=50", found)]):
        text = svg(sweep_chart("max_num_seqs", values, "A title", "octavo simulate"))
        ElementTree.fromstring(text)
        assert "Time to first token" in text
    assert "2: slo,p99_itl_ms=50" in text
