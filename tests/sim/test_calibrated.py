"""Calibrated costs: the sum by hand, terms found again from times, files of calibrations."""

import json
import random

import pytest

from octavo.errors import ConfigError
from octavo.sim.calibrated import CalibratedCost, Calibration, Measured, Terms, fit
from octavo.sim.cost import StepShape

TERMS = Terms(
    step=0.010, alone=0.002, slopes=(0.0, 1e-4, 2e-4, 4e-4, 5e-4), head=0.003,
    head_slopes=(1e-5, 2e-4, 3e-4), read=1e-6, shared=2e-7, pair=3e-7,
)  # fmt: skip
HOST = Terms(
    step=0.010, alone=0.0, slopes=(0.0,) * 5, head=0.0, head_slopes=(0.0,) * 3, read=0.0,
    shared=0.0, pair=0.0, host_step=0.001, host_row=1e-4, copy=1e-3,
)  # fmt: skip


def decode(rows, context, shared=0):
    return StepShape(rows, rows, rows * context, 0, 0, rows, True, 0, shared)


def prompt(tokens, behind=0, draws=False):
    pairs = tokens * behind + tokens * (tokens + 1) // 2
    return StepShape(tokens, int(draws), 0, tokens, pairs, 1, False, 0)


def test_a_step_is_the_sum_of_its_parts():
    cost = CalibratedCost(TERMS)
    assert cost.seconds(decode(1, 100)) == pytest.approx(0.010 + 0.002 + 0.003 + 100e-6)
    # 20 rows: 12 from 4 to 16, 4 from 16 on; logits: 7 from 1 to 8, 12 from 8 on.
    rows, head = 0.010 + 12e-4 + 4 * 2e-4, 0.003 + 7e-5 + 12 * 2e-4
    assert cost.seconds(decode(20, 50)) == pytest.approx(rows + head + 1000e-6)
    assert cost.seconds(decode(20, 50, 900)) == pytest.approx(rows + head + 100e-6 + 900 * 2e-7)
    rows = 0.010 + 12e-4 + 48 * 2e-4 + 192 * 4e-4 + 44 * 5e-4
    assert cost.seconds(prompt(300)) == pytest.approx(rows + 300 * 301 / 2 * 3e-7)


def test_what_the_host_and_copies_take():
    cost = CalibratedCost(HOST)
    swapping = StepShape(0, 0, 0, 0, 0, 0, False, 4)
    assert cost.seconds(swapping) == pytest.approx(0.001 + 4e-3)
    assert cost.seconds(decode(8, 10)) == pytest.approx(0.011 + 8e-4)


def test_more_work_never_takes_less():
    draw, cost = random.Random(0), CalibratedCost(TERMS)
    for _ in range(200):
        few = decode(draw.randint(2, 300), draw.randint(1, 4000))
        for name in ("rows", "samples", "kv_read", "prefill_pairs", "sequences", "swapped_blocks"):
            more = few._replace(**{name: getattr(few, name) + draw.randint(1, 500)})
            assert cost.seconds(more) >= cost.seconds(few), name


def test_terms_are_found_again():
    exact = CalibratedCost(TERMS)
    shapes = [decode(rows, at) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 300) for at in (9, 900)]
    shapes += [prompt(tokens) for tokens in (1, 2, 8, 16, 64, 256, 512)] + [prompt(64, 900)]
    shapes += [decode(32, 800, 16000), prompt(64, draws=True)]
    terms, error = fit([Measured(shape, exact.seconds(shape)) for shape in shapes])
    assert error < 1e-9
    for name in ("step", "alone", "slopes", "head", "head_slopes", "read", "shared", "pair"):
        assert getattr(terms, name) == pytest.approx(getattr(TERMS, name), rel=1e-6, abs=1e-12)


def test_noise_gives_no_negative_terms():
    draw, exact = random.Random(1), CalibratedCost(TERMS)
    shapes = [decode(rows, 10) for rows in (1, 2, 4, 8, 16)] + [prompt(4), prompt(16)]
    for _ in range(20):
        noisy = [Measured(s, exact.seconds(s) * draw.uniform(0.7, 1.4)) for s in shapes]
        terms, _ = fit(noisy)
        assert min(terms.step, terms.alone, *terms.slopes, terms.head, terms.read, terms.pair) >= 0


def test_a_step_without_a_time_is_refused():
    with pytest.raises(ConfigError, match="no time at all"):
        fit([Measured(decode(1, 1), 0.0)])


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "calibration.json"
    found = Calibration("toy", "bfloat16", "bfloat16", "cpu", TERMS, 0.02, 0.01)
    found.save(path)
    return found, path


def test_a_file_gives_back_what_was_saved(saved):
    found, path = saved
    assert Calibration.load(path) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"octavo_calibration": 1}, "is of form 1, and this version reads 2; measure again"),
        ({"step": 0.0}, "step is 0.0; a step takes some time"),
        ({"read": -1e-6}, "read is -1e-06, not seconds from 0 on"),
        ({"slopes": [0.0, 1e-4]}, "slopes has 2 values and needs 5"),
        ({"slopes": "fast"}, "is no calibration as octavo simulate saves them"),
        ({"speed": 1}, "is no calibration as octavo simulate saves them"),
    ],
)
def test_a_wrong_file_is_one_sentence(saved, change, message):
    _, path = saved
    values = json.loads(path.read_text())
    for name, value in change.items():
        (values if name in values or name == "speed" else values["calibration"]["terms"])[name] = (
            value
        )
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        Calibration.load(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1]"])
def test_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no calibration"):
        Calibration.load(path)


def test_files_that_cannot_be_used(tmp_path, saved):
    with pytest.raises(ConfigError, match=r"cannot read calibration .*: No such file"):
        Calibration.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"cannot write calibration .*: No such file"):
        saved[0].save(tmp_path / "none" / "calibration.json")
