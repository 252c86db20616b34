"""Memory of a GPU, in the terms of `runner.memory`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """In bytes. used: of this process, as its allocator knows it, with what the driver needs."""

    total: int
    free: int
    used: int


def measure(device: torch.device) -> GpuMemory:
    """The state of the GPU's memory now; cached blocks of the allocator are given back first."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_reserved(device))


def peak_of(device: torch.device, step: Callable[[], object]) -> int:
    """Run `step`; returns the peak increase of allocated memory, in bytes."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
