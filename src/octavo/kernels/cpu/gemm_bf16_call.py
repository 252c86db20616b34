"""Weights in the layout of `gemm_bf16`, and their products. Imports no Numba."""

import torch
import torch.nn.functional as F

from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.kernel import address, empty, kernel

_pack = abi.GEMM_BF16.packer()
_BLOCK = 32  # columns
_DEPTH = 32  # k of a step
_ITEM_ROWS = 256  # 288 KB at a hidden size of 576, which fits in a core's L2
_ITEMS_PER_THREAD = 6  # for load balance
# Below this many tiles of W (2 KB) waking a second thread does not pay.
_SHARED_FROM = 64
_PLAIN = "plain"


class TiledWeight:
    """The product with a weight [N, K] and a bias [N]: x [rows, K] -> x W^T + b [rows, N].

    All in bfloat16; K must be a multiple of 32 (see `fits`).
    """

    __slots__ = ("_bias", "_columns", "_k_steps", "_tiles", "_variant")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert fits(weight), "a weight that cannot be laid out in tiles"
        self._bias = None if bias is None else bias.float()
        self._variant = _PLAIN
        self._columns, self._k_steps = weight.shape[0], weight.shape[1] // _DEPTH
        padded = F.pad(weight, (0, 0, 0, -self._columns % _BLOCK))
        tiles = padded.view(-1, 2, 16, self._k_steps, 16, 2).permute(0, 3, 1, 4, 2, 5)
        self._tiles = tiles.contiguous()

    def gated(self, activation: str) -> "TiledWeight | None":
        """The product activation(gate) * up [rows, N / 2] of a weight of gate over up.

        It replaces this one. None for an activation that the kernel does not have, and if the
        halves do not fall on tiles or have a bias.
        """
        if activation not in abi.ACTIVATIONS:
            return None
        if self._bias is not None or self._columns % _BLOCK:
            return None
        fused = TiledWeight.__new__(TiledWeight)
        fused._bias, fused._variant = None, activation
        fused._columns, fused._k_steps = self._columns, self._k_steps
        by_tile = self._tiles.transpose(1, 2).reshape(2, -1, *self._tiles.shape[1:2], 16, 16, 2)
        fused._tiles = by_tile.permute(1, 2, 0, 3, 4, 5).contiguous()
        return fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class; x may have gaps between its rows."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, blocks = x.shape[0], self._tiles.shape[0]
        width = self._columns if self._variant == _PLAIN else self._columns // 2
        out = empty((rows, width), torch.bfloat16)
        threads = 1 if blocks * self._k_steps < _SHARED_FROM else openmp.threads()
        arguments = _pack(
            x=address(x), x_stride=x.stride(0) * 2, weights=address(self._tiles),
            out=address(out), out_stride=2 * width,
            bias=0 if self._bias is None else address(self._bias), rows=rows,
            k_steps=self._k_steps, blocks=blocks, columns=self._columns, item_rows=_ITEM_ROWS,
            item_blocks=max(2, blocks // (_ITEMS_PER_THREAD * threads) // 2 * 2),
        )  # fmt: skip
        kernel(abi.GEMM_BF16, self._variant).run(arguments, threads)
        return out


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K] can be laid out: bfloat16, and K a multiple of 32."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % _DEPTH == 0
