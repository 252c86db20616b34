"""Products and tables of weights that are computed on as a file stores them. Imports no Numba."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from octavo.kernels.codes import StoredMatrix
from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.gemm_int8_call import Workspace
from octavo.kernels.cpu.gguf_pack_call import pack
from octavo.kernels.cpu.kernel import FLOAT_NAMES, address, empty, kernel
from octavo.kernels.cpu.weight_only_call import WeightOnly
from octavo.kernels.cpu.weight_only_layout import (
    BLOCK,
    PANEL,
    Allocate,
    PackedCodes,
    interleaved_columns,
)


class ColumnRanges:
    """One product of several, each with some of its columns, in order: a weight [N, K] whose rows
    are of several block types."""

    __slots__ = ("_dtype", "_products", "_width")

    def __init__(self, products: Sequence[WeightOnly], dtype: torch.dtype) -> None:
        self._products, self._dtype = tuple(products), dtype
        self._width = sum(product.width for product in products)

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for product in self._products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out, begin = empty((x.shape[0], self._width), self._dtype), 0
        for product in self._products:
            end = begin + product.width
            product.into(x, out[:, begin:end])
            begin = end
        return out


class GatedOnly:
    """A product of gate over up that exists only as `gated`."""

    __slots__ = ("_activation", "_product")

    def __init__(self, product: WeightOnly, activation: str) -> None:
        self._product, self._activation = product, activation

    @property
    def num_bytes(self) -> int:
        return self._product.num_bytes

    def gated(self, activation: str) -> WeightOnly:
        """See `layers.linear.GatedProduct`."""
        assert activation == self._activation, "another activation than it was laid out for"
        return self._product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this weight was laid out for its gated product")


class CodeTable:
    """See `layers.linear.Table`."""

    def __init__(self, packed: PackedCodes, dtype: torch.dtype, workspace: Workspace) -> None:
        form = packed.form
        assert form.offset != "zero", "no block type has zero points"
        self._packed, self._dtype, self._workspace = packed, dtype, workspace
        self._kernel = kernel(
            abi.CODE_ROWS, f"{form.bits}-{form.terms}-{form.offset}-{FLOAT_NAMES[dtype]}"
        )
        self._values = torch.tensor(form.values, dtype=torch.float32)
        factors = packed.factors
        self._pack = abi.CODE_ROWS.packer(
            codes=address(packed.codes), terms=address(packed.terms),
            factors=0 if factors is None else address(factors), table=address(self._values),
            columns=packed.in_size, blocks=packed.codes.shape[1], group_blocks=form.group // BLOCK,
            terms_size=packed.terms[0].numel() * packed.terms.element_size(),
            factors_size=0 if factors is None else factors[0].numel() * 2,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def rows(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See Table.rows."""
        ids = ids.contiguous()
        arguments = self._pack(
            rows=len(ids), ids=address(ids), out=address(out),
            out_stride=out.stride(0) * out.element_size(),
        )  # fmt: skip
        self._kernel.run(arguments, 1 if len(ids) == 1 else openmp.threads())
        return out

    def product(self, begin: int, end: int) -> WeightOnly:
        """See Table.product."""
        assert begin % PANEL == 0
        panels = slice(begin // PANEL, -(-end // PANEL))
        packed = self._packed
        factors = None if packed.factors is None else packed.factors[panels]
        part = replace(
            packed, out_size=end - begin, codes=packed.codes[panels], terms=packed.terms[panels],
            factors=factors,
        )  # fmt: skip
        return WeightOnly(part, None, self._dtype, self._workspace)


def make_product(
    weight: StoredMatrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    workspace: Workspace,
    gate: str,
    allocate: Allocate | None,
) -> WeightOnly | ColumnRanges | GatedOnly:
    """See `layers.linear.StoredProducts.make_stored`."""
    runs, size = weight.runs, weight.shape[0]
    if gate in abi.ACTIVATIONS and len(runs) == 1 and size % PANEL == 0:
        packed = pack(runs[0], interleaved=True, allocate=allocate)
        if bias is not None:
            bias = interleaved_columns(bias)
        return GatedOnly(WeightOnly(packed, bias, dtype, workspace, gate), gate)
    products, begin = [], 0
    for run in runs:
        end = begin + sum(part.num_rows for part in run)
        some = None if bias is None else bias[begin:end]
        products.append(WeightOnly(pack(run, allocate=allocate), some, dtype, workspace))
        begin = end
    return products[0] if len(products) == 1 else ColumnRanges(products, dtype)


def make_table(
    weight: StoredMatrix, dtype: torch.dtype, workspace: Workspace, allocate: Allocate | None
) -> CodeTable:
    """See `layers.linear.StoredProducts.table`."""
    (run,) = weight.runs
    return CodeTable(pack(run, allocate=allocate), dtype, workspace)
