"""Ranks on one machine, which communicate through memory that they share.

The memory has no name: it is a file descriptor of rank 0 (memfd), which the others open by its
path in /proc, so that nothing is left of it however the processes end. What is in it, and how ranks
wait for each other: `kernels.cpu.all_reduce`. An all-reduce takes microseconds, and is a kernel, so
that steps with it are captured; with gloo, over sockets, it takes a third of a millisecond.
"""

import contextlib
import mmap
import os
from pathlib import Path

import msgspec
import numpy as np
import torch

from octavo.dist.base import sum_in_rank_order
from octavo.dist.rendezvous import Rendezvous, open_store
from octavo.errors import EngineError, brief
from octavo.kernels.cpu.all_reduce_call import DTYPES, Exchange, lay_out, region_bytes
from octavo.log import get_logger

logger = get_logger(__name__)

_PATH, _JOINED = "shared memory", "joined"  # keys of the store


def is_available() -> bool:
    """Whether this system has such memory: Linux."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class SharedMemory:
    """Zeroed memory that other processes of this user map, too. Freed with the last of them."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self.words = np.frombuffer(mmap.mmap(descriptor, nbytes), np.int64)

    @classmethod
    def create(cls, nbytes: int) -> "SharedMemory":
        descriptor = os.memfd_create("octavo ranks")
        os.truncate(descriptor, nbytes)
        return cls(descriptor, nbytes)

    @classmethod
    def open(cls, path: str) -> "SharedMemory":
        """path: of the process that created it, while that has it open."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(descriptor, os.fstat(descriptor).st_size)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """No other process can open it from now on. The memory stays while `words` is used."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedMemoryGroup:
    """See `dist.base.Group`."""

    kind = "shared memory"

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        """memory: laid out by rank 0 (`create`)."""
        self.rank, self.size = rank, size
        self._memory = memory
        self._exchange = Exchange(memory.words, rank)

    @classmethod
    def create(cls, size: int) -> "SharedMemoryGroup":
        """Rank 0's group, and the memory."""
        memory = SharedMemory.create(region_bytes(size))
        # Of the machine: this process may be bound to its share of the processors.
        lay_out(memory.words, size, crowded=size > (os.cpu_count() or 1))
        return cls(memory, 0, size)

    @classmethod
    def join(cls, path: str, rank: int, size: int) -> "SharedMemoryGroup":
        """Another rank's; path: that of rank 0's group. Raises OSError."""
        return cls(SharedMemory.open(path), rank, size)

    @property
    def path(self) -> str:
        return self._memory.path

    @property
    def operations(self) -> int:
        """In pieces, of which an operation has the same number on all ranks."""
        return self._exchange.begun

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype in DTYPES:
            return self._exchange.all_reduce(x.contiguous())
        parts = self._exchange.gather(x.reshape(1, -1)).chunk(self.size, 1)
        return sum_in_rank_order(parts).view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange.gather(x.contiguous())

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange.gather(x.reshape(1, -1))[0, : x.numel()].view(x.shape)

    def min(self, value: int) -> int:
        return int(self._exchange.gather(torch.tensor([[value]])).min())

    def abort(self) -> None:
        self._exchange.abort()

    def close(self) -> None:
        """Operations of the other ranks fail from now on, since this one begins no more."""
        self.abort()
        self._memory.close()


def shared_memory_group(meeting: Rendezvous, rank: int, size: int) -> SharedMemoryGroup | None:
    """The group of the ranks that meet at the file of `meeting`. Waits for all of them.

    None on all ranks if one cannot open the memory, since it is in a container of its own.
    """
    place = msgspec.structs.replace(meeting, file=f"{meeting.file}-memory")
    store = open_store(place, rank, size)
    group = None
    try:
        with contextlib.suppress(OSError):
            if rank == 0:
                group = SharedMemoryGroup.create(size)
            else:
                group = SharedMemoryGroup.join(store.get(_PATH).decode(), rank, size)
        if rank == 0:
            store.set(_PATH, group.path if group else "")
        store.set(f"{_JOINED}/{rank}", str(int(group is not None)))
        outside = [one for one in range(size) if store.get(f"{_JOINED}/{one}") != b"1"]
    except RuntimeError as error:  # of the store
        raise EngineError(
            f"rank {rank} of {size} cannot meet the others: {brief(error)}"
        ) from error
    if outside:
        logger.info("not over shared memory, which ranks %s cannot open", outside)
    return None if outside else group
