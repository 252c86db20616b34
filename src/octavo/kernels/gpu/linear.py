"""Products on a GPU: cuBLAS for dense weights, Triton for weights as codes or batch invariance.

cuBLAS chooses a kernel by the number of rows, so its results are not batch-invariant; the kernels
of `matmul` are: their tiles differ in size only, and each sum has one order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo.kernels.codes import Codes, round_to_codes
from octavo.kernels.gpu import matmul
from octavo.kernels.gpu.matmul import is_wide

INT8, INT4, FP8 = "int8", "int4", "fp8"

Product = Callable[[torch.Tensor], torch.Tensor]
# Inputs that share a scale; the largest that divides a group is used.
_SPANS = (64, 32, 16)
# Programs that are enough to read weights at full speed, and the most parts of a sum.
_ENOUGH, _MOST_PARTS = 256, 8


@dataclass(frozen=True, slots=True)
class Tile:
    """rows x outputs of a program, and how it is compiled."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


# By the most rows that each serves.
CODE_TILES = {16: Tile(16, 64, 4, 4), 64: Tile(64, 64, 4, 3), 2**31: Tile(128, 128, 8, 3)}
DENSE_TILES = {16: Tile(16, 64, 4, 4), 2**31: Tile(128, 128, 8, 3)}
# Of float8 codes.
FP8_TILES = {16: Tile(16, 64, 4, 4), 64: Tile(64, 64, 4, 3), 2**31: Tile(128, 128, 8, 3)}
_WIDE_TILES = {2**31: Tile(32, 32, 4, 2)}


def tile_for(tiles: dict[int, Tile], rows: int, dtype: torch.dtype) -> Tile:
    """The tile for products of `rows` rows."""
    if dtype == torch.float32:
        tiles = _WIDE_TILES
    return next(tile for most, tile in tiles.items() if rows <= most)


