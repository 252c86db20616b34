"""Scheduling policies: the order of requests, the choice of victims, the budget of a step.

A policy ranks requests and never touches a block. The scheduler does not rely on it: a request
that a policy omits is served later, a victim that is not running is replaced, and a budget is
clamped to the configured limits and never stops progress.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import msgspec

from octavo.core.rates import Rates
from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.log import get_logger

logger = get_logger(__name__)

_WEIGHT_INTERVAL = 0.1  # seconds before weights of an unchanged set of requests are recomputed
_priority = attrgetter("priority")
_GAUGE_NAME = re.compile(r"[a-z][a-z0-9_]*")

MIN_CHUNK = 64  # least prompt tokens per step while other requests wait for their next token


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a budget may depend on. A policy must neither modify nor store any of it.

    max_*: as configured. due: running requests whose next token this step yields; lagging:
    running ones that lag by more than one token; waiting: the preempted first, then by arrival.
    rates: measured step times.
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
        """Seconds since the first waiting request was queued."""
        return max(
            (self.now - request.waiting_since for request in islice(self.waiting, 1)), default=0.0
        )


class StepLatencies(msgspec.Struct, frozen=True, gc=False):
    """The latencies that a committed step ended, in seconds.

    gaps: between consecutive tokens of a choice, one entry for each choice that gained tokens;
    firsts: from a request's arrival to its first token. num_tokens: output tokens gained.
    seconds: of the step itself; num_due, num_other: the tokens that it computed, those of
    requests that lagged by one, and the rest.
    """

    now: float
    num_tokens: int
    gaps: list[float]
    firsts: list[float]
    seconds: float = 0.0
    num_due: int = 0
    num_other: int = 0


class Gauge(msgspec.Struct, frozen=True):
    """A metric that a policy publishes, with its current value.

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
    """The interface of a scheduling policy. One object serves one engine at a time.

    A class need not derive from it; one that does must define all of it. Derive from
    `FIFOScheduler` to inherit what a policy leaves as it is.

    Optional attributes: `displaces = False` for a policy whose `victim` is always None for a
    waiting request, which saves calls; `heeds_priority = False` or `heeds_deadline = False` for
    one that does not read `request.priority` or `request.deadline`: a request that sets it is
    then rejected instead of ignored; `state`, a frozen value, is shown as `engine.stats.NAME`, and
    where it has a text `reason` and a count `changes`, the dashboard says why the budget changed.
    Optional interfaces: `AdaptivePolicy`, `Gauged`.
    """

    name: str

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        """`waiting` in the order in which to serve it.

        It holds the running requests that lag by more than one token, then preempted ones, then
        those that never ran, by arrival. The result may be lazy; the argument must not be changed.
        """
        ...

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        """The running request to preempt in favour of `for_request`.

        If `for_request` is running, it may be the victim itself. If it is waiting, the victim
        must rank strictly after it; None leaves it waiting.
        """
        ...

    def budget(self, load: Load) -> tuple[int, int]:
        """(tokens that this step may compute, requests that may run at once)."""
        ...


@runtime_checkable
class AdaptivePolicy(Protocol):
    """Optional interface for policies that adapt to measured latency."""

    def observe(self, latencies: StepLatencies) -> None:
        """Called after each commit."""
        ...

    def refusal(self, load: Load) -> str | None:
        """Why a request that arrives now should be refused; None to accept it."""
        ...


@runtime_checkable
class Gauged(Protocol):
    """Optional interface for policies that publish metrics."""

    def gauges(self) -> Iterable[Gauge]:
        """The same gauges at every call, with their current values."""
        ...


def fair_tokens(load: Load, max_stretch: float | None) -> int:
    """Tokens of a step that takes at most `max_stretch` times as long as a decode step with one
    token for every request, running or waiting; the maximum if no request's next token is due.
    Before such a step has been measured, the smallest budget.
    """
    if max_stretch is None or not load.due or not (load.lagging or load.waiting):
        return load.max_tokens
    least = len(load.due) + MIN_CHUNK
    # Waiting requests will soon run and lengthen every step. Were the limit relative to the due
    # requests alone, a burst of prompts would be computed in minimal chunks while few run.
    total = len(load.due) + len(load.lagging) + len(load.waiting)
    usual = load.rates.seconds(min(total, max(load.max_sequences, len(load.due))))
    if usual is None:
        return least
    return max(load.rates.tokens_within(max_stretch * usual), least)


class FIFOScheduler:
    """First come, first served. The request that arrived last is preempted, and only when a
    running one needs memory.

    max_stretch: the maximum slowdown of a step by prompts while requests wait for their next
    token: a step takes at most this many times as long as a decode step with one token for
    every request, running or waiting. None: no limit, for work without a latency target.
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
    """The argument of a `weight_fn`: what a policy may read of a `Request`, under the same names.

    Lengths in tokens; arrival_time and deadline in seconds of the engine's clock, waited in
    seconds. docs/scheduling.md has the list.
    """

    prompt_len: int
    output_len: int
    arrival_time: float
    waited: float
    priority: int
    deadline: float | None
    max_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    request_id: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_len

    @property
    def num_output_tokens(self) -> int:
        return self.output_len

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.output_len


class PriorityScheduler:
    """Lower `priority` first; then the earliest deadline; then the highest weight.

    weight_fn: maps a `RequestView` to a number; evaluated again every 0.1 s. If it raises or
        returns no finite number, the weight is 0 and `weight_faults` is incremented; the first
        such fault is logged.
    max_wait: seconds of waiting after which a request is overdue. The overdue request that has
        waited longest is served before all others, and up to a quarter of the running requests
        are exempt from displacement because they were overdue: every wait is bounded, and urgent
        requests can still displace the rest.

    A waiting request with a strictly lower priority number, or the first overdue one, displaces
    a running one. Except for due tokens, the step is reserved for it. Deadlines and weights
    affect the order but displace nothing: recomputation would cost more than they gain.
    max_stretch: as in `FIFOScheduler`; smaller, since urgent requests wait for the running step.
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
        # The last ranking: its input, its result, and how long it stays valid.
        self._listed: list[Request] = []
        self._ranked: list[Request] = []
        self._longest: Request | None = None
        self._valid_until = 0.0

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        listed = list(waiting)
        if not listed:
            return listed
        if listed != self._listed or now >= self._valid_until:
            self._listed = listed
            self._ranked = sorted(listed, key=lambda request: self._rank(request, now))
            self._valid_until = now + _WEIGHT_INTERVAL if self.weight_fn else math.inf
            # Waiting times grow equally, so the longest stays the longest until the set changes.
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
        exempt = set(sorted(overdue, key=lambda request: request.serial)[:quota])
        others = [request for request in running if request not in exempt]
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
                logger.warning("weight_fn raised for %s", request.seq_id, exc_info=True)
        if math.isfinite(weight):
            return weight
        self.weight_faults += 1
        if self.weight_faults == 1:
            logger.warning("weight_fn returned no finite number for %s: using 0", request.seq_id)
        return 0.0


def view(request: Request, now: float) -> RequestView:
    return RequestView(
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.arrival_time,
        request.waited_at(now),
        request.priority,
        request.deadline,
        request.max_tokens,
        request.num_cached_tokens,
        request.num_preemptions,
        request.request_id,
    )


def positive(name: str, value: float | None) -> float | None:
    """`value` as a float, or None; raises ConfigError unless it is above 0 and finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, not {value!r:.60}")
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be above 0 and finite, not {value}")
    return float(value)
