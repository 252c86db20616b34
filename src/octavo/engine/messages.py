"""Everything that crosses the border between the web process and the engine process.

Token ids only: text stays on the web side, tensors stay on the engine side. Times are seconds
of the machine's monotonic clock, which both processes share.
"""

from collections.abc import Sequence

import msgspec

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.scheduler import Update
from octavo.engine.stats import EngineStats, Observations
from octavo.params import SamplingParams


class Launch(msgspec.Struct, frozen=True):
    """The first thing the engine process reads, from its standard input.

    inbox, outbox: ZeroMQ addresses of the commands and of the reports. executor: `module:name`
    of a function from EngineConfig to an executor.
    """

    config: EngineConfig
    inbox: str
    outbox: str
    executor: str


# To the engine.


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Queue a request, which the web side has already admitted."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    deadline: float | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End requests; ids that are not in flight are let pass."""

    request_ids: Sequence[str]


class FinishChoice(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """A stop string ended this choice, seen where the text is."""

    request_id: str
    index: int


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Leave the loop and exit."""


Command = Add | Abort | FinishChoice | Stop

# From the engine.


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The model is loaded. `explain` says what computes each operation."""

    limits: RunnerLimits
    explain: dict[str, str]


class Step(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """What the choices gained in one step."""

    updates: Sequence[Update]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The engine does not take this request."""

    request_id: str
    message: str
    param: str | None


class Stats(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    """A snapshot, and the samples since the last one. Sent while busy, and when work ends."""

    stats: EngineStats
    fresh: Observations


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The process runs, even where a step takes long."""


class Dead(msgspec.Struct, tag="dead", array_like=True, frozen=True):
    """The last message. `config_fault`: the engine could not start as it was asked to."""

    reason: str
    config_fault: bool = False


Report = Ready | Step | Refused | Stats | Beat | Dead
