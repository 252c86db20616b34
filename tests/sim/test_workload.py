"""Workloads have the lengths, times and prefixes that they are said to have."""

import math
import statistics

import pytest
from benchmarks.workloads import WORKLOADS

from octavo.bench.arrivals import arrival_times
from octavo.errors import ConfigError
from octavo.sim.workload import NAMED, Shape, Traffic, named_jobs, random_jobs


@pytest.mark.parametrize("name", NAMED)
def test_the_named_ones_are_the_benchmark_s(name: str) -> None:
    found = [(job.prompt_len, job.output_len) for job in named_jobs(name, Traffic())]
    assert found == [(len(job.prompt), job.max_tokens) for job in WORKLOADS[name](0)]
    assert {job.shared for job in named_jobs(name, Traffic())} == {512 if name == "W3" else 0}


def test_random_ones_have_the_arrivals_of_the_load_generator() -> None:
    jobs = random_jobs(50, Shape(), Traffic(4.0, 0.5, 7))
    assert [job.arrival for job in jobs] == arrival_times(50, 4.0, 0.5, 7)
    assert {(job.prompt_len, job.output_len) for job in jobs} == {(1024, 128)}
    assert jobs == random_jobs(50, Shape(), Traffic(4.0, 0.5, 7))
    assert jobs != random_jobs(50, Shape(), Traffic(4.0, 0.5, 8))


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "exponential"])
def test_lengths_have_their_mean(kind: str) -> None:
    ratio = 0.9 if kind == "uniform" else 0.0
    jobs = random_jobs(20_000, Shape(200, 300, kind, ratio), Traffic())  # type: ignore[arg-type]
    assert statistics.fmean(job.prompt_len for job in jobs) == pytest.approx(200, rel=0.05)
    assert statistics.fmean(job.output_len for job in jobs) == pytest.approx(300, rel=0.05)
    assert min(job.prompt_len for job in jobs) >= 1


def test_prefixes_are_shared_in_turn() -> None:
    jobs = random_jobs(4, Shape(10, 5, prefix_len=32, num_prefixes=2), Traffic())
    assert [(job.prompt_len, job.group, job.shared) for job in jobs] == [
        (42, 1, 32), (42, 2, 32), (42, 1, 32), (42, 2, 32)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": 0}, "input_len must be at least 1, not 0"),
        ({"output_len": -3}, "output_len must be at least 1, not -3"),
        ({"prefix_len": -1}, "prefix_len must be at least 0, not -1"),
        ({"range_ratio": 1.0}, r"range_ratio must be in \[0, 1\), not 1.0"),
        ({"range_ratio": math.nan}, "range_ratio must be in"),
        ({"range_ratio": 0.5, "distribution": "lognormal"}, "range_ratio is for uniform lengths"),
    ],
)
def test_a_shape_that_cannot_be_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shape(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_cannot_be_is_named(rate: float) -> None:
    with pytest.raises(ConfigError, match="request_rate must be above 0"):
        random_jobs(3, Shape(), Traffic(rate))
