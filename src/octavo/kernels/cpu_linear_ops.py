"""Weights in the order of `cpu_linear`, and products with them: its callers, free of Numba."""

import struct
from functools import cache

import torch
import torch.nn.functional as F

from octavo.kernels import cpu_jit, cpu_layout
from octavo.kernels.cpu_jit import Kernel

_pack = struct.Struct(cpu_layout.LINEAR_FORMAT).pack
_BLOCK = 32  # columns
_DEPTH = 32  # of k in a turn
_TALL = 256  # rows of an item: of a hidden size of 576 they take 288 KB, which a core's L2 holds
_SHARES = 6  # items for each thread, so that threads end together
# Below so many tiles of W (2 KB) a second thread is not worth waking.
_SHARED_FROM = 64


class TiledWeight:
    """A weight [N, K] in bfloat16 for `cpu_linear`; `gated`: gate over up, both [N / 2, K].

    K must be a multiple of 32, and N / 2 of a gated one a multiple of 16. bias: [N], or None.
    """

    __slots__ = ("_bias", "_gated", "_tiles", "_turns", "columns")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
    ) -> None:
        assert fits(weight, gated and bias is None)
        columns, depth = weight.shape
        self._bias = None if bias is None else bias.float()
        self._gated = gated
        self._turns = depth // _DEPTH
        self.columns = columns
        if gated:
            pairs = weight.view(2, columns // 32, 16, depth).transpose(0, 1)
            weight = pairs.reshape(columns, depth)
        padded = F.pad(weight, (0, 0, 0, -columns % _BLOCK))
        tiles = padded.view(-1, 2, 16, self._turns, 16, 2).permute(0, 3, 1, 4, 2, 5)
        self._tiles = tiles.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] bfloat16 -> x W^T + b [rows, N]; gated: silu(gate) * up [rows, N / 2]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, blocks = x.shape[0], self._tiles.shape[0]
        width = self.columns // 2 if self._gated else self.columns
        out = torch.empty((rows, width), dtype=torch.bfloat16)
        threads = 1 if blocks * self._turns < _SHARED_FROM else cpu_jit.threads()
        wide = max(2, blocks // (_SHARES * threads) // 2 * 2)
        arguments = _pack(
            0, 0, x.data_ptr(), x.stride(0) * 2, self._tiles.data_ptr(), out.data_ptr(),
            2 * width, 0 if self._bias is None else self._bias.data_ptr(), rows, self._turns,
            blocks, self.columns, _TALL, wide,
        )  # fmt: skip
        _kernel("gated" if self._gated else "plain").run(arguments, threads)
        return out


def fits(weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether a weight [N, K] can be laid out: bfloat16, K a multiple of 32 (gated: N too)."""
    rows, depth = weight.shape
    return weight.dtype == torch.bfloat16 and depth % _DEPTH == 0 and not (gated and rows % 32)


@cache
def _kernel(kind: str) -> Kernel:
    return Kernel("octavo.kernels.cpu_linear:linear", kind)
