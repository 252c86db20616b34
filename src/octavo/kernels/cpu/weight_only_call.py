"""The products of weights that are laid out for `weight_only`. Imports no Numba."""

import torch
import torch.nn.functional as F

from octavo.kernels.codes import SUPER
from octavo.kernels.cpu import abi, openmp, target, weight_only_tiles_call
from octavo.kernels.cpu.arguments import Address
from octavo.kernels.cpu.gemm_int8_call import Workspace
from octavo.kernels.cpu.kernel import FLOAT_NAMES, address, empty, kernel
from octavo.kernels.cpu.weight_only_layout import (
    BLOCK,
    PANEL,
    PackedCodes,
    interleaved_columns,
)

_PARALLEL_FROM = 1 << 15  # weights; below, one thread finishes before a second has started
_ITEM_BYTES = 384 << 10  # of rows of a work item: they stay in a core's L2
_LEAST_ROWS, _MOST_ROWS = 48, 96  # of a work item; whole blocks of abi.WEIGHT_ONLY_TALL
_CHUNK = 256  # k whose values a thread keeps in its scratch, or a whole group
_SPARE = abi.WEIGHT_ONLY_SPARE


class WeightOnly:
    """The product with a packed weight and a bias [N]: x [rows, K] -> [rows, N], in `dtype`."""

    __slots__ = (
        "_bias", "_dtype", "_kernel", "_pack", "_sizes", "_table", "_threads", "_weight", "_width",
        "_workspace",
    )  # fmt: skip

    def __init__(
        self,
        weight: PackedCodes,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        workspace: Workspace,
        activation: str = "",
    ) -> None:
        """activation: of a weight whose panels alternate between gate and up (see `gated`)."""
        form = weight.form
        self._weight, self._dtype, self._workspace = weight, dtype, workspace
        self._bias = None if bias is None else F.pad(bias.float(), (0, -weight.out_size % PANEL))
        pairs = dtype == torch.bfloat16 and target.has_dot()
        tiles = dtype == torch.bfloat16 and target.has_tiles()
        call = abi.WEIGHT_ONLY_TILES if tiles else abi.WEIGHT_ONLY
        bits = f"{form.bits}" if form.is_linear else f"{form.bits}table"
        self._kernel = kernel(call, f"{bits}-{form.terms}-{form.offset}-{FLOAT_NAMES[dtype]}")
        self._table = _table(weight, pairs)
        self._threads = 1 if weight.in_size * weight.out_size < _PARALLEL_FROM else 1 << 16
        self._width = weight.out_size // 2 if activation else weight.out_size
        panels, blocks = weight.codes.shape[:2]
        sizes = weight_only_tiles_call.sizes(weight) if tiles else _sizes(weight, pairs)
        self._sizes = sizes["q_stride"], sizes["sums_stride"], sizes["scratch_size"]
        self._pack = call.packer(
            in_size=weight.in_size, codes=address(weight.codes), terms=address(weight.terms),
            factors=0 if weight.factors is None else address(weight.factors),
            table=address(self._table), bias=0 if self._bias is None else address(self._bias),
            blocks=blocks, group_blocks=form.group // BLOCK,
            super_groups=max(1, SUPER // form.group), panels=panels,
            activation=abi.ACTIVATIONS.index(activation) + 1 if activation else 0,
            out_size=self._width, **sizes,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def gated(self, activation: str) -> "WeightOnly | None":
        """The product activation(gate) * up [rows, N / 2] of a weight of gate over up.

        It replaces this one. None for an activation that the kernel does not have, and if the
        halves are not whole halves of panels.
        """
        if activation not in abi.ACTIVATIONS or self._weight.out_size % PANEL:
            return None
        bias = None if self._bias is None else interleaved_columns(self._bias)
        self._weight.take(self._weight.interleaved())  # an arena hands out its memory only once
        return WeightOnly(self._weight, bias, self._dtype, self._workspace, activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class; x may have gaps between its rows."""
        return self.into(x, empty((x.shape[0], self._width), self._dtype))

    @property
    def width(self) -> int:
        """Columns of what it computes."""
        return self._width

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same in `out` [rows, width], whose rows may have gaps between them, too."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, (q_stride, sums_stride, scratch_size) = x.shape[0], self._sizes
        threads = openmp.threads()  # a replay runs on all of them, however small the product is
        spare = rows + _SPARE
        size = spare * (q_stride + sums_stride) + threads * scratch_size + 64
        q = Address(-(-self._workspace.memory(size) // 64) * 64)
        scratch = Address(q + spare * q_stride)
        arguments = self._pack(
            rows=rows, x=address(x), x_stride=x.stride(0) * x.element_size(), out=address(out),
            out_stride=out.stride(0) * out.element_size(), q=q,
            scratch=scratch, sums=Address(scratch + threads * scratch_size), threads=threads,
        )  # fmt: skip
        self._kernel.run(arguments, min(threads, self._threads))
        return out


def _sizes(weight: PackedCodes, pairs: bool) -> dict[str, int]:
    """Arguments that depend on the shape alone."""
    wide = weight.codes.shape[1] * BLOCK * (2 if pairs else 4)
    q_stride = (wide + 63) // 64 * 64
    q_stride += 64 * (q_stride // 64 % 2 == 0)  # rows on different sets of the cache
    item_rows = max(_LEAST_ROWS, min(_MOST_ROWS, _ITEM_BYTES // wide // 48 * 48))
    values = max(_CHUNK, weight.form.group) * PANEL * (2 if pairs else 4)
    return {
        "q_stride": q_stride, "item_rows": item_rows,
        "sums_stride": 4 * weight.terms.shape[1] if weight.form.num_terms == 2 else 0,
        "scratch_size": item_rows * PANEL * 4 + values + 64,
    }  # fmt: skip


def unit(dtype: torch.dtype) -> str:
    """What multiplies, in words."""
    if dtype == torch.bfloat16 and target.has_tiles():
        return "AMX tiles"
    if dtype == torch.bfloat16 and target.has_dot():
        return "vectors of bfloat16"
    return "vectors of float32"


def _table(weight: PackedCodes, pairs: bool) -> torch.Tensor:
    """What the kernel looks values up in: words of bfloat16, 32 or 64 of them, or float32."""
    values = torch.tensor(weight.form.values, dtype=torch.float32)
    if not pairs:
        return values
    return values.bfloat16().repeat(2 if weight.form.bits == 4 else 1)
