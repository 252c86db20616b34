"""Weights on their way to a device's memory, through two buffers of pinned host memory.

The host reads and converts rows into one buffer while the device copies from the other, so what a
load takes of the host's memory is the two buffers, however large a weight is.
"""

from collections import deque
from collections.abc import Callable

import torch

from octavo.kernels.gpu.staging import Copies, Event

# Bytes of a buffer; copies of this size are at full speed.
PIECE = 64 << 20
# Rows begin .. end - 1 of a weight, to be written to contiguous host memory.
ReadRows = Callable[[int, int, torch.Tensor], None]


class Uploads:
    """The weights of one load; see `models.weights.Upload`."""

    def __init__(self, copies: Copies, piece: int = PIECE) -> None:
        self._copies, self._piece = copies, piece
        self._buffers: deque[tuple[torch.Tensor, Event | None]] = deque(
            (torch.empty(0, dtype=torch.uint8), None) for _ in range(2)
        )

    def __call__(self, out: torch.Tensor, read: ReadRows) -> None:
        """out [rows, ...], contiguous on the device, gets what `read` gives, in pieces of rows."""
        if not out.numel():
            return
        row = out[0].nbytes
        step = max(1, self._piece // row)
        for begin in range(0, len(out), step):
            target = out[begin : begin + step]
            memory, event = self._buffers.popleft()
            if event is not None:
                event.synchronize()  # its copy before the last one
            size = target.nbytes
            if len(memory) < size:
                memory = self._copies.host(max(size, min(self._piece, out.nbytes)))
            host = memory[:size]
            read(begin, begin + len(target), host.view(out.dtype).view(target.shape))
            done = self._copies.send(host, target.reshape(-1).view(torch.uint8))
            self._buffers.append((memory, done))
