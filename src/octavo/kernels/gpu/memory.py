"""Memory of a GPU: its state in the terms of `runner.memory`, and copies of KV blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# What cuBLAS and the driver say, which have no exception of their own.
_NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


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


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` says that a GPU had too little memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def copy_blocks(
    blocks: Sequence[tuple[int, int]],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    """target[b] = source[a] for each (a, b), in order, on the current stream; the host does not
    wait where its memory is pinned."""
    for source, target in zip(sources, targets, strict=True):
        for one, other in blocks:
            target[other].copy_(source[one], non_blocking=True)


class BlockCopies:
    """`copy_blocks` on a stream of its own, which waits for what came before on the current one;
    what follows there waits for the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(
        self,
        blocks: Sequence[tuple[int, int]],
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copy_blocks(blocks, sources, targets)
        current.wait_stream(self._stream)
