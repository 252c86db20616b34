"""Who goes first, who gives way, and how much a step may do.

A policy ranks requests and never touches a block. The scheduler works without trusting it: a
request that a policy forgets is served later, and a victim that does not run is replaced.
"""

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

import msgspec

from octavo.core.request import Request
from octavo.errors import ConfigError, nearest


class Load(msgspec.Struct, frozen=True, gc=False):
    """What `Policy.budget` may look at: the configured limits and who is there now."""

    max_tokens: int
    max_sequences: int
    num_running: int
    num_waiting: int


@runtime_checkable
class Policy(Protocol):
    """What the scheduler asks. `waiting` has the preempted first, then arrival order."""

    name: str

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        """`waiting`, the first to start first. May be lazy; must not change anything."""
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
        """(tokens that this step may compute, requests that may run), within the limits."""
        ...


class FIFOScheduler:
    """First come, first served; whoever came last gives way, and only for running ones."""

    name = "fifo"

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        return waiting

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        if for_request not in running:
            return None
        return max(running, key=lambda request: (request.serial, request.index))

    def budget(self, load: Load) -> tuple[int, int]:
        return load.max_tokens, load.max_sequences


_POLICIES: dict[str, type[Policy]] = {"fifo": FIFOScheduler}


def create_policy(policy: "str | Policy") -> Policy:
    """A policy by its name, or the given object, checked. Raises ConfigError with the names."""
    if isinstance(policy, str):
        if (kind := _POLICIES.get(policy)) is None:
            names = ", ".join(sorted(_POLICIES))
            raise ConfigError(
                f"unknown scheduler {policy!r}; there are {names}{nearest(policy, _POLICIES)}"
            )
        return kind()
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(
            f"scheduler must be a name or an object with name, order, victim and budget, "
            f"not {policy!r:.80}"
        )
    return policy
