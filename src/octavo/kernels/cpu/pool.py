"""Memory for the tensors of a recording: at fixed addresses, reused as soon as it is freed.

A tensor's memory returns to the pool with the tensor. So a recorded list of calls reuses memory
in the order in which it was recorded, and what a replay touches stays small enough for a cache.
"""

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 64  # a cache line

Block = NDArray[np.uint8]


class Pool:
    """Blocks of memory, each used by one tensor at a time. They live as long as the pool."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._free: list[Block] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty, of at least one value, in the smallest free block that holds it."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        fitting = [i for i, block in enumerate(self._free) if block.nbytes >= nbytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        else:
            block = _aligned(nbytes)
            self._blocks.append(block)
        lent = block[:nbytes]  # torch holds this very array until the tensor's memory is freed
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8).view(dtype).view(shape)


def _aligned(nbytes: int) -> Block:
    size = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
    memory: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size]
