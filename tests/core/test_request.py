"""A request is checked when made, and derives what can be derived."""

import math

import pytest
from tests.core.harness import make

from octavo.core.request import Request, Status
from octavo.errors import RequestError
from octavo.params import SamplingParams


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
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
def test_pfx_09_sch_06_wrong_values_are_refused_by_name(
    wrong: dict[str, object], param: str
) -> None:
    values: dict[str, object] = {"prompt_token_ids": [1], "max_tokens": 1, **wrong}
    prompt = values.pop("prompt_token_ids")
    with pytest.raises(RequestError) as caught:
        Request("r", prompt, SamplingParams(), seed=0, **values)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def test_a_fork_has_the_same_past_and_its_own_name() -> None:
    parent = make("r", [1, 2, 3], n=3, seed=5, repetition_penalty=1.1)
    assert parent.to_fork
    assert [spec.index for spec in parent.sample_specs()] == [0, 1, 2]
    child = parent.fork(2)
    assert child.seq_id == "r#2"
    assert child.prompt_ids is parent.prompt_ids
    child.tokens.append(9)
    assert parent.tokens == [1, 2, 3]
    assert not child.to_fork
    (spec,) = child.sample_specs()
    assert (spec.index, spec.position, spec.output_ids) == (2, 1, (9,))


def test_history_is_only_given_to_those_who_look_at_it() -> None:
    plain, looking = make("a", [1, 2]), make("b", [1, 2], presence_penalty=1.0)
    for request in (plain, looking):
        request.tokens.append(7)
    assert plain.sample_specs()[0].prompt_ids == plain.sample_specs()[0].output_ids == ()
    assert looking.sample_specs()[0].prompt_ids == (1, 2)
    assert looking.sample_specs()[0].output_ids == (7,)


def test_waiting_time_adds_up() -> None:
    request = make("r", [1], arrival=2.0)
    assert request.waited_at(5.0) == 3.0
    request.waited, request.status = 3.0, Status.RUNNING
    assert request.waited_at(9.0) == 3.0
    request.status, request.waiting_since = Status.PREEMPTED, 9.0
    assert request.waited_at(10.0) == 4.0
    assert "r" in repr(request)
