"""What a model needs of the ranks that compute it together: a `Group`.

Every rank calls the same operations in the same order. A group knows nothing of models, of plans,
or of how its processes are started (`engine.tensor_parallel`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Group(Protocol):
    """The ranks of one engine, as one of them sees it.

    rank: this one's, from 0; size: how many there are. An operation whose peer has ended raises
    PeerLostError; one whose peer hangs waits until the executor, which watches all ranks, ends that
    peer or calls `abort`. kind: what it communicates by, such as "gloo".
    """

    @property
    def kind(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def operations(self) -> int:
        """How many operations this rank has begun, as another thread may see it: a rank that
        has begun fewer than the others is the one that they wait for."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, as `sum_in_rank_order` gives it; x is contiguous.

        An element's sum is the same bits whatever else is in `x`. May overwrite `x`; only the
        returned tensor is valid.
        """
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, n] of each rank, side by side in rank order: [rows, size * n]."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The `x` of rank 0, which has the same shape and type on all ranks. May overwrite `x`."""
        ...

    def min(self, value: int) -> int:
        """The least `value` of all ranks."""
        ...

    def abort(self) -> None:
        """Let an operation that waits raise PeerLostError. Called from another thread."""
        ...

    def close(self) -> None:
        """Release connections and memory; the group cannot be used afterwards. May be repeated."""
        ...


@dataclass(frozen=True, slots=True)
class Single:
    """A group of one rank, in which nothing is communicated."""

    rank: int = 0
    size: int = 1
    kind: str = "none"
    operations: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def min(self, value: int) -> int:
        return value

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


SINGLE = Single()


def sum_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((part 0 + part 1) + part 2) + ..., accumulated in float32 and rounded once.

    parts: of equal shape and type, one per rank.
    """
    first, *others = parts
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)
