"""Ranks of a tensor-parallel model as threads of one process, without an executor."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from octavo.dist.base import sum_in_rank_order

T = TypeVar("T")


class Meeting:
    """Where the threads of one group put what each of them has, and take what all have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.calls = 0  # of rank 0


class ThreadGroup:
    """See octavo.dist.base.Group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        meeting = self.meeting
        meeting.held[self.rank] = x
        meeting.barrier.wait()
        found = [part.clone() for part in meeting.held]
        meeting.calls += self.rank == 0
        meeting.barrier.wait()
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return sum_in_rank_order(self._all(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x), 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x)[0]

    def min(self, value: int) -> int:
        return int(min(int(part) for part in self._all(torch.tensor([value]))))

    def close(self) -> None:
        pass


def on_ranks(size: int, call: Callable[[ThreadGroup], T]) -> list[T]:
    """`call(group)` in a thread for each rank; their results in rank order.

    The error of the first rank that fails is raised; the others are not left waiting.
    """
    meeting = Meeting(size)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return call(ThreadGroup(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    failed = [error for error in errors if error is not None]
    if failed:
        raise next(
            (e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0]
        )
    return [future.result() for future in futures]
