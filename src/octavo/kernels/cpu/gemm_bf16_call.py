"""Weights in the layout of `gemm_bf16`, and the products with them. Free of Numba."""

import torch
import torch.nn.functional as F

from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.kernel import address, empty, kernel

_pack = abi.GEMM_BF16.packer()
_BLOCK = 32  # columns
_DEPTH = 32  # of k in a turn
_TALL = 256  # rows of an item: of a hidden size of 576 they take 288 KB, which a core's L2 holds
_SHARES = 6  # items for each thread, so that threads end together
# Below so many tiles of W (2 KB) a second thread is not worth waking.
_SHARED_FROM = 64


class TiledWeight:
    """The product with a weight [N, K] and a bias [N]: x [rows, K] -> x W^T + b [rows, N].

    All in bfloat16; K must be a multiple of 32 (see `fits`).
    """

    __slots__ = ("_bias", "_columns", "_gated", "_tiles", "_turns")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert fits(weight), "a weight that cannot be laid out in tiles"
        self._bias = None if bias is None else bias.float()
        self._gated = False
        self._columns, self._turns = weight.shape[0], weight.shape[1] // _DEPTH
        padded = F.pad(weight, (0, 0, 0, -self._columns % _BLOCK))
        tiles = padded.view(-1, 2, 16, self._turns, 16, 2).permute(0, 3, 1, 4, 2, 5)
        self._tiles = tiles.contiguous()

    def gated(self) -> "TiledWeight | None":
        """The product that gives silu(gate) * up [rows, N / 2] of a weight of gate over up.

        It takes the place of this one. None if the halves do not fall on tiles or have a bias.
        """
        if self._bias is not None or self._columns % _BLOCK:
            return None
        fused = TiledWeight.__new__(TiledWeight)
        fused._bias, fused._gated = None, True
        fused._columns, fused._turns = self._columns, self._turns
        by_tile = self._tiles.transpose(1, 2).reshape(2, -1, *self._tiles.shape[1:2], 16, 16, 2)
        fused._tiles = by_tile.permute(1, 2, 0, 3, 4, 5).contiguous()
        return fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class; x may have gaps between its rows."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, blocks = x.shape[0], self._tiles.shape[0]
        width = self._columns // 2 if self._gated else self._columns
        out = empty((rows, width), torch.bfloat16)
        threads = 1 if blocks * self._turns < _SHARED_FROM else openmp.threads()
        wide = max(2, blocks // (_SHARES * threads) // 2 * 2)
        arguments = _pack(
            x=address(x), x_stride=x.stride(0) * 2, weights=address(self._tiles),
            out=address(out), out_stride=2 * width,
            bias=0 if self._bias is None else address(self._bias), rows=rows,
            k_steps=self._turns, blocks=blocks, columns=self._columns, item_rows=_TALL,
            item_blocks=wide,
        )  # fmt: skip
        kernel(abi.GEMM_BF16, "gated" if self._gated else "plain").run(arguments, threads)
        return out


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K] can be laid out: bfloat16, and K a multiple of 32."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % _DEPTH == 0
