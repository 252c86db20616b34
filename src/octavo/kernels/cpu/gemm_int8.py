"""GEMM of int8 or int4 weights with activations that are quantized to int8 row by row.

    q[r, k] = round(x[r, k] / s[r]),  s[r] = max over k of |x[r, k]| / 127
    y[r, n] = (sum over k of q[r, k] w[n, k]) * scale[n] * s[r] + bias[n]

The sum is one of integers, so it is exact in any order and on any unit: the GEMM is
batch-invariant. int4 is a compressed encoding of int8: a code c of 0 to
15 in a group of 32 or more k stands for w = (c * m + o) >> 8, with 16-bit integers m and o per
group and column. Panels are unpacked to int8 once per 256 rows and stay in the CPU cache meanwhile;
for a few rows each word is unpacked in registers instead.

q is stored with 128 added, because the instructions multiply unsigned with signed bytes; what
that adds to a sum, 128 times the sum of a column's weights, is subtracted at the end.

Layouts (see `gemm_int8_call.pack_int8`): columns in panels of 16, two of which are a work item; k
in steps of 64. A panel's step is 16 words of 4 k for each of its columns: one tile of AMX, or 16
vectors of 16 columns. Four consecutive k are in one word, as the dot-product instructions expect.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi, amx
from octavo.kernels.cpu.activations import activated
from octavo.kernels.cpu.simd import (
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Vec,
    call,
    const,
    consti,
    getf,
    geti,
    jit,
    load,
    loop,
    offset,
    op,
    peek,
    pointer,
    row_memory,
    setf,
    splat,
    store,
    take,
    vabs,
    vadd,
    vfma,
    vload,
    vmax,
    vmul,
    vsplat,
    vsum,
    vtop,
    zero,
)  # fmt: skip

_ARGUMENTS = abi.GEMM_INT8.offset
_ADDRESS = types.int64
_PARTS = 16 // LANES  # vectors of a panel's word
_ITEM_ROWS = abi.GEMM_INT8_ROWS
_ROWS = 4 if LANES == 16 else 2  # rows whose sums fit the registers
_FEW = 4  # rows up to which words of int4 are unpacked in registers
_STEP = 1024  # bytes of a panel's step
_SUMS = 128  # bytes of a row of sums: two panels
_WORDS = ir.VectorType(I16, 32)
_PAIRS = ir.VectorType(I32, 16)
_VNNI = {16: "avx512vnni", 8: "avxvnni"}[LANES] in FEATURES
_SMALLEST = np.float32(1e-30)  # a row below it counts as zero: 127 / it must be finite
_ROUNDER = 1.5 * 2**23 + 128  # added to a float it leaves round(x) + 128 in the low byte


def _dot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """total + the sum of the 4 products of bytes, in each lane of int32."""
    if _VNNI:
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", VI, total, unsigned, signed)
    if "i8mm" in FEATURES:
        return _usdot(b, total, unsigned, signed)
    wide = ir.VectorType(I16, 2 * LANES)
    eight, low = (ir.Constant(wide, [v] * 2 * LANES) for v in (8, 255))
    x, w = b.bitcast(unsigned, wide), b.bitcast(signed, wide)
    for one, two in ((b.and_(x, low), b.ashr(b.shl(w, eight), eight)),
                     (b.lshr(x, eight), b.ashr(w, eight))):  # fmt: skip
        total = b.add(total, _pair_sums(b, one, two))
    return total


def _usdot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """The same with Arm's instruction, whose vectors are half as long."""
    none = ir.Constant(VI, ir.Undefined)
    halves = []
    for first in (0, 4):
        mask = ir.Constant(ir.VectorType(I32, 4), list(range(first, first + 4)))
        part, x, w = (b.shuffle_vector(v, none, mask) for v in (total, unsigned, signed))
        x, w = (b.bitcast(v, ir.VectorType(I8, 16)) for v in (x, w))
        halves.append(call(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", part.type, part, x, w))
    return b.shuffle_vector(*halves, ir.Constant(VI, list(range(8))))


def _pair_sums(b: Any, x: Any, y: Any) -> Any:
    """x[2i] y[2i] + x[2i + 1] y[2i + 1] of int16 in int32, as LLVM compiles to pmaddwd."""
    none = ir.Constant(x.type, ir.Undefined)
    parts = []
    for first in (0, 1):
        mask = ir.Constant(VI, list(range(first, 2 * LANES, 2)))
        one, two = (b.sext(b.shuffle_vector(v, none, mask), VI) for v in (x, y))
        parts.append(b.mul(one, two))
    return b.add(*parts)


def _dots(rows: int) -> Any:
    """sums[rows, 32] of `rows` rows of q over all steps of a pair of panels."""
    vectors = 2 * _PARTS
    chains = 2 if rows == 1 else 1  # sums of even and of odd words, independent of each other

    def dots(b, sums, q, q_stride, weights, panel, steps):
        starts = [b.add(q, b.mul(q_stride, I64(r))) for r in range(rows)]
        bases = [b.add(weights, b.mul(panel, I64(p))) for p in range(2)]

        def body(i, *carried):
            totals = list(carried)
            at_q, at_w = (b.mul(i, I64(n)) for n in (64, _STEP))
            lines = [b.add(start, at_q) for start in starts]
            for word in range(16):
                columns = [
                    load(b, offset(b, b.add(base, at_w), 64 * word + 4 * LANES * part), VI)
                    for base in bases
                    for part in range(_PARTS)
                ]
                for r, line in enumerate(lines):
                    x = splat(b, load(b, offset(b, line, 4 * word), I32))
                    for v, w in enumerate(columns):
                        index = (word % chains * rows + r) * vectors + v
                        totals[index] = _dot(b, totals[index], x, w)
            return totals

        totals = loop(b, steps, [consti(0)] * (chains * rows * vectors), body)
        for r in range(rows):
            for v in range(vectors):
                total = totals[r * vectors + v]
                if chains == 2:
                    total = b.add(total, totals[(rows + r) * vectors + v])
                store(b, total, offset(b, sums, r * _SUMS + v * 4 * LANES))

    return op(types.void, *[_ADDRESS] * 6)(dots)


def _tile_dots(height: int) -> Any:
    """sums[16 * height, 32] on AMX."""

    def dots(b, sums, q, q_stride, weights, panel, steps):
        def right(i):
            here = b.add(weights, b.mul(i, I64(_STEP)))
            panels = [b.add(here, b.mul(panel, I64(p))) for p in range(2)]
            return lambda p: (panels[p], I64(64))

        amx.sum_tiles(b, height, 2, steps, q, q_stride, right, "tdpbusd")
        amx.store_tiles(b, height, 2, sums, I64(_SUMS))

    return op(types.void, *[_ADDRESS] * 6)(dots)


def _unpack(b: Any, word: Any, m: Any, o: Any) -> tuple[Any, Any]:
    """int8 of two words of 16 columns, of 64 bytes of codes: each of 16 bits has four, two k of
    either word."""
    eight, mask, top = (ir.Constant(_WORDS, [v] * 32) for v in (8, 15, 0xFF00))
    values = []
    for shift in (0, 4, 8, 12):
        code = b.lshr(word, ir.Constant(_WORDS, [shift] * 32)) if shift else word
        code = b.and_(code, mask) if shift < 12 else code
        values.append(b.add(b.mul(code, m), o))
    one, two = (b.or_(b.lshr(values[i], eight), b.and_(values[i + 1], top)) for i in (0, 2))
    return one, two


def _factors(b: Any, address: Any) -> tuple[Any, Any]:
    """(m, o) of 16 columns, each twice."""
    both = b.load(pointer(b, address, _PAIRS), align=4)
    sixteen, low16 = (ir.Constant(_PAIRS, [v] * 16) for v in (16, 0xFFFF))
    low, high = b.and_(both, low16), b.lshr(both, sixteen)
    m, o = (b.bitcast(b.or_(v, b.shl(v, sixteen)), _WORDS) for v in (low, high))
    return m, o


@op(types.void, *[_ADDRESS] * 3)
def _unpack_piece(b, codes, factors, weights):
    """int8 of 32 k of a panel, from 256 bytes of codes and a word (m, o) of each column."""
    m, o = _factors(b, factors)
    for quarter in range(4):
        word = load(b, offset(b, codes, 64 * quarter), _WORDS)
        for half, values in enumerate(_unpack(b, word, m, o)):
            store(b, values, offset(b, weights, 128 * quarter + 64 * half))


def _unpack_dots(rows: int) -> Any:
    """As `_dots`, but of int4 codes in `pieces` of 32 k, `group` of which share a factor."""

    def dots(b, sums, q, q_stride, codes, factors, group, pieces):
        num_groups = b.udiv(b.sub(b.add(pieces, group), I64(1)), group)
        panel, factor_panel = b.mul(pieces, I64(256)), b.mul(num_groups, I64(64))
        starts = [b.add(q, b.mul(q_stride, I64(r))) for r in range(rows)]

        def body(i, *carried):
            totals = list(carried)
            lines = [b.add(start, b.mul(i, I64(32))) for start in starts]
            at_codes = b.add(codes, b.mul(i, I64(256)))
            at_factors = b.add(factors, b.mul(b.udiv(i, group), I64(64)))
            for p in range(2):
                m, o = _factors(b, b.add(at_factors, b.mul(factor_panel, I64(p))))
                here = b.add(at_codes, b.mul(panel, I64(p)))
                for quarter in range(4):
                    word = load(b, offset(b, here, 64 * quarter), _WORDS)
                    for half, values in enumerate(_unpack(b, word, m, o)):
                        weights = b.bitcast(values, VI)
                        for r, line in enumerate(lines):
                            place = offset(b, line, 4 * (2 * quarter + half))
                            x = splat(b, load(b, place, I32))
                            totals[2 * r + p] = _dot(b, totals[2 * r + p], x, weights)
            return totals

        totals = loop(b, pieces, [consti(0)] * (2 * rows), body)
        for r in range(rows):
            for p in range(2):
                store(b, totals[2 * r + p], offset(b, sums, r * _SUMS + 64 * p))

    return op(types.void, *[_ADDRESS] * 7)(dots)


@op(types.void, _ADDRESS, Vec)
def _store_rounded(b, address, value):
    """round(value) + 128 of each lane, as bytes."""
    bits = b.bitcast(b.fadd(value, const(_ROUNDER)), VI)
    store(b, b.trunc(bits, ir.VectorType(I8, LANES)), address)


@op(Vec, _ADDRESS, _ADDRESS)
def _sums_as_floats(b, sums, added):
    return b.sitofp(b.add(load(b, sums, VI), load(b, added, VI)), VF)


def _quantize(dtype: str) -> Any:
    """A function that quantizes row r of x."""
    size, read, _ = row_memory(dtype == "bfloat16")

    @jit
    def quantize(a, r):
        x = geti(a + _ARGUMENTS.x) + r * geti(a + _ARGUMENTS.x_stride)
        n = geti(a + _ARGUMENTS.in_size)
        top = poison = none = vsplat(np.float32(0.0))
        for i in range(0, n, LANES):
            value = read(x + i * size, n - i)
            top, poison = vmax(vabs(value), top), vfma(value, none, poison)
        most = vtop(top)
        factor = np.float32(0.0)
        if most > _SMALLEST:
            factor = np.float32(127.0) / most
        # Infinities and NaN make a row NaN, as they do in a sum of floats.
        setf(geti(a + _ARGUMENTS.s) + r * 4, most / np.float32(127.0) + vsum(poison))
        q, factors = geti(a + _ARGUMENTS.q) + r * geti(a + _ARGUMENTS.q_stride), vsplat(factor)
        for i in range(0, n, LANES):
            _store_rounded(q + i, vmul(read(x + i * size, n - i), factors))
        zero(q + n, (n + 63) // 64 * 64 - n)  # there weights may be anything

    return quantize


def _store_plain(dtype: str) -> Any:
    """A function that stores y of sums[n, 32], of rows r.. and columns column... ."""
    size, _, write = row_memory(dtype == "bfloat16")

    @jit
    def put(a, sums, r, n, column):
        columns = geti(a + _ARGUMENTS.out_size)
        scale = geti(a + _ARGUMENTS.scales) + column * 4
        added, bias = geti(a + _ARGUMENTS.added) + column * 4, geti(a + _ARGUMENTS.bias)
        out = geti(a + _ARGUMENTS.out) + (r * columns + column) * size
        for i in range(n):
            row_scale = vsplat(getf(geti(a + _ARGUMENTS.s) + (r + i) * 4))
            for c in range(0, min(32, columns - column), LANES):
                value = _sums_as_floats(sums + i * _SUMS + c * 4, added + c * 4)
                value = vmul(vmul(value, vload(scale + c * 4)), row_scale)
                if bias != 0:
                    value = vadd(value, vload(bias + (column + c) * 4))
                write(out + (i * columns + c) * size, value, columns - column - c)

    return put


def _store_gated(dtype: str, activation: str) -> Any:
    """The same for activation(gate) * up of sums[n, 16 of gate and 16 of up]."""
    size, _, write = row_memory(dtype == "bfloat16")
    activate = activated(activation)

    @jit
    def put(a, sums, r, n, column):
        scale = geti(a + _ARGUMENTS.scales) + column * 4
        added, bias = geti(a + _ARGUMENTS.added) + column * 4, geti(a + _ARGUMENTS.bias)
        columns = geti(a + _ARGUMENTS.out_size) // 2
        out = geti(a + _ARGUMENTS.out) + (r * columns + column // 2) * size
        for i in range(n):
            row_scale = vsplat(getf(geti(a + _ARGUMENTS.s) + (r + i) * 4))
            for c in range(0, 16, LANES):
                here = sums + i * _SUMS + c * 4
                gate = vmul(_sums_as_floats(here, added + c * 4), vload(scale + c * 4))
                up = vmul(_sums_as_floats(here + 64, added + 64 + c * 4), vload(scale + 64 + c * 4))
                gate, up = vmul(gate, row_scale), vmul(up, row_scale)
                if bias != 0:
                    gate = vadd(gate, vload(bias + (column + c) * 4))
                    up = vadd(up, vload(bias + (column + c) * 4 + 64))
                write(out + (i * columns + c) * size, vmul(activate(gate), up), 16)

    return put


def _int8_item(tiles: bool, put: Any) -> Any:
    """A function for one work item of int8 weights: up to GEMM_INT8_ROWS rows, two panels."""
    block = _block(tiles)

    @jit
    def item(a, pair, first, end, scratch):
        depth, q_stride = _depth(a), geti(a + _ARGUMENTS.q_stride)
        weights = geti(a + _ARGUMENTS.weights) + pair * 32 * depth
        for r in range(first, end, 32):
            n, q = min(32, end - r), geti(a + _ARGUMENTS.q) + r * q_stride
            block(scratch, q, q_stride, n, weights, 16 * depth)
            put(a, scratch, r, n, pair * 32)

    return item


@jit
def _unpack_panel(a, panel, weights):
    """int8 weights of one panel, of int4 codes."""
    depth, group = _depth(a), geti(a + _ARGUMENTS.group)
    codes = geti(a + _ARGUMENTS.weights) + panel * depth * 8
    factors = geti(a + _ARGUMENTS.factors) + panel * geti(a + _ARGUMENTS.num_groups) * 64
    for i in range(depth // 32):
        _unpack_piece(codes + i * 256, factors + i // group * 64, weights + i * 512)


def _int4_item(tiles: bool, put: Any) -> Any:
    """The same of int4 weights, unpacked to scratch."""
    block = _block(tiles)

    @jit
    def item(a, pair, first, end, scratch):
        depth, q_stride = _depth(a), geti(a + _ARGUMENTS.q_stride)
        weights = scratch + 32 * _SUMS
        _unpack_panel(a, 2 * pair, weights)
        _unpack_panel(a, 2 * pair + 1, weights + 16 * depth)
        for r in range(first, end, 32):
            n, q = min(32, end - r), geti(a + _ARGUMENTS.q) + r * q_stride
            block(scratch, q, q_stride, n, weights, 16 * depth)
            put(a, scratch, r, n, pair * 32)

    return item


def _int4_few_item(tiles: bool, put: Any) -> Any:
    """The same, without unpacking to scratch where there are few rows. A vector must hold a word
    of 16 columns."""
    many, d1, d2 = _int4_item(tiles, put), _unpack_dots(1), _unpack_dots(2)

    @jit
    def few(a, pair, rows, sums):
        pieces, group = _depth(a) // 32, geti(a + _ARGUMENTS.group)
        codes = geti(a + _ARGUMENTS.weights) + pair * pieces * 512
        factors = geti(a + _ARGUMENTS.factors) + pair * geti(a + _ARGUMENTS.num_groups) * 128
        q_stride, r = geti(a + _ARGUMENTS.q_stride), 0
        while r < rows:
            to, q = sums + r * _SUMS, geti(a + _ARGUMENTS.q) + r * q_stride
            if rows - r >= 2:
                d2(to, q, q_stride, codes, factors, group, pieces)
                r += 2
            else:
                d1(to, q, q_stride, codes, factors, group, pieces)
                r += 1

    @jit
    def item(a, pair, first, end, scratch):
        if end <= _FEW:
            few(a, pair, end, scratch)
            put(a, scratch, 0, end, pair * 32)
        else:
            many(a, pair, first, end, scratch)

    return item


@jit(returns=types.int64)
def _depth(a):
    """k in whole steps."""
    return (geti(a + _ARGUMENTS.in_size) + 63) // 64 * 64


def product(variant: str) -> Any:
    """`variant` is "int8-bfloat16-tiles-plain", "int4-float32-vector-silu" and so on.

    With an activation (see `activations`) panels alternate between gate and up, and y is
    activation(gate) * up.
    """
    bits, dtype, unit, activation = variant.split("-")
    tiles, quantize = unit == "tiles", _quantize(dtype)
    put = _store_plain(dtype) if activation == "plain" else _store_gated(dtype, activation)
    few = _int4_few_item if LANES == 16 else _int4_item
    item = (_int8_item if bits == "int8" else few)(tiles, put)

    @jit
    def work(a):
        rows = geti(a + _ARGUMENTS.rows)
        row = take(a + _ARGUMENTS.taken)
        while row < rows:
            quantize(a, row)
            take(a + _ARGUMENTS.done)
            row = take(a + _ARGUMENTS.taken)
        pairs = (geti(a + _ARGUMENTS.out_size) + 31) // 32
        count = pairs * ((rows + _ITEM_ROWS - 1) // _ITEM_ROWS)
        thread = take(a + _ARGUMENTS.thread)
        scratch = geti(a + _ARGUMENTS.scratch) + thread * geti(a + _ARGUMENTS.scratch_size)
        if tiles:
            amx.configure(scratch + 32 * _SUMS - 64, min(rows, 16), min(rows, 16))
        while peek(a + _ARGUMENTS.done) < rows:  # wait for the rows of other threads
            pass
        index = take(a + _ARGUMENTS.counter)
        while index < count:
            first = index // pairs * _ITEM_ROWS
            item(a, index % pairs, first, min(rows, first + _ITEM_ROWS), scratch)
            index = take(a + _ARGUMENTS.counter)
        if tiles:
            amx.release()

    def kernel(a: int) -> None:
        work(a)

    return kernel


def _block(tiles: bool) -> Any:
    """(sums, q, q_stride, rows up to 32, weights, panel): sums of up to 32 rows of a pair."""
    d1, d2, d4 = _dots(1), _dots(2), _dots(_ROWS)
    t1, t2 = _tile_dots(1), _tile_dots(2)

    @jit
    def with_vectors(sums, q, q_stride, rows, weights, panel):
        r = 0
        while r < rows:
            to, line, steps = sums + r * _SUMS, q + r * q_stride, panel // _STEP
            if rows - r >= _ROWS:
                d4(to, line, q_stride, weights, panel, steps)
                r += _ROWS
            elif rows - r >= 2:
                d2(to, line, q_stride, weights, panel, steps)
                r += 2
            else:
                d1(to, line, q_stride, weights, panel, steps)
                r += 1

    @jit
    def with_tiles(sums, q, q_stride, rows, weights, panel):
        if rows > 16:
            t2(sums, q, q_stride, weights, panel, panel // _STEP)
        else:
            t1(sums, q, q_stride, weights, panel, panel // _STEP)

    return with_tiles if tiles else with_vectors
