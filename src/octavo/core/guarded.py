"""A policy that may fail: where it does, first come, first served stands in for it."""

from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import msgspec

from octavo.core.policy import FIFOScheduler, Gains, Gauge, Gauged, Load, Policy, Watching
from octavo.core.request import Request
from octavo.log import get_logger

logger = get_logger(__name__)

_T = TypeVar("_T")
_FAILED = "%s.%s failed; the first to come is the first served"


class Guarded:
    """Asks a policy, and answers itself where that raises or gives what cannot be used.

    Whom `order` leaves out, or does not come to before it fails, is served last, by arrival;
    what it invents or repeats is passed over. `victim` and `budget` are then those of FIFO
    without limits, and nobody is turned away. `errors` counts what the policy raised; the first
    is logged with its trace, since the next step would most often log the same.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.displaces = bool(getattr(policy, "displaces", True))
        self.watches = isinstance(policy, Watching)
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
            if self._first():
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

    def observe(self, gains: Gains) -> None:
        if isinstance(self.policy, Watching):
            watching = self.policy
            self._ask("observe", lambda: watching.observe(gains), lambda: None)

    def refusal(self, load: Load) -> str | None:
        if not isinstance(self.policy, Watching):
            return None
        watching = self.policy
        return self._ask("refusal", lambda: watching.refusal(load), lambda: None)

    def gauges(self) -> tuple[Gauge, ...]:
        """What the policy publishes; nothing where it has no gauges, or fails to give them."""
        if not isinstance(self.policy, Gauged):
            return ()
        gauged = self.policy

        def ask() -> tuple[Gauge, ...]:
            return tuple([msgspec.convert(gauge, Gauge) for gauge in gauged.gauges()])

        return self._ask("gauges", ask, tuple)

    def _ask(self, what: str, ask: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        try:
            return ask()
        except Exception:
            if self._first():
                logger.warning(_FAILED, type(self.policy).__name__, what, exc_info=True)
            return otherwise()

    def _first(self) -> bool:
        self.errors += 1
        return self.errors == 1
