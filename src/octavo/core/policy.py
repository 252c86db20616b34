"""Who goes first, who gives way, and how much a step may do.

A policy ranks requests and never touches a block. The scheduler works without trusting it: a
request that a policy forgets is served later, a victim that does not run is replaced, a budget
is cut to what is configured and never stops progress.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import msgspec

from octavo.core.rates import Rates
from octavo.core.request import Request
from octavo.errors import ConfigError, nearest
from octavo.log import get_logger

logger = get_logger(__name__)

_WEIGHTS_LAST = 0.1  # seconds for which weights are not asked for again if nobody came or went
_priority = attrgetter("priority")
_GAUGE_NAME = re.compile(r"[a-z][a-z0-9_]*")

MIN_CHUNK = 64  # tokens that prompts get in a step at least, while others wait for their next


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a budget may depend on; nothing of it may be changed or kept.

    max_*: as configured. due: running requests whose next token this step gives; lagging:
    running ones that lag by more; waiting: the preempted first, then by arrival. rates: learned.
    """

    max_tokens: int
    max_sequences: int
    due: Collection[Request]
    lagging: Collection[Request]
    waiting: Collection[Request]
    now: float
    rates: Rates

    @property
    def longest_wait(self) -> float:
        """Seconds that the first of the waiting has waited."""
        return max(
            (self.now - request.waiting_since for request in islice(self.waiting, 1)), default=0.0
        )


class Gains(msgspec.Struct, frozen=True, gc=False):
    """What a step gave: seconds between tokens of a choice, seconds from arrival to a first."""

    now: float
    num_tokens: int
    gaps: list[float]
    firsts: list[float]


class Gauge(msgspec.Struct, frozen=True):
    """A number that a policy publishes, with its value now.

    It is `engine.stats.policy[name]`, and on /metrics `octavo:POLICY_NAME`, after the policy's
    own name. counter: the value never decreases (/metrics adds `_total`). Raises ConfigError
    for a name that is not made of a-z, 0-9 and _.
    """

    name: str
    help: str
    value: float
    counter: bool = False

    def __post_init__(self) -> None:
        if not _GAUGE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"a gauge's name must be made of a-z, 0-9 and _, and begin with a letter, "
                f"not {self.name!r:.60}"
            )
        if not isinstance(self.value, (int, float)):
            raise ConfigError(f"the gauge {self.name!r} must be a number, not {self.value!r:.60}")


@runtime_checkable
class Policy(Protocol):
    """What the scheduler asks. One instance serves one scheduler.

    A policy whose `victim` never answers a waiting request may say `displaces = False`; it is
    then asked less. One that does not look at `request.priority` or at `request.deadline` should
    say `heeds_priority = False` or `heeds_deadline = False`: then a request with one is refused,
    and not ignored. Optional interfaces: `Watching`, `Gauged`. A frozen value in the attribute
    `state`, if there is one, is shown as `engine.stats.NAME`.
    """

    name: str

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        """`waiting`, the first to serve first.

        It holds the running requests that lag by more than one token, then the preempted, then
        those that never ran by arrival. The answer may be lazy; nothing may be changed.
        """
        ...

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        """The running request that gives way to `for_request`.

        If `for_request` runs, it may be the answer itself. If it waits, the answer must come
        strictly after it, or be None: then it goes on waiting.
        """
        ...

    def budget(self, load: Load) -> tuple[int, int]:
        """(tokens that this step may compute, requests that may run)."""
        ...


@runtime_checkable
class Watching(Protocol):
    """The further half of a policy that steers by what it sees."""

    def observe(self, gains: Gains) -> None:
        """A step has been committed."""
        ...

    def refusal(self, load: Load) -> str | None:
        """Why a request that arrives now should be turned away; None to take it."""
        ...


@runtime_checkable
class Gauged(Protocol):
    """The optional interface of a policy that publishes numbers."""

    def gauges(self) -> Iterable[Gauge]:
        """The same gauges at every call, with their values now."""
        ...


