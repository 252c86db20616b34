"""What is refused before the engine hears of it, and what the refusal says."""

import pytest

from octavo.core.plan import RunnerLimits
from octavo.engine.admission import admit
from octavo.errors import ContextLengthError, RequestError, RequestTypeError
from octavo.params import SamplingParams

LIMITS = RunnerLimits(num_blocks=9, block_size=16, block_bytes=1, max_model_len=64, vocab_size=100)


def test_gives_the_tokens_that_may_be_generated():
    assert admit([1] * 10, SamplingParams(max_tokens=54), LIMITS) == 54
    assert admit([1] * 10, SamplingParams(max_tokens=None), LIMITS) == 54
    assert admit([1] * 63, SamplingParams(max_tokens=1), LIMITS) == 1


@pytest.mark.parametrize("length", [64, 65, 1000, 200_000])
def test_lim_01_too_long_a_prompt_names_both_numbers(length):
    with pytest.raises(ContextLengthError, match=rf"{length} tokens.*64") as caught:
        admit([1] * length, SamplingParams(max_tokens=1), LIMITS)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("wanted", [55, 10**6, 2**31 - 1, 2**31, 2**63 - 1])
def test_lim_02_max_tokens_that_cannot_fit_is_refused(wanted):
    with pytest.raises(ContextLengthError, match=rf"10 tokens.*{wanted}.*64.*at most 54"):
        admit([1] * 10, SamplingParams(max_tokens=wanted), LIMITS)


def test_lim_07_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt is empty"):
        admit([], SamplingParams(), LIMITS)


@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(RequestError, match=rf"prompt has token id {bad}.*0 to 99"):
        admit([1, bad], SamplingParams(), LIMITS)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if 0 <= bad < 2**31:
            with pytest.raises(RequestError, match=name):
                admit([1], SamplingParams(**{name: [bad]}), LIMITS)
    if bad >= 0:
        with pytest.raises(RequestError, match="logit_bias"):
            admit([1], SamplingParams(logit_bias={bad: 1.0}), LIMITS)


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_ids_of_a_wrong_type_are_refused(bad):
    with pytest.raises(RequestTypeError, match="integers"):
        admit([1, bad], SamplingParams(), LIMITS)


def test_min_tokens_that_cannot_fit_is_refused():
    with pytest.raises(RequestError, match=r"min_tokens.*60.*54"):
        admit([1] * 10, SamplingParams(max_tokens=None, min_tokens=60), LIMITS)
