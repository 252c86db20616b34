"""What a caller gets back converts itself to what `json.dumps` takes, whatever it holds."""

import dataclasses
import inspect
import json
import math
import typing

import msgspec
import pytest

from octavo import outputs
from octavo.config import EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.outputs import (
    AnswerMessage,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ToolCall,
)

INF = math.inf
POSITION = {5: Logprob(-INF, 9, "\ufffd"), 6: Logprob(-0.5, 1, "a")}
CALL = ToolCall("c1", "f", '{"a": 1}')
MESSAGE = AnswerMessage(None, "hm", (CALL,))
CHOICE = CompletionOutput(0, "a", [6], -INF, [POSITION], "stop", "END", MESSAGE)
WHOLE = RequestOutput(
    "r", "p", [5], [CHOICE], True, [None, POSITION], 3, RequestMetrics(1.0, 2.0, None, 4.0, 1), None
)
SAMPLES = [POSITION[5], POSITION[6], CHOICE, WHOLE, WHOLE.metrics, CALL, MESSAGE]


def strictly(value: object) -> str:
    return json.dumps(value, allow_nan=False)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda value: type(value).__name__)
def test_every_output_is_ready_for_json(sample: typing.Any) -> None:
    given = sample.as_dict()
    names = (
        sample.__struct_fields__
        if isinstance(sample, msgspec.Struct)
        else [field.name for field in dataclasses.fields(sample)]
    )
    assert list(given) == list(names), "every field is there, in order"
    strictly(given)


def test_every_type_of_the_module_is_tried() -> None:
    types = {
        value
        for value in vars(outputs).values()
        if inspect.isclass(value) and value.__module__ == outputs.__name__
    }
    assert types == {type(sample) for sample in SAMPLES}


def test_what_json_has_no_word_for() -> None:
    found = WHOLE.as_dict()
    choice = found["outputs"][0]
    assert choice["cumulative_logprob"] == outputs.FLOOR
    assert list(choice["logprobs"][0]) == ["5", "6"], "keys of JSON are strings"
    assert choice["logprobs"][0]["5"]["logprob"] == outputs.FLOOR
    assert found["prompt_logprobs"][0] is None
    assert found["metrics"]["first_scheduled_time"] == 2.0


def test_the_result_shares_nothing_with_the_output() -> None:
    found = WHOLE.as_dict()
    found["outputs"][0]["token_ids"].append(7)
    found["prompt_token_ids"].clear()
    assert CHOICE.token_ids == [6]
    assert WHOLE.prompt_token_ids == [5]


def test_statistics_are_ready_for_json() -> None:
    stats = Engine(EngineConfig(), FakeRunner(), create_policy("fifo")).stats
    strictly(stats.as_dict())
