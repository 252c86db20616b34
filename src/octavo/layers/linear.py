"""Dense products y = x W^T + b, and the care that a row's bits do not depend on the row count.

On a CPU the weight is laid out once and the plain copy is dropped: in tiles for a kernel of our
own where there is AMX (`kernels.cpu.gemm_bf16`: a row's bits are its own), else reordered for
oneDNN. A library picks its blocking, and with it the order of a sum, by the number of rows.
`StableRows` finds out, the first time a row count is seen, whether it gives each row the bits
that other counts give, and pads or splits the rows where it does not.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from octavo.kernels.cpu import gemm_bf16_call as cpu_linear_ops
from octavo.kernels.cpu import target
from octavo.kernels.cpu.gemm_int8_call import QuantizedWeight, Room
from octavo.kernels.cpu.quantize import pack
from octavo.quant.base import NONE, Codes

# x [rows, in_features] -> [rows, out_features]
Product = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class GatedProduct(Protocol):
    """What a product may offer beside its call: the activation of a gated MLP in the same pass."""

    def gated(self) -> Product | None:
        """x -> silu(gate) * up of a weight of gate over up; None if it has no such form."""
        ...


# Rows that the weight is laid out for. bf16: a hint of 1 chooses blocks of 64 columns, any other
# hint blocks of 32. With AMX the rows of the first agree over nearly all row counts, those of
# the second fall into two or more groups; it takes 8% longer over a whole step of SmolLM2 at 64
# rows and 9% at 2,048 (none at one row). Without AMX both agree and are equally fast. fp32: 64.
_LAYOUT_ROWS = {torch.bfloat16: 1, torch.float32: 64}

_CANONICAL = 64  # the row count whose bits are the right ones, and the last resort for pieces
# Piece sizes to try, largest first: on AMX multiples of 300 agree with small counts most often.
_PIECES = (900, 600, 300, 256, 128, _CANONICAL)
_PIECE_PER_THREAD = 128  # rows from which a thread works at full speed
_PROBE_ROWS = 16
_PROBE_COLUMNS = 16


class StableRows(dict[int, int]):
    """Row count -> the count to call a product of one shape with, so that a row keeps its bits.

    A larger number: pad to it. A smaller one: work in pieces of it. Found by trying each count
    once, on inputs whose outputs cancel to their rounding errors, so that any other order of
    summation shows in the bits.
    """

    _product: Product
    _inputs: torch.Tensor
    _expected: torch.Tensor

    def __init__(self, product: Product, weight: torch.Tensor) -> None:
        super().__init__()
        self.blind = True
        self._most = 0
        self.watch(product, weight)

    def watch(self, product: Product, weight: torch.Tensor) -> None:
        """Try on `product` of `weight`; nothing is seen of a weight whose rows are zero."""
        self._product = product
        self._inputs = _cancelling_inputs(weight)
        self._expected = self._tiled(_CANONICAL)[:_PROBE_ROWS]
        self.blind = not bool(self._expected.any())

    def cheap(self, most_rows: int = 0) -> bool:
        """Whether steps of up to `most_rows` need at most a quarter more rows, or large pieces.

        The largest count asked for so far is remembered.
        """
        self._most = max(self._most, most_rows)
        piece = _PIECE_PER_THREAD * torch.get_num_threads()
        counts = [n for n in (256, self._most) if _CANONICAL < n <= self._most]
        return all(min(n, piece) <= self[n] <= n + n // 4 for n in counts)

    def __missing__(self, rows: int) -> int:
        fit = rows
        if not self._agrees(rows):
            fit = next((n for n in _larger(rows) if self._agrees(n)), 0)
        if not fit:
            fit = next(n for n in _PIECES if n == _CANONICAL or (n < rows and self._agrees(n)))
        self[rows] = fit
        return fit

    def _tiled(self, rows: int) -> torch.Tensor:
        repeats = -(-rows // _PROBE_ROWS)
        return self._product(self._inputs.repeat(repeats, 1)[:rows])

    def _agrees(self, rows: int) -> bool:
        found = self._tiled(rows)
        whole = rows - rows % _PROBE_ROWS
        body, tail = found[:whole].view(-1, *self._expected.shape), found[whole:]
        same = torch.equal(body, self._expected.expand_as(body))
        return same and torch.equal(tail, self._expected[: len(tail)])


def _larger(rows: int) -> list[int]:
    """Row counts worth padding to: at most half as many again, or 64."""
    most = max(rows + rows // 2, _CANONICAL)
    steps = (2, 4, 8, 16, 32, 60, 64, 128, 256)
    near = {rows + 1, *(-(-rows // s) * s + extra for s in steps for extra in (0, 1))}
    return sorted(n for n in near if rows < n <= most)


def _cancelling_inputs(weight: torch.Tensor) -> torch.Tensor:
    """Inputs [16, K] whose products with 16 rows of `weight` [N, K] nearly vanish.

    In bf16 a sum's rounding error is far below the last bit of its result, unless the result is
    tiny beside its terms. So random values fill one third of the columns; the second and last
    third are solved to cancel what the ones before leave over.
    """
    n, k = weight.shape
    generator = torch.Generator().manual_seed(k)
    first, *others = torch.randperm(k, generator=generator).tensor_split(3)
    rows = torch.linspace(0, n - 1, min(_PROBE_COLUMNS, n, max(1, k // 6))).long()
    target = weight[rows].cpu().double().nan_to_num(0, 0, 0)
    inputs = torch.zeros(_PROBE_ROWS, k, dtype=torch.float64)
    inputs[:, first] = torch.randn(_PROBE_ROWS, len(first), generator=generator).double()
    for part in (first, *others):
        if part is not first:
            ours = target[:, part]
            square = torch.linalg.pinv(ours @ ours.T, hermitian=True)
            inputs[:, part] = -(inputs @ target.T) @ square @ ours
        inputs[:, part] = inputs[:, part].to(weight.dtype).double()
    return inputs.to(weight.dtype).to(weight.device)


class Products:
    """Makes products for one device and dtype; equal shapes share what was found out of them.

    most_rows: the largest step. In bf16 a shape whose rows agree only in small pieces (on AMX:
    many inner sizes above 2,048) is left as it is unless `strict`: that would double the time
    of a long prompt. In fp32 rows always agree.
    """

    def __init__(
        self, device: str, dtype: torch.dtype, most_rows: int = 2048, strict: bool = False
    ) -> None:
        self._most_rows = most_rows
        self._strict = strict or dtype == torch.float32
        self._shapes: dict[tuple[int, int, bool], StableRows] = {}
        self._tiled = device == "cpu" and dtype == torch.bfloat16 and target.has_tiles()
        self._packed = device == "cpu" and dtype in _LAYOUT_ROWS and _has_onednn(dtype)
        self._hint = _LAYOUT_ROWS.get(dtype, 1)
        self._dtype, self._room = dtype, Room()
        self._bytes: Counter[str] = Counter()  # of quantized weights, by method
        self._num_tiled = 0

    def make(
        self,
        weight: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        most_rows: int | None = None,
        method: str = NONE,
    ) -> Product:
        """The product with `weight` [N, K] and `bias` [N]. `weight` is not kept where packed.

        method: "int8" or "int4", to multiply it as integers (`kernels.cpu.gemm_int8`).
        """
        if method != NONE:
            packed = pack(weight, method)
            self._bytes[method] += packed.num_bytes
            return QuantizedWeight(packed, bias, self._dtype, self._room)
        if isinstance(weight, Codes):
            weight = weight.values().to(self._dtype)
        if self._tiled and cpu_linear_ops.fits(weight):
            self._num_tiled += 1
            return cpu_linear_ops.TiledWeight(weight, bias)
        if self._packed:
            op = torch.ops.mkldnn._reorder_linear_weight
            product = _onednn(op(weight, self._hint), bias)
        else:
            product = _plain(weight, bias)
        key = (weight.shape[0], weight.shape[1], bias is not None)
        if key not in self._shapes:
            self._shapes[key] = StableRows(product, weight)
        fits = self._shapes[key]
        if fits.blind:
            fits.watch(product, weight)
        if self._strict or fits.cheap(most_rows or self._most_rows):
            return _with_stable_rows(product, fits)
        return product

    @property
    def unstable(self) -> list[str]:
        """The shapes, as "KxN", whose rows depend on how many they are."""
        if self._strict:
            return []
        return [f"{k}x{n}" for (n, k, _), fits in self._shapes.items() if not fits.cheap()]

    def explain(self) -> str:
        """What serves the products, for `octavo doctor`."""
        parts = [
            f"{how} weights ({size >> 20} MiB) x int8 rows on {target.int8_unit()}s"
            for how, size in self._bytes.items()
        ]
        if self._num_tiled:
            parts.append("bfloat16 on AMX tiles")
        if self._shapes:
            how = "oneDNN on reordered weights" if self._packed else "torch linear"
            parts.append(how)
        if self.unstable:
            return f"{'; '.join(parts)}; rows depend on their number in {', '.join(self.unstable)}"
        return f"{'; '.join(parts)}; rows do not depend on their number"


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


def _with_stable_rows(product: Product, fits: StableRows) -> Product:
    def stable(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        fit = fits[rows]
        if fit == rows:
            return product(x)
        if fit > rows:
            return product(F.pad(x, (0, 0, 0, fit - rows)))[:rows]
        return torch.cat([stable(piece) for piece in torch.split(x, fit)])

    return stable