def parts_of(outputs: int, inputs: int) -> int:
    """In how many parts the sums of a weight are computed, so that few rows use the whole GPU."""
    wanted = -(-_ENOUGH * CODE_TILES[16].outputs // outputs)
    return max(1, min(wanted, _MOST_PARTS, inputs // 512))


class GpuProducts:
    """Creates the products of one model."""

    def __init__(self, dtype: torch.dtype, deterministic: bool, converts_fp8: bool = False) -> None:
        """converts_fp8: whether the GPU converts float8_e4m3fn itself."""
        self._dtype, self._deterministic = dtype, deterministic
        self._converts_fp8 = converts_fp8
        self._coded = 0

    def make(
        self,
        weight: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        max_rows: int | None = None,
        method: str = "none",
        largest: torch.Tensor | None = None,
    ) -> Product:
        """See `layers.linear.Products.make`."""
        if method != "none":
            coded = as_codes(weight, method, largest)
            if coded.are_floats and (coded.is_one_group or span_of(coded.group)):
                self._coded += 1
                return Fp8Product(coded, bias, self._converts_fp8)
            if not coded.are_floats and span_of(coded.group):
                self._coded += 1
                return CodedProduct(coded, bias, self._dtype)
            weight = coded
        if isinstance(weight, Codes):
            weight = weight.values().to(self._dtype)
        if self._deterministic:
            return DenseProduct(weight, bias)
        dense = weight
        return lambda x: F.linear(x, dense, bias)

    @property
    def unstable(self) -> list[str]:
        """Every dense product may vary, unless `deterministic`; the loader logs nothing of it."""
        return []

    def explain(self) -> str:
        dense = "Triton in fixed tiles" if self._deterministic else "cuBLAS"
        coded = f"; {self._coded} products on codes in Triton" if self._coded else ""
        return dense + coded


def as_codes(
    weight: torch.Tensor | Codes, method: str, largest: torch.Tensor | None = None
) -> Codes:
    """`weight` [N, K] in codes: as they are stored, or rounded here.

    int8: 255 levels per output, symmetric; int4: 16 levels in each group of 32; fp8: float8_e4m3fn
    with a scale per output. largest: as of `layers.linear.Products.make`.
    """
    if isinstance(weight, Codes):
        return weight
    if method == INT4:
        return round_to_codes(weight)
    most = weight.abs().amax(1).float() if largest is None else largest
    most = most.unsqueeze(1).clamp(min=1e-30)
    if method == FP8:
        scale = most / torch.finfo(torch.float8_e4m3fn).max
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        return Codes(codes, scale, torch.zeros_like(scale), weight.shape[1], 8)
    scale = most / 127
    codes = (weight.float() / scale).round().add_(128).to(torch.uint8)
    return Codes(codes, scale, -128 * scale, weight.shape[1], 8)


def span_of(group: int) -> int | None:
    """The number of inputs that share a scale in the kernel; None for a group without one."""
    return next((span for span in _SPANS if group % span == 0), None)


class CodedProduct:
    """x W^T + b on codes, dequantized in registers."""

    def __init__(self, codes: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._n, self._k = codes.codes.shape
        span = span_of(codes.group)
        assert span is not None
        self._span, self._spans, self._bits = span, codes.group // span, codes.bits
        self._codes = pack_codes(codes.codes, codes.bits, span)
        self._scale, self._minimum = _narrow(codes.scale), _narrow(codes.minimum)
        self._bias, self._wide = bias, is_wide(dtype)
        self._parts = parts_of(self._n, self._k)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, K], rows may be apart; returns [rows, N]."""
        rows = len(x)
        tile = tile_for(CODE_TILES, rows, x.dtype)
        y, sums = _outputs(x, self._n, self._parts)
        grid = (-(-self._n // tile.outputs), -(-rows // tile.rows), self._parts)
        bias = self._scale if self._bias is None else self._bias
        matmul.multiply_codes[grid](
            sums, x, self._codes, self._scale, self._minimum, bias, rows, self._n, self._k,
            x.stride(0), self._codes.stride(0), self._scale.stride(0), ROWS=tile.rows,
            OUTPUTS=tile.outputs, SPAN=self._span, SPANS=self._spans, BITS=self._bits,
            PARTS=self._parts, BIAS=self._bias is not None, WIDE=self._wide,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return _added(y, sums, self._bias, self._parts)


def fp8_span(group: int, single: bool, rows: int) -> int | None:
    """Inputs that are multiplied at once, of float8 codes in groups, or in a single one; None for
    groups that have no such. rows: of a tile; large ones have registers for 64."""
    most = (128,) if rows == FP8_TILES[16].rows else ()
    return next((span for span in (*most, *_SPANS) if single or group % span == 0), None)


class Fp8Product:
    """x W^T + b on float8_e4m3fn, converted in registers."""

    def __init__(self, codes: Codes, bias: torch.Tensor | None, native: bool) -> None:
        self._n, self._k = codes.codes.shape
        self._single, self._group, self._native = codes.is_one_group, codes.group, native
        bits = F.pad(codes.codes.view(torch.uint8), (0, -self._k % 128)).contiguous()
        self._codes = bits.view(torch.float8_e4m3fn) if native else bits
        self._scale = (codes.scale if native else codes.scale * 256).contiguous()
        self._bias = bias
        self._parts = parts_of(self._n, self._k)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, K], rows may be apart; returns [rows, N]."""
        rows = len(x)
        tile = tile_for(FP8_TILES, rows, x.dtype)
        span = fp8_span(self._group, self._single, tile.rows)
        assert span is not None
        y, sums = _outputs(x, self._n, self._parts)
        grid = (-(-self._n // tile.outputs), -(-rows // tile.rows), self._parts)
        matmul.multiply_fp8[grid](
            sums, x, self._codes, self._scale, self._scale if self._bias is None else self._bias,
            rows, self._n, self._k, x.stride(0), self._codes.stride(0), self._scale.stride(0),
            ROWS=tile.rows, OUTPUTS=tile.outputs, SPAN=span,
            SPANS=0 if self._single else self._group // span,
            PARTS=self._parts, BIAS=self._bias is not None, NATIVE=self._native,
            WIDE=is_wide(x.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return _added(y, sums, self._bias, self._parts)


class DenseProduct:
    """x W^T + b in fixed tiles: a row's result does not depend on the number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._parts = parts_of(*weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, K], rows may be apart; returns [rows, N]."""
        weight, rows = self._weight, len(x)
        n, k = weight.shape
        # One tile for all numbers of rows: instructions of other shapes may round otherwise.
        tile = tile_for({2**31: DENSE_TILES[16]}, rows, x.dtype)
        y, sums = _outputs(x, n, self._parts)
        grid = (-(-n // tile.outputs), -(-rows // tile.rows), self._parts)
        matmul.multiply[grid](
            sums, x, weight, weight if self._bias is None else self._bias, rows, n, k,
            x.stride(0), weight.stride(0), ROWS=tile.rows, OUTPUTS=tile.outputs, SPAN=64,
            PARTS=self._parts, BIAS=self._bias is not None, WIDE=is_wide(x.dtype),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return _added(y, sums, self._bias, self._parts)


def pack_codes(codes: torch.Tensor, bits: int, span: int) -> torch.Tensor:
    """uint8 [N, K] in chunks of two spans, padded with zeros; of 4 bits, two codes in a byte."""
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % (2 * span)))
    if bits == 8:
        return padded.contiguous()
    low, high = padded.view(n, -1, 2, span).unbind(2)
    return (low | high << 4).reshape(n, -1)


def _outputs(x: torch.Tensor, n: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, where the kernel writes): partial sums are in float32."""
    y = x.new_empty((len(x), n))
    return y, y if parts == 1 else x.new_empty((parts, len(x), n), dtype=torch.float32)


def _added(
    y: torch.Tensor, sums: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> torch.Tensor:
    if parts > 1:
        block = 1024
        matmul.add_parts[(-(-y.numel() // block),)](
            y, sums, y if bias is None else bias, len(y), y.shape[1], PARTS=parts,
            BLOCK=block, BIAS=bias is not None,
        )  # fmt: skip
    return y


def _narrow(terms: torch.Tensor) -> torch.Tensor:
    """In float16 where that holds every value."""
    half = terms.half()
    return half if torch.equal(half.float(), terms) else terms.contiguous()
