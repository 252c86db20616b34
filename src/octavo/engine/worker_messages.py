"""The messages between rank 0, which is in the engine's process, and the other ranks.

Plans go to all ranks alike (`engine.worker_plans`); an empty frame ends them. Results do not come
back: every rank computes the same, and rank 0 has it already.
"""

import msgspec

from octavo.config import EngineConfig
from octavo.dist.rendezvous import Rendezvous
from octavo.engine.messages import EngineKeys, Fault

RUNNER = "octavo.runner.model_runner:ModelRunner"
STOP = b""  # in place of a plan


class WorkerLaunch(msgspec.Struct, frozen=True):
    """What a worker is told when it starts, as JSON on its standard input or by other means.

    config: of the engine; its device and its threads are this rank's. here: how many of the
    `size` ranks are on the worker's machine. plans, reports: ZeroMQ addresses to connect to.
    engine: a name that the ranks of one engine share. runner: `module:name` of what is called
    with the configuration and the `runner.ranks.Ranks`. keys: None where rank 0 is on the same
    machine.
    """

    config: EngineConfig
    rank: int
    size: int
    here: int
    meeting: Rendezvous
    plans: str
    reports: str
    engine: str
    runner: str = RUNNER
    keys: EngineKeys | None = None


class Started(msgspec.Struct, tag="started", array_like=True, frozen=True):
    """The worker runs; what it imports and loads may take long."""

    rank: int


class Loaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """Its part of the model is loaded: it waits for plans."""

    rank: int


class WorkerBeat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """A heartbeat, from a thread of its own. operations: of the group that it has begun."""

    rank: int
    operations: int


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The last message. follows: it only met the end of another rank."""

    rank: int
    fault: Fault
    follows: bool = False


WorkerReport = Started | Loaded | WorkerBeat | Failed
