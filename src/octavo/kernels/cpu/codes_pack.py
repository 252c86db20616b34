"""Values rounded to codes, and codes, laid out for `weight_only`, in one pass over a weight.

The torch twins are `codes.round_to_codes`, `codes.round_to_bytes` and `weight_only_layout.pack`,
which the kernels equal to the bit. Two passes round: `extents` finds the range of each group, of
which the caller makes scales and minima, and `pack` the codes. A work item is a panel of 32 rows.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.gguf_pack import MINUS_128, PIECE, Put, shuffled, transpose
from octavo.kernels.cpu.panels import each_panel
from octavo.kernels.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    call,
    getf,
    geti,
    jit,
    load,
    offset,
    op,
    set32,
    setf,
    splat,
    stack,
    store,
    take,
    zero,
)  # fmt: skip

_CALL, _EXTENTS = abi.CODES_PACK.offset, abi.EXTENTS.offset
_LANES = 16  # whatever the processor has: a group is a multiple
_FLOATS = ir.VectorType(F32, _LANES)
_SIZES = {"float32": 4, "bfloat16": 2, "codes": 1}
_LEAST_SCALE = 1e-30


def _floats(b: Any, raw: Any, dtype: str, number: int) -> Any:
    """16 values as float32."""
    at = offset(b, raw, _LANES * number * _SIZES[dtype])
    if dtype == "float32":
        return load(b, at, _FLOATS)
    wide = ir.VectorType(I32, _LANES)
    halves = b.zext(load(b, at, ir.VectorType(I16, _LANES)), wide)
    return b.bitcast(b.shl(halves, ir.Constant(wide, [16] * _LANES)), _FLOATS)


def _on_floats(b: Any, name: str, *values: Any) -> Any:
    return call(b, f"llvm.{name}.v16f32", _FLOATS, *values)


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * _LANES)


def _rounded(dtype: str, low: int, high: int) -> Callable[..., Any]:
    """Emits 32 values (x - minimum) / scale as bytes, rounded to even, within bounds."""

    def emit(b: Any, raw: Any, scale: Any, minimum: Any) -> Any:
        least = ir.Constant(F32, _LEAST_SCALE)
        scale = b.select(b.fcmp_ordered("<", scale, least), least, scale)
        parts = []
        for number in range(2):
            x = b.fsub(_floats(b, raw, dtype, number), splat(b, minimum, _LANES))
            x = _on_floats(b, "roundeven", b.fdiv(x, splat(b, scale, _LANES)))
            x = _on_floats(b, "minnum", _on_floats(b, "maxnum", x, _constant(low)), _constant(high))
            whole = b.fptosi(x, ir.VectorType(I32, _LANES))
            parts.append(b.trunc(whole, ir.VectorType(I8, _LANES)))
        return shuffled(b, parts[0], list(range(32)), parts[1])

    return emit


def _as_they_are(flipped: int) -> Callable[..., Any]:
    """Emits 32 codes. flipped: bits that the layout has the other way round."""

    def emit(b: Any, raw: Any, scale: Any, minimum: Any) -> Any:
        codes = load(b, raw, ir.VectorType(I8, 32))
        return b.xor(codes, ir.Constant(codes.type, [flipped] * 32)) if flipped else codes

    return emit


def pack(variant: str) -> Any:
    """`variant` is "4-bfloat16", "8-float32" and so on: bits, and the type of what is rounded, or
    "codes"."""
    name, _, dtype = variant.partition("-")
    bits, size, are_codes = int(name), _SIZES[dtype], dtype == "codes"
    if are_codes:
        codes_of = _as_they_are(128 if bits == 8 else 0)
    else:
        codes_of = _rounded(dtype, *((-127, 127) if bits == 8 else (0, 15)))

    @op(types.void, types.int64, types.int64, types.float32, types.float32)
    def block(b, raw, at, scale, minimum):
        codes = codes_of(b, raw, scale, minimum)
        if bits == 8:
            store(b, codes, at)
        else:
            Put(b, bits, at, at, at, at, 1, 2).codes(0, codes)

    @jit
    def row(a, number, raw, at, first, end, step):
        """Of 32 values at a time; `step`: bytes from what is written of them to the next."""
        group = geti(a + _CALL.group)
        terms = (number * ((geti(a + _CALL.columns) + group - 1) // group)) * 4
        for k in range(first, end, 32):
            scale, minimum = types.float32(1.0), types.float32(0.0)
            if not are_codes:
                place = terms + k // group * 4
                scale = getf(geti(a + _CALL.scale) + place)
                minimum = getf(geti(a + _CALL.minimum) + place)
            block(raw, at, scale, minimum)
            raw, at = raw + 32 * size, at + step

    piece = _bytes(row, size) if bits == 8 else _nibbles(row, size)

    @jit
    def panel(a, number):
        rows, columns = geti(a + _CALL.rows), geti(a + _CALL.columns)
        panel_bytes = columns // 16 * 64 * bits
        codes = geti(a + _CALL.codes) + number * panel_bytes
        many = min(32, rows - number * 32)
        if many < 32:
            zero(codes, panel_bytes)
        for first in range(0, columns, PIECE):
            piece(a, number * 32, many, first, min(columns, first + PIECE), codes)

    return each_panel(_CALL, panel)


def _nibbles(row: Any, size: int) -> Any:
    """A function for values first .. end - 1 of `many` rows from `begin` on, of 4 bits."""

    @jit
    def rows(a, begin, many, first, end, codes):
        for i in range(many):
            raw = geti(a + _CALL.raw) + (begin + i) * geti(a + _CALL.stride) + first * size
            at = codes + first // 16 * 256 + i // 16 * 128 + i % 16 * 4
            row(a, begin + i, raw, at, first, end, 512)

    return rows


def _bytes(row: Any, size: int) -> Any:
    """The same of 8 bits: rows of bytes first, which are then transposed."""
    scratch = stack(32 * PIECE)

    @jit
    def rows(a, begin, many, first, end, codes):
        spare = scratch()
        if many < 32:  # the code 0 of rows that there are not
            for place in range(0, 32 * PIECE, 4):
                set32(spare + place, MINUS_128)
        for i in range(many):
            raw = geti(a + _CALL.raw) + (begin + i) * geti(a + _CALL.stride) + first * size
            row(a, begin + i, raw, spare + i * PIECE, first, end, 32)
        for j in range((end - first) // 16):
            for half in range(2):
                source = spare + half * 16 * PIECE + j * 16
                transpose(source, codes + (first // 16 + j) * 512 + half * 256, PIECE)

    return rows


def extents(variant: str) -> Any:
    """The least and the largest value of each group, NaN where there is one. `variant` is the type
    of the values."""
    size = _SIZES[variant]

    def extreme(name: str) -> Any:
        """A function: the extreme of 16 values at an address."""

        @op(types.float32, types.int64)
        def found(b, raw):
            x = _floats(b, raw, variant, 0)
            value = call(b, f"llvm.vector.reduce.f{name}.v16f32", F32, x)
            strange = b.bitcast(b.fcmp_unordered("uno", x, x), I16)
            is_strange = b.icmp_unsigned("!=", strange, ir.Constant(I16, 0))
            return b.select(is_strange, ir.Constant(F32, float("nan")), value)

        return found

    least, most = extreme("min"), extreme("max")

    @jit
    def row(a, number):
        group = geti(a + _EXTENTS.group)
        groups = geti(a + _EXTENTS.columns) // group
        raw = geti(a + _EXTENTS.raw) + number * geti(a + _EXTENTS.stride)
        for g in range(groups):
            low, high = least(raw), most(raw)
            for k in range(16, group, 16):
                other_low, other_high = least(raw + k * size), most(raw + k * size)
                # A comparison with NaN is false: NaN stays, and replaces what is there.
                low = low if low <= other_low or low != low else other_low
                high = high if high >= other_high or high != high else other_high
            place = (number * groups + g) * 4
            setf(geti(a + _EXTENTS.minimum) + place, low)
            setf(geti(a + _EXTENTS.maximum) + place, high)
            raw += group * size

    @jit
    def work(a):
        rows = geti(a + _EXTENTS.rows)
        number = take(a)
        while number * 32 < rows:
            for i in range(number * 32, min(rows, number * 32 + 32)):
                row(a, i)
            number = take(a)

    def kernel(a: int) -> None:
        work(a)

    return kernel
