"""A `Group` over a process group of torch: what gloo and NCCL have in common.

Neither library sums in a fixed order: with more than two ranks, the order depends on the size of
the message and on an element's place in it. So parts are exchanged, and summed here, in rank order.
Nothing of `torch.distributed`'s global state is used: a program may have a group of its own, and
several engines.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from octavo.dist.base import sum_in_rank_order
from octavo.errors import PeerLostError, brief

# Up to so many bytes, all parts go to all ranks: one message's latency. Above, each rank sums its
# share of the elements: 2 / size of the bytes.
SMALL_BYTES = 2**18


class TorchGroup:
    """See `octavo.dist.base.Group`. Used by one thread, but for `abort` and `operations`."""

    def __init__(self, backend: Any, rank: int, size: int, kind: str, device: str) -> None:
        """backend: a process group, such as `torch.distributed.ProcessGroupGloo`."""
        self.rank, self.size, self.kind = rank, size, kind
        self.operations = 0
        self._backend = backend
        self._device = device
        self._aborted = threading.Event()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() * x.element_size() <= SMALL_BYTES:
            return sum_in_rank_order(list(self._gather(x))).view(x.shape)
        share = -(-x.numel() // self.size)
        padded = torch.nn.functional.pad(x.view(-1), (0, share * self.size - x.numel()))
        parts = torch.empty_like(padded)  # [size * share]: of each rank, this one's share
        self._wait(lambda: self._backend.alltoall_base(parts, padded, [], []))
        total = sum_in_rank_order(list(parts.view(self.size, share)))
        return self._gather(total).view(-1)[: x.numel()].view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        parts = self._gather(x).view(self.size, rows, columns)
        return parts.transpose(0, 1).reshape(rows, self.size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self._backend.broadcast([x], options))
        return x

    def min(self, value: int) -> int:
        given = torch.tensor([value], dtype=torch.int64, device=self._device)
        return int(self._gather(given).min())

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._backend = None

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, elements of x]"""
        parts = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        self._wait(lambda: self._backend._allgather_base(parts, x.contiguous().view(-1)))
        return parts.view(self.size, -1)

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Run one operation."""
        if self._aborted.is_set() or self._backend is None:
            raise PeerLostError("the group was aborted")
        self.operations += 1
        try:
            self._finish(begin())
        except RuntimeError as error:
            raise PeerLostError(f"an operation over {self.kind} failed: {brief(error)}") from error

    def _finish(self, work: Any) -> None:
        """Wait for an operation that has begun. Raises RuntimeError if it fails."""
        work.wait()
