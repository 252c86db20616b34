"""Figures of known outcomes, in vLLM's keys."""

import pytest

from octavo.bench.answer import Outcome
from octavo.bench.report import (
    details,
    goodput,
    goodput_goals,
    metric_figures,
    metric_names,
    percentile_list,
    summary,
    table,
)
from octavo.errors import ConfigError


def outcome(sent: float, ttft: float, *itl: float) -> Outcome:
    return Outcome(10, 1 + len(itl), sent, 1 + len(itl), ttft, list(itl), ttft + sum(itl), "x")


def failed() -> Outcome:
    found = outcome(0, 50, 50)
    found.fail("HTTP 503", "full")
    return found


OUTCOMES = [outcome(0, 0.1, 0.02, 0.04), outcome(0.05, 0.3), failed()]


def test_rates_count_successes_only() -> None:
    found = summary(OUTCOMES, 2.0)
    assert (found["completed"], found["failed"], found["failures"]) == (2, 1, {"HTTP 503": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 4)
    assert (found["request_throughput"], found["output_throughput"]) == (1, 2)
    assert found["total_token_throughput"] == 12
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 4


def test_times_of_failures_are_left_out() -> None:
    found = metric_figures(OUTCOMES, ("ttft", "tpot", "itl", "e2el"), (50, 99, 99.9))
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(30)  # the answer of one token has none
    assert found["median_itl_ms"] == pytest.approx(30)
    assert found["p99_itl_ms"] == pytest.approx(39.8)
    assert found["p99.9_itl_ms"] == pytest.approx(39.98)
    assert found["p50_e2el_ms"] == pytest.approx(230)


def test_a_metric_without_samples_is_absent_and_not_0() -> None:
    assert metric_figures([failed()], ("ttft", "itl"), (99,)) == {}


def test_goodput_needs_every_goal() -> None:
    assert goodput(OUTCOMES, 2.0, {"ttft": 300, "e2el": 300}) == 1
    assert goodput(OUTCOMES, 2.0, {"ttft": 150}) == 0.5
    assert goodput(OUTCOMES, 2.0, {"ttft": 150, "tpot": 29}) == 0
    assert goodput_goals(["ttft:200", "tpot:1.5"]) == {"ttft": 200, "tpot": 1.5}


def test_choices_are_checked() -> None:
    assert metric_names("ttft, itl") == ("ttft", "itl")
    assert percentile_list("50,99.9") == (50, 99.9)
    for wrong in (lambda: metric_names("ttfs"), lambda: percentile_list("101"),
                  lambda: percentile_list("x"), lambda: goodput_goals(["itl:3"]),
                  lambda: goodput_goals(["ttft"])):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()


def test_details_have_an_entry_for_each_request() -> None:
    found = details(OUTCOMES)
    assert {len(values) for values in found.values()} == {3}
    assert found["errors"] == ["", "", "full"]
    assert found["itls"][0] == [0.02, 0.04]


def test_the_table_shows_failures_and_what_has_no_samples() -> None:
    figures = {**summary([failed()], 1.0), "client_cpu_s": 0.5, "request_goodput": None}
    lines = table(figures, ("ttft",), (99,)).splitlines()
    assert lines[0].strip("=") == " Serving Benchmark Result "
    assert "Failed requests:                         1" in lines
    assert "  HTTP 503:                              1" in lines
    assert "P99 TTFT (ms):                           -" in lines
