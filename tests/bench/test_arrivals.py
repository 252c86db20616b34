"""Arrival times follow the rate, and the seed."""

import math
from itertools import pairwise

import pytest

from octavo.bench.arrivals import arrival_times
from octavo.errors import ConfigError


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(3, math.inf, 1, 0) == [0, 0, 0]
    assert arrival_times(0, 5, 1, 0) == []
    assert arrival_times(1, 5, 1, 0) == [0]


@pytest.mark.parametrize("burstiness", [0.2, 1, 30])
def test_the_last_request_comes_when_the_rate_says(burstiness: float) -> None:
    times = arrival_times(101, 4, burstiness, 3)
    assert times[0] == 0
    assert times[-1] == pytest.approx(25)
    assert times == sorted(times)
    assert times == arrival_times(101, 4, burstiness, 3)
    assert times != arrival_times(101, 4, burstiness, 4)


def test_burstiness_is_the_spread_of_the_gaps() -> None:
    def spread(burstiness: float) -> float:
        gaps = [b - a for a, b in pairwise(arrival_times(2001, 1, burstiness, 0))]
        return math.sqrt(sum((gap - 1) ** 2 for gap in gaps) / len(gaps))

    assert spread(0.25) == pytest.approx(2, rel=0.15)  # 1 / sqrt(shape), of a gamma distribution
    assert spread(1) == pytest.approx(1, rel=0.15)
    assert spread(100) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
def test_wrong_values_are_named(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match=r"request_rate|burstiness"):
        arrival_times(3, rate, burstiness, 0)


def test_a_seed_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="seed must be at least 0, not -1"):
        arrival_times(3, 1, 1, -1)
