"""Every exception that Octavo raises on purpose.

    OctavoError
    |-- RequestError (ValueError)             the caller's fault: this request cannot be served
    |   |-- RequestTypeError (TypeError)      a field has the wrong type
    |   |-- ContextLengthError                prompt or prompt + max_tokens does not fit
    |   `-- QueueFullError                    too many requests wait; try again later
    |-- ConfigError (ValueError)              the operator's fault: this engine cannot start
    |   |-- ModelNotFoundError                no such folder, file, or name
    |   |-- CheckpointError                   weights or their description are broken or unknown
    |   `-- NotEnoughMemoryError              too little for the weights or for one KV block
    `-- EngineError (RuntimeError)            our fault
        |-- PeerLostError                     another rank of the engine has ended
        `-- EngineDeadError                   the engine has stopped; `reason` says why

A caller's or operator's error is raised before any work is done and says three things: the
field, the value it had, and what would be right. Asserts are kept for our own invariants.
"""

import contextlib
import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from typing import NoReturn, TypeVar


class OctavoError(Exception):
    """Base of every error raised on purpose."""


class RequestError(OctavoError, ValueError):
    """A request that cannot be served.

    `param` is the field at fault (None if there is none); `code` is a stable word for programs.
    """

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTypeError(RequestError, TypeError):
    """A field of a request has the wrong type."""

    code = "invalid_type"


class ContextLengthError(RequestError):
    """The prompt, or the prompt with `max_tokens`, is longer than the model's window.

    tokens: those of the prompt, or how many it has at least. limit: the window. None where neither
    is known.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, param)
        self.tokens = tokens
        self.limit = limit


class QueueFullError(RequestError):
    """The waiting queue is at its limit; the same request may be served later."""

    code = "queue_full"


class ConfigError(OctavoError, ValueError):
    """The engine cannot start with this configuration."""


class ModelNotFoundError(ConfigError):
    """The model's path or name does not exist."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, incomplete, or of a kind that is not known."""


class NotEnoughMemoryError(ConfigError):
    """The memory given holds no KV block, or not even the weights."""


class EngineError(OctavoError, RuntimeError):
    """Something failed inside the engine.

    param: the field of the request that asks for what turned out to be impossible while it ran;
    None for a fault of the engine.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PeerLostError(EngineError):
    """An operation of a tensor-parallel group has no result: one of its ranks has ended."""


class EngineDeadError(EngineError):
    """The engine has stopped and answers nothing more."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is dead: {reason}")
        self.reason = reason


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 16

# Each type under the name that stands for it where an exception cannot travel.
ERROR_KINDS: Mapping[str, type[OctavoError]] = {
    kind.__name__: kind
    for kind in (
        OctavoError,
        RequestError,
        RequestTypeError,
        ContextLengthError,
        QueueFullError,
        ConfigError,
        ModelNotFoundError,
        CheckpointError,
        NotEnoughMemoryError,
        EngineError,
        PeerLostError,
        EngineDeadError,
    )
}


def shown(value: object, most: int = 160) -> str:
    """`value` in a message: its repr, cut where a file or a caller made it long."""
    short = _REPR.repr(value)
    return short if len(short) <= most else f"{short[: most - 4]} ..."


def counted(count: int, noun: str) -> str:
    """A number of things in a message: "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def brief(error: BaseException, most: int = 400) -> str:
    """What another library says of a file, on one line and of a usual length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def cause(error: Exception) -> str:
    """As `brief`, for a message that names the file or host itself: the system's words alone."""
    return (error.strerror if isinstance(error, OSError) else None) or brief(error, 120)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'top_p'?`, or '' where nothing known is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


KindT = TypeVar("KindT", bound=type)


def advise_on_assignment(advice: str) -> Callable[[KindT], KindT]:
    """Decorates a frozen dataclass: an assignment to a field is answered with `advice`, in which
    `{name}` is the field's."""

    def refuse(self: object, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"cannot set {name!r} of a {type(self).__name__}, which is frozen; "
            + advice.format(name=name)
        )

    def decorate(kind: KindT) -> KindT:
        kind.__setattr__ = refuse  # type: ignore[method-assign,assignment]
        return kind

    return decorate


@contextlib.contextmanager
def triton_needed(what: str) -> Iterator[None]:
    """Importing `what` (an option with its value) raises ConfigError if Triton is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise ConfigError(
            f"{what} is for GPUs and needs the package triton, which torch's CUDA build brings; "
            "install that build, or leave the option out to compute on the CPU"
        ) from None
