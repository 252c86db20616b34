"""Shields the scheduler from a policy that raises or returns an invalid answer.

FIFO is used for such a call. Keeps no per-request state.
"""

from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import msgspec

from octavo.core.policy import (
    FIFOScheduler,
    Gauge,
    Gauged,
    Load,
    Policy,
    StepLatencies,
)
from octavo.core.request import Request
from octavo.log import get_logger

logger = get_logger(__name__)

_T = TypeVar("_T")
_FAILED = "scheduling policy %s.%s failed; falling back to FIFO"


class FallbackPolicy:
    """Forwards each call to a policy, and falls back to FIFO where the policy raises or its
    answer cannot be used.

    Requests that `order` omits, or has not yielded when it raises, follow in arrival order;
    unknown and repeated ones are skipped. `victim` and `budget` fall back to FIFO without
    limits, and no request is rejected. `errors` counts the policy's exceptions; only the first
    is logged, with its traceback, since every step would most likely log the same.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.displaces = _displaces(policy)
        self._observe: Callable[[StepLatencies], None] | None = getattr(policy, "observe", None)
        self._refusal: Callable[[Load], str | None] | None = getattr(policy, "refusal", None)
        self.observes = self._observe is not None
        self.refuses = self._refusal is not None
        self.errors = 0
        self._fifo = FIFOScheduler(max_stretch=None)

    def order(self, waiting: Collection[Request], now: float) -> Iterator[Request]:
        left = dict.fromkeys(waiting)
        try:
            for request in self.policy.order(waiting, now):
                if request in left:
                    del left[request]
                    yield request
        except Exception:
            if self._is_first_error():
                logger.warning(_FAILED, type(self.policy).__name__, "order", exc_info=True)
        yield from left

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        def ask() -> Request | None:
            victim = self.policy.victim(running, for_request, now)
            return victim if victim in running else None

        return self._ask("victim", ask, lambda: self._fifo.victim(running, for_request, now))

    def budget(self, load: Load) -> tuple[int, int]:
        def ask() -> tuple[int, int]:
            tokens, sequences = self.policy.budget(load)
            return int(tokens), int(sequences)  # raises for NaN, None and text

        return self._ask("budget", ask, lambda: self._fifo.budget(load))

    def observe(self, latencies: StepLatencies) -> None:
        if (observe := self._observe) is not None:
            self._ask("observe", lambda: observe(latencies), lambda: None)

    def refusal(self, load: Load) -> str | None:
        if (refusal := self._refusal) is None:
            return None
        return self._ask("refusal", lambda: refusal(load), lambda: None)

    def gauges(self) -> tuple[Gauge, ...]:
        """The policy's gauges; empty if it has none, or if computing them fails."""
        if not isinstance(self.policy, Gauged):
            return ()
        gauged = self.policy

        def ask() -> tuple[Gauge, ...]:
            return tuple([_checked(gauge) for gauge in gauged.gauges()])

        return self._ask("gauges", ask, tuple)

    def _ask(self, method: str, ask: Callable[[], _T], fallback: Callable[[], _T]) -> _T:
        try:
            return ask()
        except Exception:
            if self._is_first_error():
                logger.warning(_FAILED, type(self.policy).__name__, method, exc_info=True)
            return fallback()

    def _is_first_error(self) -> bool:
        self.errors += 1
        return self.errors == 1


def _displaces(policy: Policy) -> bool:
    """The policy's `displaces`. A class with a `victim` of its own does not inherit False."""
    for kind in type(policy).__mro__ if "displaces" not in getattr(policy, "__dict__", {}) else ():
        if "displaces" in vars(kind):
            break
        if "victim" in vars(kind):
            return True
    return bool(getattr(policy, "displaces", True))


def _checked(gauge: Gauge) -> Gauge:
    """The gauge with plain values of the declared types, so that it can be serialized."""
    fields = msgspec.structs.asdict(gauge)
    return msgspec.convert({**fields, "value": float(gauge.value)}, Gauge)
