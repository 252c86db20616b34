"""The messages between the web process and the engine process.

Token ids only: text stays on the web side, tensors stay on the engine side. Times are seconds
of the engine machine's monotonic clock; where that is another machine, `engine.link` converts
them (`engine.clock`).
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.stats import EngineStats, Observations
from octavo.engine.watch import View
from octavo.errors import ERROR_KINDS, ConfigError, EngineDeadError, OctavoError, RequestError
from octavo.version import __version__


@functools.cache
def build() -> str:
    """The version, and a digest of the messages' form, which may change between two versions."""
    schemas = msgspec.json.schema_components([Launch, Command, Report])
    form = msgspec.json.encode(_without_texts(schemas), order="deterministic")
    return f"{__version__} (messages {hashlib.sha256(form).hexdigest()[:8]})"


def check_build(servers: str, where: str) -> None:
    """Raise ConfigError unless the server that sent this has the same build as this process."""
    if servers != build():
        raise ConfigError(
            f"the server has Octavo {servers}, {where} has Octavo {build()}: install the same "
            "version on all machines, and restart the server after an update"
        )


def launch_line(launch: object) -> bytes:
    """A launch as one line of JSON. A text of a type of its own, which a program or a command line
    may have given for an option, is a text there."""
    return msgspec.json.encode(launch, enc_hook=_plain) + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError(f"an option of type {type(value).__name__}")


def _without_texts(schema: Any) -> Any:
    """A schema without what its docstrings say."""
    if isinstance(schema, dict):
        return {
            name: _without_texts(part)
            for name, part in schema.items()
            if not (name == "description" and isinstance(part, str))
        }
    if isinstance(schema, (list, tuple)):
        return [_without_texts(part) for part in schema]
    return schema


class EngineKeys(msgspec.Struct, frozen=True):
    """The keys of an engine process whose server is on another machine (CURVE, as Z85 text).

    server: the server's public key. public, secret: the engine's own pair.
    """

    server: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return "EngineKeys(...)"  # never in a log


class Launch(msgspec.Struct, frozen=True):
    """The first message to the engine process, on its standard input.

    inbox, outbox: ZeroMQ addresses of the commands and of the reports. executor: `module:name`
    of a function from EngineConfig to an executor. keys: None where both processes are on one
    machine. build: the sender's, see `check_build`. engine: its number among
    `engines`. In `config`, data_parallel_size is how many of these share the machine.
    """

    config: EngineConfig
    inbox: str
    outbox: str
    executor: str
    keys: EngineKeys | None = None
    build: str = msgspec.field(default_factory=build)
    engine: int = 0
    engines: int = 1


class LaunchHead(msgspec.Struct, frozen=True):
    """The part of a Launch that is the same in all versions, so that one can refuse another."""

    outbox: str
    keys: EngineKeys | None = None
    build: str = "of an older version"


# To the engine.


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Queue a request, which the web side has admitted. Answered by Accepted or Refused."""

    submission: Submission


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End requests; ids that are not in flight are ignored."""

    request_ids: Sequence[str]


class FinishChoice(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """The web process found a stop string in the text of this choice."""

    request_id: str
    index: int


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Drop the cached prefixes. Answered by PrefixCacheReset."""


class Look(msgspec.Struct, tag="look", array_like=True, frozen=True):
    """Show what there is now, and the blocks of these requests. Answered by View."""

    followed: tuple[str, ...] = ()


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Leave the loop and exit."""


Command = Add | Abort | FinishChoice | ResetPrefixCache | Look | Stop

# From the engine.


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An exception as a value. `kind` is its type's name in `errors.ERROR_KINDS`."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """A type that is not in the table becomes its nearest base, else engine death."""
        if isinstance(error, EngineDeadError):
            return cls(EngineDeadError.__name__, error.reason)
        for kind in type(error).__mro__:
            if ERROR_KINDS.get(kind.__name__) is kind:
                return cls(kind.__name__, str(error), getattr(error, "param", None))
        return cls(EngineDeadError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> OctavoError:
        """The exception, reconstructed."""
        kind = ERROR_KINDS[self.kind]
        if issubclass(kind, RequestError):
            return kind(self.message, self.param)
        return kind(self.message)


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The model is loaded."""

    capabilities: EngineCapabilities


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """These requests are queued: from here on they have updates."""

    request_ids: Sequence[str]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The engine rejects this request."""

    request_id: str
    fault: Fault


class PrefixCacheReset(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """dropped: False if running requests hold cached prefixes."""

    dropped: bool


class Step(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """What the choices gained in one step."""

    updates: Sequence[Update]


class Stats(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    """A snapshot, and the samples since the last one. Sent while busy, and when work ends."""

    stats: EngineStats
    fresh: Observations


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """A heartbeat, also sent during long steps. clock: the time at which it was sent."""

    clock: float


class Dead(msgspec.Struct, tag="dead", array_like=True, frozen=True):
    """The last message: why the engine could not start, or has stopped.

    Its form is the same in all versions, so that one can say to another that they differ.
    """

    fault: Fault


Report = Ready | Accepted | Refused | PrefixCacheReset | Step | Stats | View | Beat | Dead
