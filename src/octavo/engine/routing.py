"""Which replica computes a request: the one that holds its prompt's prefix, unless it is too busy.

Pure: the loads are the caller's, and what a replica's prefix cache holds is estimated from the
prompts that were sent there, under the names that `core.prefix_cache` gives their blocks. Not known
here are evictions and the blocks of answers; an estimate that is wrong costs a prefill.

The longest prefix wins while each request by which its replica is busier than the least loaded one
is paid for by one more cached block, and while that replica is not overloaded (`OVERLOAD`). Else
the least loaded replica wins, by turns among equals.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Reason = Literal["prefix", "busy", "load"]
REASONS: tuple[Reason, ...] = ("prefix", "busy", "load")

# Of the requests of a replica, against those of the least loaded one: more than so many times as
# many, and more than so many more.
OVERLOAD = (1.5, 8)
_WAITING_WEIGHT = 4  # vLLM's: a waiting request has its prompt before it


class Load(NamedTuple):
    """Choices that a replica computes: `waiting` have no token yet."""

    waiting: int = 0
    running: int = 0

    @property
    def requests(self) -> int:
        return self.waiting + self.running

    @property
    def score(self) -> int:
        return _WAITING_WEIGHT * self.waiting + self.running


class Route(NamedTuple):
    """reason: the longest prefix was there (prefix), was elsewhere but too busy (busy), or nowhere,
    or everywhere alike (load). matched: blocks that are expected to be cached there."""

    replica: int
    reason: Reason
    matched: int


class Router:
    """Chooses among replicas. capacity: KV blocks of one, so many names are remembered of it."""

    def __init__(self, replicas: int, capacity: int) -> None:
        self._known = [OrderedDict[bytes, None]() for _ in range(replicas)]
        self._capacity = capacity
        self._turn = 0

    def choose(self, names: Sequence[bytes], loads: Mapping[int, Load]) -> Route:
        """The replica for a prompt whose full blocks have these names; it is remembered there.

        loads: of the replicas that serve; not empty.
        """
        matches = {replica: self._match(replica, names) for replica in loads}
        least = self._least_loaded(loads, list(loads))
        longest = max(matches.values())
        holders = [replica for replica, matched in matches.items() if matched == longest]
        best = self._least_loaded(loads, holders)
        reason: Reason = "load"
        if longest > matches[least]:
            good = _worth(longest - matches[least], loads[best], loads[least])
            least, reason = (best, "prefix") if good else (least, "busy")
        elif longest and len(holders) < len(loads):
            reason = "prefix"
        self._turn = least + 1
        self._remember(least, names)
        return Route(least, reason, matches[least])

    def forget(self, replica: int) -> None:
        """Its cache was reset, or is that of a new process."""
        self._known[replica].clear()

    def _match(self, replica: int, names: Sequence[bytes]) -> int:
        known = self._known[replica]
        return next((i for i, name in enumerate(names) if name not in known), len(names))

    def _least_loaded(self, loads: Mapping[int, Load], among: Sequence[int]) -> int:
        count = len(self._known)
        return min(among, key=lambda one: (loads[one].score, (one - self._turn) % count))

    def _remember(self, replica: int, names: Sequence[bytes]) -> None:
        """The deepest block is the oldest, as in the cache: what is before it is of use alone."""
        known = self._known[replica]
        for name in reversed(names):
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._capacity:
            known.popitem(last=False)


def _worth(blocks: int, busy: Load, least: Load) -> bool:
    """Whether so many cached blocks more are worth a replica that is as busy as that."""
    more = busy.requests - least.requests
    factor, margin = OVERLOAD
    overloaded = busy.requests > factor * least.requests and more > margin
    return more <= blocks and not overloaded
