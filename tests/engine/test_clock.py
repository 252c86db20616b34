"""Times of another machine, with an offset, a way that takes time, and a drift."""

import random

import pytest

from octavo.engine.clock import RemoteClock


def test_it_is_our_clock_until_something_has_come():
    clock = RemoteClock()
    assert clock.theirs(12.5) == 12.5
    assert clock.ours(12.5) == 12.5


@pytest.mark.parametrize("offset", [-4e5, 0.0, 3.25, 7e6])
def test_the_quickest_message_counts(offset):
    clock, draw = RemoteClock(), random.Random(0)
    for i in range(64):
        sent = 100.0 + i / 2
        clock.observe(sent - offset, sent + 0.001 + (draw.random() if i != 40 else 0))
    assert clock.ours(50.0 - offset) == pytest.approx(50.001, abs=1e-6)
    assert clock.theirs(50.001) == pytest.approx(50.0 - offset, abs=1e-6)


def test_it_follows_a_drift():
    """50 us a second: after two hours 0.36 s, which the oldest message must not hold back."""
    clock = RemoteClock()
    for i in range(14400):
        now = i / 2
        clock.observe(now * (1 + 50e-6), now)
    assert clock.theirs(now) == pytest.approx(now * (1 + 50e-6), abs=0.002)
    clock = RemoteClock()
    for i in range(14400):
        now = i / 2
        clock.observe(now * (1 - 50e-6), now)
    assert clock.theirs(now) == pytest.approx(now * (1 - 50e-6), abs=0.002)
