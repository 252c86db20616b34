"""What is refused before the engine gets it, and what the refusal says."""

import math

import pytest

from octavo.core.plan import RunnerLimits
from octavo.core.submission import Submission
from octavo.engine.admission import admit, deadline_at, output_limit
from octavo.engine.capabilities import EngineCapabilities
from octavo.errors import ContextLengthError, RequestError, RequestTypeError
from octavo.params import SamplingParams

LIMITS = RunnerLimits(num_blocks=9, block_size=16, block_bytes=1, max_model_len=64, vocab_size=100)
ALL = EngineCapabilities(LIMITS, "priority")
FIFO = EngineCapabilities(LIMITS, "fifo", heeds_priority=False, heeds_deadline=False)


def check(prompt, params=None, capabilities=ALL, **fields):
    submission = Submission("r", tuple(prompt), params or SamplingParams(), **fields)
    assert admit(submission, capabilities) is submission
    return submission


def test_says_how_many_tokens_may_be_generated():
    for prompt, asked, most in (([1] * 10, 54, 54), ([1] * 10, None, 54), ([1] * 63, 1, 1)):
        submission = check(prompt, SamplingParams(max_tokens=asked))
        assert output_limit(submission, LIMITS) == most


@pytest.mark.parametrize("length", [64, 65, 1000, 200_000])
def test_lim_01_too_long_a_prompt_names_both_numbers(length):
    with pytest.raises(ContextLengthError, match=rf"{length} tokens.*64") as caught:
        check([1] * length, SamplingParams(max_tokens=1))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("wanted", [55, 10**6, 2**31 - 1, 2**31, 2**63 - 1])
def test_lim_02_max_tokens_that_cannot_fit_is_refused(wanted):
    with pytest.raises(ContextLengthError, match=rf"10 tokens.*{wanted}.*64.*at most 54"):
        check([1] * 10, SamplingParams(max_tokens=wanted))


def test_lim_07_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt is empty"):
        check([])


@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(RequestError, match=rf"prompt has token id {bad}.*0 to 99"):
        check([1, bad])
    for name in ("stop_token_ids", "allowed_token_ids"):
        if 0 <= bad < 2**31:
            with pytest.raises(RequestError, match=name):
                check([1], SamplingParams(**{name: [bad]}))
    if bad >= 0:
        with pytest.raises(RequestError, match="logit_bias"):
            check([1], SamplingParams(logit_bias={bad: 1.0}))


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_ids_of_a_wrong_type_are_refused(bad):
    with pytest.raises(RequestTypeError, match="integers"):
        check([1, bad])


def test_min_tokens_that_cannot_fit_is_refused():
    with pytest.raises(RequestError, match=r"min_tokens.*60.*54"):
        check([1] * 10, SamplingParams(max_tokens=None, min_tokens=60))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"deadline": math.nan}, "deadline"),
        ({"deadline": math.inf}, "deadline"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"cache_salt": b"a"}, "cache_salt"),
        ({"cache_salt": "x" * 2**20}, "cache_salt"),
    ],
)
def test_pfx_09_sch_06_wrong_values_are_refused_by_name(wrong, param):
    with pytest.raises(RequestError) as caught:
        check([1], **wrong)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("given", [{"priority": -3}, {"deadline": 5.0}])
def test_what_the_scheduler_would_ignore_is_refused(given):
    check([1], **given)
    check([1], capabilities=FIFO)
    with pytest.raises(
        RequestError, match=r"'fifo' does not use it.*--scheduler priority"
    ) as caught:
        check([1], capabilities=FIFO, **given)
    assert [caught.value.param] == list(given)


def test_a_deadline_is_seconds_from_now():
    assert deadline_at(None, 7.0) is None
    assert deadline_at(2, 7.0) == 9.0
    for bad in (0, -1.0, math.inf, math.nan):
        with pytest.raises(RequestError, match="deadline must be a finite number of seconds"):
            deadline_at(bad, 7.0)
    for bad in (True, "5"):
        with pytest.raises(RequestTypeError, match="deadline must be a number"):
            deadline_at(bad, 7.0)