def fair_tokens(load: Load, max_stretch: float | None) -> int:
    """Tokens of a step that keeps due requests waiting at most `max_stretch` times as long as a
    step takes with everyone who has come; all if nobody's next token is due. Unmeasured, it
    probes small.
    """
    if max_stretch is None or not load.due or not (load.lagging or load.waiting):
        return load.max_tokens
    least = len(load.due) + MIN_CHUNK
    # Those who wait are to run, so it is their steps, too, that the running ones will live with:
    # measured by the due alone, a flood would come in the smallest pieces while few run.
    come = len(load.due) + len(load.lagging) + len(load.waiting)
    usual = load.rates.seconds(min(come, max(load.max_sequences, len(load.due))))
    if usual is None:
        return least
    return max(load.rates.tokens_within(max_stretch * usual), least)


class FIFOScheduler:
    """First come, first served; whoever came last gives way, and only for running ones.

    max_stretch: how many times longer a step may take for the prompts in it, while running
    requests wait for their next token, than one in which everyone who has come has a token.
    None: no limit, for work that nobody watches.
    """

    name = "fifo"
    displaces = False
    heeds_priority = False
    heeds_deadline = False

    def __init__(self, max_stretch: float | None = 4.0) -> None:
        self.max_stretch = positive("max_stretch", max_stretch)

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        return waiting

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        if for_request not in running:
            return None
        return max(running, key=lambda request: (request.serial, request.index))

    def budget(self, load: Load) -> tuple[int, int]:
        return fair_tokens(load, self.max_stretch), load.max_sequences


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """What a `weight_fn` sees of a request. Lengths in tokens, times in seconds."""

    prompt_len: int
    output_len: int
    arrival_time: float
    waited: float
    priority: int
    deadline: float | None


