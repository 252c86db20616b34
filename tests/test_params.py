"""`SamplingParams`: every field's range, type and message; nothing is accepted and ignored."""

import pickle
from dataclasses import FrozenInstanceError, fields

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from octavo.errors import RequestError, RequestTypeError
from octavo.params import RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")
INTEGERS = ("n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs",
            "thinking_token_budget")  # fmt: skip
REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty")  # fmt: skip
FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
LISTS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget", *LISTS)


def refused(**values):
    """The error of bad values; it names the field, and its message is short and plain."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    error = caught.value
    assert error.param in values
    assert error.param in str(error)
    assert len(str(error)) < 300
    return error


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.stop_strings == ()
    assert not params.greedy
    assert not params.needs_history


def test_every_field_is_tested_here():
    named = {*INTEGERS, *REALS, *FLAGS, *LISTS, "output_kind", "structured_outputs"}
    assert {f.name for f in fields(SamplingParams)} == named


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", [1, 2, 1024], [0, -1, 1025]),
        ("temperature", [0, 0.0, 1e-9, 2, 2.0], [-1, -1e-9, 2.01, 999999]),
        ("top_p", [1e-9, 0.5, 1, 1.0], [0, 0.0, -1, 1.0001]),
        ("top_k", [-1, 0, 1, 9_999_999], [-2]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
        ("repetition_penalty", [1e-9, 1, 1e9], [0, -1]),
        ("presence_penalty", [-2, 0, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 0, 2], [-2.01, 2.01]),
        ("seed", [0, -1, 42, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]),
        ("max_tokens", [1, 2**31, 2**63 - 1], [0, -1, 2**63]),
        ("min_tokens", [0, 16], [-1]),
        ("thinking_token_budget", [0, 1024, 2**63 - 1], [-1, 2**63]),
        ("logprobs", [0, 1, 20], [-1, 21]),
        ("prompt_logprobs", [0, 1, 20], [-1, 21]),
    ],
)
def test_smp_04_ranges(field, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in bad:
        error = refused(**{field: value})
        assert not isinstance(error, RequestTypeError)
        assert repr(value) in str(error)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e999], ids=str)
@pytest.mark.parametrize("field", REALS)
def test_smp_01_not_numbers(field, value):
    refused(**{field: value})


@pytest.mark.parametrize("value", [NAN, INF, -INF, 101, -101, 100.5, 10**5000], ids=type)
def test_smp_01_not_a_bias(value):
    assert not isinstance(refused(logit_bias={7: value}), RequestTypeError)


@pytest.mark.parametrize("field", [*INTEGERS, *REALS])
def test_lim_06_wrong_types(field):
    for value in ("5", "nan", True, [], {}, b"1", object()):
        assert isinstance(refused(**{field: value}), RequestTypeError)
    if field in INTEGERS:
        assert isinstance(refused(**{field: 1.5}), RequestTypeError)


@pytest.mark.parametrize(
    "value", [2**63, -(2**63) - 1, 10**400, -(10**5000), [[10**5000]]], ids=type
)
@pytest.mark.parametrize("field", [*INTEGERS, *REALS])
def test_lim_06_huge_integers(field, value):
    """Python refuses to write out integers of more than 4,300 digits; messages must not try."""
    refused(**{field: value})


@pytest.mark.parametrize("field", FLAGS)
def test_flags_are_booleans(field):
    for value in (1, 0, "true", None):
        assert isinstance(refused(**{field: value}), RequestTypeError)


@pytest.mark.parametrize("field", OPTIONAL)
def test_none_is_the_default_of_optional_fields(field):
    assert SamplingParams(**{field: None}).stop_strings == ()


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_texts(field):
    assert getattr(SamplingParams(**{field: "end"}), field) == ("end",)
    assert getattr(SamplingParams(**{field: ["a", "b"]}), field) == ("a", "b")
    assert getattr(SamplingParams(**{field: []}), field) == ()
    for value in ("", ["a", ""]):
        assert not isinstance(refused(**{field: value}), RequestTypeError)
    for value in (5, [5], b"x", [None], {"a": 1}):
        assert isinstance(refused(**{field: value}), RequestTypeError)


def test_at_most_64_stop_strings():
    assert len(SamplingParams(stop=["x"] * 64).stop_strings) == 64
    assert "64" in str(refused(stop=["x"] * 65))


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids(field):
    assert getattr(SamplingParams(**{field: [0, 5]}), field) == (0, 5)
    for value in ([-1], [2**31], [10**5000]):
        assert not isinstance(refused(**{field: value}), RequestTypeError)
    for value in (5, "5", ["5"], [1.0], [True], {1: 2}):
        assert isinstance(refused(**{field: value}), RequestTypeError)


def test_allowed_ids_may_not_be_none_at_all():
    assert "at least one id" in str(refused(allowed_token_ids=[]))


def test_smp_17_bias():
    bias = {7: 100, 8: -100, 9: 0.5}
    assert SamplingParams(logit_bias=bias).logit_bias == bias
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(10_000), 1)).logit_bias) == 10_000
    for key in (-1, "V", "-1", "abc", "1.5", " 5", "", 1.0, True, None, 2**31, 10**5000):
        refused(logit_bias={key: 1})
    for value in (None, "5", [1], True):
        assert isinstance(refused(logit_bias={7: value}), RequestTypeError)
    for value in ([7], "7", 7, [[7, 1]]):
        assert isinstance(refused(logit_bias=value), RequestTypeError)


def test_output_kind_is_checked():
    assert isinstance(refused(output_kind="delta"), RequestTypeError)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("topk", "top_k")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, meant):
    error = refused(**{name: 1})
    assert isinstance(error, TypeError)
    assert f"did you mean {meant!r}?" in str(error)


def test_fields_that_do_not_go_together():
    assert "max_tokens (3)" in str(refused(min_tokens=4, max_tokens=3))
    assert SamplingParams(min_tokens=4, max_tokens=None).min_tokens == 4
    assert refused(stop="x", detokenize=False).param == "stop"


def test_a_callers_lists_are_copied():
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 2.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 1.0})


def test_values_are_frozen_and_derived_ones_are_checked():
    params = SamplingParams(temperature=0, presence_penalty=1)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0
    assert params.greedy
    assert params.needs_history
    changed = params.with_(presence_penalty=0, n=3)
    assert not changed.needs_history
    assert (changed.n, params.n) == (3, 1)
    with pytest.raises(RequestError):
        params.with_(top_p=2)


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"frequency_penalty": -1}, {"presence_penalty": 1},
     {"bad_words": ["x"]}],
)  # fmt: skip
def test_history_is_asked_for_where_it_is_used(params):
    assert SamplingParams(**params).needs_history


def test_an_assignment_is_answered_with_what_to_do():
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError, match=r"params = params.with_\(temperature=...\)"):
        params.temperature = 0.5
    assert params.clone() == params
    assert params.clone() is not params


def test_from_optional_takes_none_for_the_default():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=0.5, stop=None, logit_bias={"7": 1.5}, best_of=None
    )
    assert params == SamplingParams(top_p=0.5, logit_bias={7: 1.5})
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16
    refused(logit_bias={"7": 1})


def test_best_of_may_repeat_n():
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)
    assert "use n" in str(refused(n=3, best_of=4))


def test_the_whole_vocabulary_is_not_given_for_each_token():
    assert "more data than tokens" in str(refused(logprobs=-1))


def test_values_survive_a_process_border():
    params = SamplingParams(
        n=2, stop=["a"], logit_bias={3: 1.5}, bad_words="x", seed=-5, logprobs=0,
        output_kind=RequestOutputKind.DELTA, allowed_token_ids=[1, 2],
    )  # fmt: skip
    assert params.needs_history
    assert pickle.loads(pickle.dumps(params)) == params
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(field=st.sampled_from([f.name for f in fields(SamplingParams)]), value=anything)
def test_lim_06_any_value_is_taken_or_refused_by_name(field, value):
    try:
        params = SamplingParams(**{field: value})
    except RequestError as error:
        named = (error.param or "").partition(".")[0]
    else:
        named = field
        assert SamplingParams(**{field: getattr(params, field)}) == params
    assert named == field
