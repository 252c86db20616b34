"""What crosses the border arrives as it left."""

import msgspec
import pytest

from octavo import errors
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, TokenLogprobs
from octavo.core.policy import Gauge
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine import messages
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.messages import (
    Abort,
    Accepted,
    Add,
    Beat,
    Dead,
    Fault,
    FinishChoice,
    Launch,
    Ready,
    Step,
    Stop,
)
from octavo.engine.stats import EngineStats, Observations, Percentiles
from octavo.params import SamplingParams

PARAMS = SamplingParams(
    n=3, stop=["a", "b"], stop_token_ids=[7], logit_bias={3: 1.5}, seed=-5, max_tokens=None,
    bad_words=["x"], allowed_token_ids=[1, 2], logprobs=0,
)  # fmt: skip
COMMANDS = [
    Add(Submission("r", (1, 2, 2**31 - 1), PARAMS, ((1, 2), (3,)), 1.5, -3, 9.5, "salt")),
    Add(Submission("r", (1,), PARAMS)),
    Abort(["a", "b"]),
    FinishChoice("a", 2),
    Stop(),
]
LOGPROBS = TokenLogprobs((1, 1, 2), (-0.5, -0.5, float("-inf")), (1, 1, 2))
UPDATE = Update("a", 1, (5, 6), (LOGPROBS, None), "stop", 6, 3, (LOGPROBS,), None)
NUMBERS = [0.5] * 7 + [3] * 9
SNAPSHOT = EngineStats(
    *NUMBERS, {"stop": 1}, Percentiles(), Percentiles(1.0), Percentiles(),
    policy={"p99_itl_seconds": 0.5}, policy_name="slo",
)  # fmt: skip
REPORTS = [
    Ready(
        EngineCapabilities(
            RunnerLimits(9, 16, 1, 64, 256, (1, 2), generation_defaults={"top_k": 5}),
            "slo",
            False,
            True,
            (Gauge("depth", "How deep.", 2.5, True),),
            {"a": "b"},
        )
    ),
    Accepted(["a", "b"]),
    Step([UPDATE, Update("b", 0)]),
    messages.Refused("a", Fault("ContextLengthError", "no", "prompt")),
    messages.Stats(SNAPSHOT, Observations(ttft=[0.5], step_tokens=[3])),
    Beat(12.5),
    Dead(Fault("ConfigError", "it broke")),
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
    raw[1][2]["temperature"] = -1.0
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=messages.Command)


def test_a_launch_is_one_line():
    launch = Launch(EngineConfig(model="a\nb", chat_template="c\nd"), "in", "out", "module:name")
    raw = msgspec.json.encode(launch)
    assert b"\n" not in raw
    assert msgspec.json.decode(raw, type=Launch) == launch


def test_a_text_of_a_type_of_its_own_is_launched_as_a_text():
    """As `octavo serve --config FILE` marks the model that the file names."""

    class Named(str):
        pass

    launch = Launch(EngineConfig(model=Named("m")), "in", "out", "module:name")
    assert msgspec.json.decode(messages.launch_line(launch), type=Launch).config.model == "m"


def subclasses(kind):
    return {kind, *(other for child in kind.__subclasses__() for other in subclasses(child))}


def crossed(error):
    raw = msgspec.msgpack.encode(Dead(Fault.of(error)))
    return msgspec.msgpack.decode(raw, type=messages.Report).fault.error()


def test_every_error_crosses_as_what_it_is():
    kinds = {kind for kind in subclasses(errors.OctavoError) if kind.__module__ == errors.__name__}
    assert kinds == set(errors.ERROR_KINDS.values())
    for kind in kinds:
        fields = {"param": "prompt"} if issubclass(kind, errors.RequestError) else {}
        error = kind("why", **fields)
        arrived = crossed(error)
        assert (type(arrived), str(arrived), vars(arrived)) == (kind, str(error), vars(error))


def test_other_errors_cross_as_the_nearest_that_is_known():
    class Shed(errors.QueueFullError):
        pass

    assert type(crossed(Shed("later"))) is errors.QueueFullError
    assert str(crossed(MemoryError("big"))) == "the engine is dead: MemoryError: big"
