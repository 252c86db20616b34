"""Learned step times: right where measured, careful where not, and not fooled by one slow step."""

import random

import pytest

from octavo.core.rates import Rates, StepModel, Window


def true_seconds(tokens: int) -> float:
    return 0.01 + 1e-4 * tokens


def test_nothing_is_claimed_before_anything_is_measured() -> None:
    rates = Rates()
    assert rates.seconds(4) is None
    assert rates.tokens_within(1.0) == 0
    assert rates.token_seconds is None
    assert rates.block_seconds is None
    rates.note_step(10, 0.0)
    rates.note_step(0, 1.0)
    assert rates.seconds(10) is None


def test_steps_between_measured_sizes_are_interpolated() -> None:
    rates = Rates()
    for tokens in (4, 64, 1024):
        rates.note_step(tokens, true_seconds(tokens))
    for tokens in (2, 4, 20, 64, 500, 1024):
        assert rates.seconds(tokens) == pytest.approx(true_seconds(tokens), rel=0.01)
    assert rates.token_seconds == pytest.approx(true_seconds(1024) / 1024)


def test_a_limit_is_approached_from_below_as_steps_are_measured() -> None:
    rates = Rates()
    rates.note_step(4, true_seconds(4))
    limit = true_seconds(500)
    for _ in range(20):
        tokens = rates.tokens_within(limit)
        assert 0 < true_seconds(tokens) <= limit
        rates.note_step(tokens, true_seconds(tokens))
    assert tokens > 450


def test_one_slow_step_does_not_stick() -> None:
    rates = Rates()
    rates.note_step(1500, 5.0)  # the first one compiled something
    rates.note_step(4, true_seconds(4))
    for _ in range(30):
        tokens = max(rates.tokens_within(true_seconds(1000)), 68)
        rates.note_step(tokens, true_seconds(tokens))
    assert tokens > 800
    rates.note_step(tokens, 2.0)
    for _ in range(5):
        rates.note_step(tokens, true_seconds(tokens))
    assert rates.tokens_within(true_seconds(1000)) > 700


def test_better_times_are_believed_sooner_than_worse_ones() -> None:
    rates = Rates()
    for _ in range(10):
        rates.note_step(100, 0.1)
    for _ in range(4):
        rates.note_step(100, 0.05)
    assert rates.seconds(100) == pytest.approx(0.05, rel=0.1)
    for _ in range(4):
        rates.note_step(100, 0.1)
    assert rates.seconds(100) == pytest.approx(0.06, rel=0.1)


def test_copies_are_averaged_and_never_negative() -> None:
    rates = Rates()
    rates.note_copies(0, 1.0)
    assert rates.block_seconds is None
    rates.note_copies(10, 0.01)
    assert rates.block_seconds == pytest.approx(0.001)
    for _ in range(40):
        rates.note_copies(4, -1.0)
    assert 0 <= rates.block_seconds < 1e-6


def test_window_percentile_and_age() -> None:
    window = Window(10.0)
    assert window.percentile(0.99) is None
    for now in range(100):
        window.add(float(now), float(now), 2)
    window.trim(99.0)
    assert len(window) == 11
    assert window.percentile(0.99) == 99.0
    assert window.percentile(0.5) == 94.0
    assert window.total() == 2 * sum(range(89, 100))
    window.clear()
    assert len(window) == 0


def test_a_step_model_finds_the_line_in_noise() -> None:
    model, draw = StepModel(), random.Random(1)
    for _ in range(300):
        due, others = draw.randrange(1, 40), draw.choice([0, 0, 50, 200])
        exact = 0.01 + 4e-4 * due + 9e-4 * others
        model.note(due, others, exact * draw.uniform(0.95, 1.05))
    assert model.steps == 300
    assert model.largest <= 239
    for due, others in [(1, 0), (30, 0), (30, 100), (10, 200)]:
        exact = 0.01 + 4e-4 * due + 9e-4 * others
        assert model.seconds(due, others) == pytest.approx(exact, rel=0.08)


def test_a_step_model_keeps_what_the_latest_steps_do_not_say() -> None:
    model = StepModel()
    for number in range(100):
        model.note(
            number % 20, 10 * (number % 7), 0.01 + 4e-4 * (number % 20) + 9e-3 * (number % 7)
        )
    for _ in range(2000):
        model.note(8, 0, 0.0132)
    assert model.token == pytest.approx(9e-4, rel=0.1)
    assert model.seconds(8, 0) == pytest.approx(0.0132, rel=0.01)


def test_a_step_model_starts_empty_and_ignores_what_took_no_time() -> None:
    model = StepModel()
    model.note(3, 0, 0.0)
    assert (model.steps, model.seconds(5, 5)) == (0, 0.0)
    model.note(4, 0, 0.02)
    assert model.seconds(4, 0) == pytest.approx(0.02, rel=0.01)
