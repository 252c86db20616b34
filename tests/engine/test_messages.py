"""What crosses the border arrives as it left."""

import msgspec
import pytest

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, TokenLogprobs
from octavo.core.scheduler import Update
from octavo.core.slo import SLOState
from octavo.engine import messages
from octavo.engine.messages import Abort, Add, Beat, Dead, FinishChoice, Launch, Ready, Step, Stop
from octavo.engine.stats import EngineStats, Observations, Percentiles
from octavo.params import SamplingParams

PARAMS = SamplingParams(
    n=3, stop=["a", "b"], stop_token_ids=[7], logit_bias={3: 1.5}, seed=-5, max_tokens=None,
    bad_words=["x"], allowed_token_ids=[1, 2], logprobs=0,
)  # fmt: skip
COMMANDS = [
    Add("r", [1, 2, 2**31 - 1], PARAMS, 1.5, -3, "salt", None, ((1, 2), (3,))),
    Abort(["a", "b"]),
    FinishChoice("a", 2),
    Stop(),
]
LOGPROBS = TokenLogprobs((1, 1, 2), (-0.5, -0.5, float("-inf")), (1, 1, 2))
UPDATE = Update("a", 1, (5, 6), (LOGPROBS, None), "stop", 6, 3, (LOGPROBS,), None)
NUMBERS = [0.5] * 7 + [3] * 9
SNAPSHOT = EngineStats(
    *NUMBERS, {"stop": 1}, Percentiles(), Percentiles(1.0), Percentiles(),
    slo=SLOState(p99_itl=0.5),
)  # fmt: skip
REPORTS = [
    Ready(RunnerLimits(9, 16, 1, 64, 256, (1, 2), generation_defaults={"top_k": 5}), {"a": "b"}),
    Step([UPDATE, Update("b", 0)]),
    messages.Refused("a", "no", "prompt"),
    messages.Stats(SNAPSHOT, Observations(ttft=[0.5], step_tokens=[3])),
    Beat(),
    Dead("it broke", True),
]


@pytest.mark.parametrize(
    ("message", "kinds"),
    [(m, messages.Command) for m in COMMANDS] + [(m, messages.Report) for m in REPORTS],
    ids=lambda value: type(value).__name__,
)
def test_a_message_arrives_as_it_left(message, kinds):
    raw = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(raw, type=kinds) == message


def test_parameters_are_checked_again_when_they_arrive():
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(COMMANDS[0]))
    raw[3]["temperature"] = -1.0
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=messages.Command)


def test_a_launch_is_one_line():
    launch = Launch(EngineConfig(model="a\nb", chat_template="c\nd"), "in", "out", "module:name")
    raw = msgspec.json.encode(launch)
    assert b"\n" not in raw
    assert msgspec.json.decode(raw, type=Launch) == launch