class PriorityScheduler:
    """Lower `priority` first; then the least slack to its deadline; then the highest weight.

    weight_fn: number of a `RequestView`, asked for again every 0.1 s. One that raises, or gives
        no finite number, counts as 0, is counted in `weight_faults`, and logged the first time.
    max_wait: seconds of waiting after which a request is overdue. The one that has waited
        longest is then served before all others, and while at most a quarter of the running are
        overdue they are not displaced: every wait ends, and urgent requests still find places.

    A waiting request of strictly lower priority number, or the first overdue one, displaces a
    running one, and has the step to itself, but for the tokens that are due. Deadlines and
    weights order, but do not displace: that would undo work for little. max_stretch as in
    `FIFOScheduler`; less, since the urgent wait for the running step to end.
    """

    name = "priority"

    def __init__(
        self,
        weight_fn: Callable[[Any], float] | None = None,
        *,
        max_wait: float = 30.0,
        max_stretch: float | None = 2.0,
    ) -> None:
        if weight_fn is not None and not callable(weight_fn):
            raise ConfigError(f"weight_fn must be a function of a request, not {weight_fn!r:.80}")
        self.weight_fn = weight_fn
        self.max_wait = positive("max_wait", max_wait) or math.inf
        self.max_stretch = positive("max_stretch", max_stretch)
        self.weight_faults = 0
        self._seen: list[Request] = []  # what was ranked last, the outcome, and until when it is
        self._ranked: list[Request] = []
        self._longest: Request | None = None
        self._good_until = 0.0

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        listed = list(waiting)
        if not listed:
            return listed
        if listed != self._seen or now >= self._good_until:
            self._seen = listed
            self._ranked = sorted(listed, key=lambda request: self._rank(request, now))
            self._good_until = now + _WEIGHTS_LAST if self.weight_fn else math.inf
            # All wait equally fast, so the one that has waited longest stays the one.
            self._longest = max(listed, key=lambda request: request.waited_at(now))
        first = self._longest
        if first is None or first.waited_at(now) < self.max_wait:
            return self._ranked
        return chain((first,), (request for request in self._ranked if request is not first))

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        overdue = [request for request in running if request.waited >= self.max_wait]
        quota = max(1, len(running) // 4)
        safe = set(sorted(overdue, key=lambda request: request.serial)[:quota])
        others = [request for request in running if request not in safe]
        if for_request not in running and not (
            for_request.waited_at(now) >= self.max_wait and len(overdue) < quota
        ):
            others = [r for r in others if r.priority > for_request.priority]
        return max(others, key=lambda request: self._rank(request, now), default=None)

    def budget(self, load: Load) -> tuple[int, int]:
        others = [*load.lagging, *load.waiting]
        if load.due and others:
            best = min(map(_priority, load.due))
            if min(map(_priority, others)) < best:
                urgent = sum([request.lag for request in others if request.priority < best])
                return len(load.due) + urgent, load.max_sequences
        return fair_tokens(load, self.max_stretch), load.max_sequences

    def _rank(self, request: Request, now: float) -> tuple[float, ...]:
        deadline = math.inf if request.deadline is None else request.deadline
        weight = self._weight(request, now) if self.weight_fn else 0.0
        return request.priority, deadline, -weight, request.serial, request.index

    def _weight(self, request: Request, now: float) -> float:
        assert self.weight_fn is not None
        weight = math.nan
        try:
            weight = float(self.weight_fn(view(request, now)))
        except Exception:
            if not self.weight_faults:
                logger.warning("weight_fn failed for %s", request.seq_id, exc_info=True)
        if math.isfinite(weight):
            return weight
        self.weight_faults += 1
        if self.weight_faults == 1:
            logger.warning("weight_fn gave no finite number for %s: it counts as 0", request.seq_id)
        return 0.0


def view(request: Request, now: float) -> RequestView:
    return RequestView(
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.arrival_time,
        request.waited_at(now),
        request.priority,
        request.deadline,
    )


_POLICIES = {
    "fifo": "octavo.core.policy:FIFOScheduler",
    "priority": "octavo.core.policy:PriorityScheduler",
    "slo": "octavo.core.slo:SLOScheduler",
}


def policy_names() -> tuple[str, ...]:
    """The names that `create_policy` knows."""
    return tuple(sorted(_POLICIES))


def create_policy(policy: "str | Policy") -> Policy:
    """The given object, checked, or one made from text: a name, or `module:Class` of one's own,
    and options after commas, as in `slo,p99_itl_ms=50,shed=true`.

    Raises ConfigError that lists the names.
    """
    made = _from_text(policy) if isinstance(policy, str) else policy
    if isinstance(made, type) or not isinstance(made, Policy):
        raise ConfigError(
            f"scheduler must be a name ({_names()}) or an object with name, order, victim and "
            f"budget, not {made!r:.80}"
        )
    return made


def _from_text(text: str) -> object:
    name, *options = (part.strip() for part in text.split(","))
    path = name if ":" in name else _POLICIES.get(name)
    if path is None:
        hint = nearest(name, _POLICIES)
        raise ConfigError(f"unknown scheduler {name!r}; there are {_names()}{hint}")
    module, _, kind = path.partition(":")
    try:
        make = getattr(import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"scheduler {name!r} cannot be imported: {error}") from error
    try:
        return make(**dict(_option(option) for option in options))
    except TypeError as error:
        raise ConfigError(f"scheduler {name!r} does not take {options}: {error}") from error


def _option(text: str) -> tuple[str, float | bool | None]:
    name, _, value = text.partition("=")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, float(value)
    except ValueError as error:
        raise ConfigError(
            f"scheduler options are name=number, name=true or name=none, not {text!r}"
        ) from error


def _names() -> str:
    return ", ".join(policy_names())


def positive(name: str, value: float | None) -> float | None:
    """`value` as a float, or None; raises ConfigError unless it is above 0 and finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, not {value!r:.60}")
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be above 0 and finite, not {value}")
    return float(value)
