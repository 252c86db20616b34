"""Dense GEMMs y = x W^T + b on the CPU: AMX kernels, vectors, oneDNN, or quantized weights.

The weight is repacked once and the plain copy is dropped: in tiles for the AMX kernel where
there is AMX (`gemm_bf16`), else in panels for `gemm_vectors` where there is AVX2, both
batch-invariant by construction; on other processors reordered for oneDNN, with `batch_invariant`
around it. Quantized weights go to `weight_only`, or to `gemm_int8` where activations are to be
quantized, too.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from octavo.kernels.codes import Codes, StoredMatrix
from octavo.kernels.cpu import gemm_bf16_call as gemm_bf16
from octavo.kernels.cpu import gemm_vectors_call as gemm_vectors
from octavo.kernels.cpu import target
from octavo.kernels.cpu.batch_invariant import BatchInvariantRows, Product, batch_invariant
from octavo.kernels.cpu.gemm_int8_call import QuantizedWeight, Workspace
from octavo.kernels.cpu.kernel import FLOAT_NAMES
from octavo.kernels.cpu.quantize import STORED, WEIGHT_ONLY, pack, pack_weight_only
from octavo.kernels.cpu.stored import CodeTable, make_product, make_table
from octavo.kernels.cpu.weight_only_call import WeightOnly, unit
from octavo.kernels.cpu.weight_only_layout import Allocate

# The row count that is passed to oneDNN as a layout hint. bf16: a hint of 1 gives blocks of 64
# columns, any other hint blocks of 32. With AMX, results with the first are equal over nearly all
# row counts, with the second they fall into two or more groups. The first takes 8% longer over a
# step of SmolLM2 at 64 rows and 9% at 2,048 (0% at one row). Without AMX both are equal over row
# counts and equally fast. fp32: 64.
_LAYOUT_ROWS = {torch.bfloat16: 1, torch.float32: 64}


class CpuProducts:
    """Creates the products of one model; probe results are shared by equal shapes.

    max_rows: the largest step. In bf16 a shape that is batch-invariant only in small splits (on
    AMX: many inner sizes above 2,048) is left variant unless `strict`: splitting would double the
    time of a long prompt. In fp32 all shapes are made invariant.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        max_rows: int = 2048,
        strict: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        """allocate: memory for weights that are laid out here; None: torch's."""
        self._max_rows, self._allocate = max_rows, allocate
        self._strict = strict or dtype == torch.float32
        self._shapes: dict[tuple[int, int, bool], BatchInvariantRows] = {}
        self._has_tiles = dtype == torch.bfloat16 and target.has_tiles()
        self._has_onednn = dtype in _LAYOUT_ROWS and _has_onednn(dtype)
        self._hint = _LAYOUT_ROWS.get(dtype, 1)
        self._dtype, self._workspace = dtype, Workspace()
        self._bytes: Counter[str] = Counter()  # of quantized weights, by method
        self._kinds: Counter[str] = Counter()  # of other weights that have a kernel, by how

    def make(
        self,
        weight: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        max_rows: int | None = None,
        method: str = "none",
        largest: torch.Tensor | None = None,
    ) -> Product:
        """See `layers.linear.Products.make`."""
        if method in WEIGHT_ONLY:
            codes = pack_weight_only(weight, method, self._allocate)
            self._bytes[method] += codes.num_bytes
            return WeightOnly(codes, bias, self._dtype, self._workspace)
        if method != "none":
            packed = pack(weight, method, largest)
            self._bytes[method] += packed.num_bytes
            return QuantizedWeight(packed, bias, self._dtype, self._workspace)
        if isinstance(weight, Codes):
            weight = weight.values().to(self._dtype)
        if self._has_tiles and gemm_bf16.fits(weight):
            self._kinds["bfloat16 on AMX tiles"] += 1
            return gemm_bf16.TiledWeight(weight, bias)
        if target.has_fma() and gemm_vectors.fits(weight.dtype, self._dtype):
            self._kinds[gemm_vectors.described(weight.dtype, self._dtype)] += 1
            return gemm_vectors.VectorWeight(weight, bias, self._dtype, self._allocate)
        weight = weight.to(self._dtype)
        if self._has_onednn:
            op = torch.ops.mkldnn._reorder_linear_weight
            product = _onednn(op(weight, self._hint), bias)
        else:
            product = _plain(weight, bias)
        return self._invariant(product, weight, bias is not None, max_rows or self._max_rows)

    def make_stored(
        self, weight: StoredMatrix, bias: torch.Tensor | None = None, gate: str = ""
    ) -> Product:
        """See `layers.linear.StoredProducts.make_stored`."""
        made = make_product(weight, bias, self._dtype, self._workspace, gate, self._allocate)
        self._bytes[STORED] += made.num_bytes
        return made

    def table(self, weight: StoredMatrix) -> CodeTable:
        """See `layers.linear.StoredProducts.table`."""
        found = make_table(weight, self._dtype, self._workspace, self._allocate)
        self._bytes[STORED] += found.num_bytes
        return found

    def _invariant(
        self, product: Product, weight: torch.Tensor, has_bias: bool, max_rows: int
    ) -> Product:
        """`product`, made batch-invariant if that is affordable or required."""
        key = (weight.shape[0], weight.shape[1], has_bias)
        if key not in self._shapes:
            self._shapes[key] = BatchInvariantRows(product, weight)
        counts = self._shapes[key]
        if counts.inconclusive:
            counts.probe(product, weight)
        if self._strict or counts.is_affordable(max_rows):
            return batch_invariant(product, counts)
        return product

    @property
    def unstable(self) -> list[str]:
        """The shapes, as "KxN", that are not batch-invariant."""
        if self._strict:
            return []
        return [f"{k}x{n}" for (n, k, _), counts in self._shapes.items()
                if not counts.is_affordable()]  # fmt: skip

    def explain(self) -> str:
        """The implementation of the products, in words."""
        parts = [
            f"{how} weights ({size >> 20} MiB) x {self._rows_of(how)}"
            for how, size in self._bytes.items()
        ]
        parts += self._kinds
        if self._shapes:
            parts.append("oneDNN on reordered weights" if self._has_onednn else "torch linear")
        if self.unstable:
            return f"{'; '.join(parts)}; batch-invariant except {', '.join(self.unstable)}"
        return f"{'; '.join(parts)}; batch-invariant"

    def _rows_of(self, method: str) -> str:
        """What the weights of a method are multiplied with, and on what."""
        if method in (*WEIGHT_ONLY, STORED):
            return f"{FLOAT_NAMES[self._dtype]} rows on {unit(self._dtype)}"
        return f"int8 rows on {target.int8_unit()}s"


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether torch can reorder a weight of this type and multiply with it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=dtype), 1)
        _onednn(weight, None)(torch.zeros(1, 32, dtype=dtype))
    except (RuntimeError, AttributeError):  # a build or processor without it
        return False
    return True


def _onednn(packed: torch.Tensor, bias: torch.Tensor | None) -> Product:
    op = torch.ops.mkldnn._linear_pointwise.default
    scalars: list[Any] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(x, packed, bias, "none", scalars, "")
        return out

    return product


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return product
