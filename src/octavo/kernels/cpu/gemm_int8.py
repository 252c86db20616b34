"""Products of weights in int8 or int4 with rows that are rounded to int8 on the way.

    q[r, k] = round(x[r, k] / s[r]),  s[r] = max over k of |x[r, k]| / 127
    y[r, n] = (sum over k of q[r, k] w[n, k]) * scale[n] * s[r] + bias[n]

The sum is one of integers, so it is exact in whatever order and on whatever unit it is formed: a
row's bits depend on nothing but the row. int4 is int8 told in fewer bits: a code c of 0 to 15 in
a group of 32 or more k stands for w = (c * m + o) >> 8, with 16-bit integers m and o per group
and column. Weights are told once per 256 rows and stay in the cache meanwhile.

q is stored with 128 added, because the instructions multiply unsigned with signed bytes; what
that adds to a sum, 128 times the sum of a column's weights, is taken away at the end.

Layouts (see `gemm_int8_call.pack`): columns in panels of 16, two of which are an item of work; k in
steps of 64. A panel's step is 16 words of 4 k for each of its columns: one tile of AMX, or 16
vectors of 16 columns. Four k that follow one another lie in one word, as dot products want them.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi as at
from octavo.kernels.cpu import amx
from octavo.kernels.cpu.fused import _memory as memory
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
    pointer,
    setf,
    splat,
    store,
    take,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vsum,
    vtop,
    zero,
)  # fmt: skip

_ADDRESS = types.int64
_LOG2E = 1.4426950408889634
_PARTS = 16 // LANES  # vectors of a panel's word
_ROWS = 4 if LANES == 16 else 2  # rows whose sums fit the registers
_FEW = 4  # rows
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
    wide = ir.VectorType(I16, 2 * LANES)
    eight, low = (ir.Constant(wide, [v] * 2 * LANES) for v in (8, 255))
    x, w = b.bitcast(unsigned, wide), b.bitcast(signed, wide)
    for one, two in ((b.and_(x, low), b.ashr(b.shl(w, eight), eight)),
                     (b.lshr(x, eight), b.ashr(w, eight))):  # fmt: skip
        total = b.add(total, _pair_sums(b, one, two))
    return total


def _pair_sums(b: Any, x: Any, y: Any) -> Any:
    """x[2i] y[2i] + x[2i + 1] y[2i + 1] of int16 in int32, a form that LLVM knows (pmaddwd)."""
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
    turns = 2 if rows == 1 else 1  # sums of even and of odd words, so that none waits for another

    def dots(b, sums, q, q_stride, weights, panel, steps):
        starts = [b.add(q, b.mul(q_stride, ir.Constant(I64, r))) for r in range(rows)]
        bases = [b.add(weights, b.mul(panel, ir.Constant(I64, p))) for p in range(2)]

        def turn(i, *carried):
            totals = list(carried)
            at_q, at_w = (b.mul(i, ir.Constant(I64, n)) for n in (64, _STEP))
            lines = [b.add(start, at_q) for start in starts]
            for word in range(16):
                held = [
                    load(b, offset(b, b.add(base, at_w), 64 * word + 4 * LANES * part), VI)
                    for base in bases
                    for part in range(_PARTS)
                ]
                for r, line in enumerate(lines):
                    x = splat(b, load(b, offset(b, line, 4 * word), I32))
                    for v, w in enumerate(held):
                        index = (word % turns * rows + r) * vectors + v
                        totals[index] = _dot(b, totals[index], x, w)
            return totals

        totals = loop(b, steps, [consti(0)] * (turns * rows * vectors), turn)
        for r in range(rows):
            for v in range(vectors):
                total = totals[r * vectors + v]
                if turns == 2:
                    total = b.add(total, totals[(rows + r) * vectors + v])
                store(b, total, offset(b, sums, r * _SUMS + v * 4 * LANES))

    return op(types.void, *[_ADDRESS] * 6)(dots)


def _tile_dots(tall: int) -> Any:
    """sums[16 * tall, 32] on AMX."""

    def dots(b, sums, q, q_stride, weights, panel, steps):
        def piece(i):
            here = b.add(weights, b.mul(i, ir.Constant(I64, _STEP)))
            places = [b.add(here, b.mul(panel, ir.Constant(I64, p))) for p in range(2)]
            return lambda p: (pointer(b, places[p], I8), ir.Constant(I64, 64))

        amx.sum_tiles(b, tall, 2, steps, q, q_stride, piece, "tdpbusd")
        amx.store_tiles(b, tall, 2, sums, ir.Constant(I64, _SUMS))

    return op(types.void, *[_ADDRESS] * 6)(dots)


def _told(b: Any, word: Any, m: Any, o: Any) -> tuple[Any, Any]:
    """int8 of two words of 16 columns, of 64 bytes of codes: each of 16 bits has four, two k of
    either word."""
    eight, mask, top = (ir.Constant(_WORDS, [v] * 32) for v in (8, 15, 0xFF00))
    told = []
    for shift in (0, 4, 8, 12):
        code = b.lshr(word, ir.Constant(_WORDS, [shift] * 32)) if shift else word
        code = b.and_(code, mask) if shift < 12 else code
        told.append(b.add(b.mul(code, m), o))
    one, two = (b.or_(b.lshr(told[i], eight), b.and_(told[i + 1], top)) for i in (0, 2))
    return one, two


def _factors(b: Any, address: Any) -> tuple[Any, Any]:
    """(m, o) of 16 columns, each twice."""
    both = b.load(pointer(b, address, _PAIRS), align=4)
    sixteen, low16 = (ir.Constant(_PAIRS, [v] * 16) for v in (16, 0xFFFF))
    low, high = b.and_(both, low16), b.lshr(both, sixteen)
    m, o = (b.bitcast(b.or_(v, b.shl(v, sixteen)), _WORDS) for v in (low, high))
    return m, o


@op(types.void, *[_ADDRESS] * 3)
def _tell(b, codes, factors, weights):
    """int8 of 32 k of a panel, from 256 bytes of codes and a word (m, o) of each column."""
    m, o = _factors(b, factors)
    for quarter in range(4):
        word = load(b, offset(b, codes, 64 * quarter), _WORDS)
        for half, told in enumerate(_told(b, word, m, o)):
            store(b, told, offset(b, weights, 128 * quarter + 64 * half))


def _told_dots(rows: int) -> Any:
    """As `_dots`, but of codes, each word of weights used where it is told: for few rows.

    panel, factor_panel: bytes to the next panel's. each: pieces of 32 k in a group.
    """

    def dots(b, sums, q, q_stride, codes, panel, factors, factor_panel, each, pieces):
        starts = [b.add(q, b.mul(q_stride, ir.Constant(I64, r))) for r in range(rows)]

        def piece(i, *carried):
            totals = list(carried)
            lines = [b.add(start, b.mul(i, ir.Constant(I64, 32))) for start in starts]
            at_codes = b.add(codes, b.mul(i, ir.Constant(I64, 256)))
            at_factors = b.add(factors, b.mul(b.udiv(i, each), ir.Constant(I64, 64)))
            for p in range(2):
                second = ir.Constant(I64, p)
                m, o = _factors(b, b.add(at_factors, b.mul(factor_panel, second)))
                here = b.add(at_codes, b.mul(panel, second))
                for quarter in range(4):
                    word = load(b, offset(b, here, 64 * quarter), _WORDS)
                    for half, told in enumerate(_told(b, word, m, o)):
                        held = b.bitcast(told, VI)
                        for r, line in enumerate(lines):
                            place = offset(b, line, 4 * (2 * quarter + half))
                            x = splat(b, load(b, place, I32))
                            totals[2 * r + p] = _dot(b, totals[2 * r + p], x, held)
            return totals

        totals = loop(b, pieces, [consti(0)] * (2 * rows), piece)
        for r in range(rows):
            for p in range(2):
                store(b, totals[2 * r + p], offset(b, sums, r * _SUMS + 64 * p))

    return op(types.void, *[_ADDRESS] * 9)(dots)


@op(Vec, Vec)
def _vabs(b, x):
    return b.bitcast(b.and_(b.bitcast(x, VI), consti(0x7FFFFFFF)), VF)


@op(types.void, _ADDRESS, Vec)
def _store_rounded(b, address, value):
    """round(value) + 128 of each lane, as bytes."""
    bits = b.bitcast(b.fadd(value, const(_ROUNDER)), VI)
    store(b, b.trunc(bits, ir.VectorType(I8, LANES)), address)


@op(Vec, _ADDRESS, _ADDRESS)
def _sums_as_floats(b, sums, added):
    return b.sitofp(b.add(load(b, sums, VI), load(b, added, VI)), VF)


@op(types.int64, _ADDRESS)
def _peek(b, address):
    return b.load_atomic(pointer(b, address, I64), "acquire", 8)


def product(variant: str) -> Any:
    """`variant` is "int8-bfloat16-tiles-plain", "int4-float32-vector-gated" and so on.

    gated: panels of gate and of up in turn; y is silu(gate) * up.
    """
    bits, dtype, unit, gated = variant.split("-")
    size, read, write = memory(dtype == "bfloat16")
    told, tiles = bits == "int4", unit == "tiles"
    # A vector must hold a word of 16 columns; with more rows it is better to tell them once.
    at_once = _FEW if told and LANES == 16 else 0
    block, few = _block(tiles), _few() if at_once else _block(tiles)

    @jit
    def quantize(a, r):
        x, n = geti(a + at.Q_X) + r * geti(a + at.Q_X_STRIDE), geti(a + at.Q_IN)
        top = poison = none = vsplat(np.float32(0.0))
        for i in range(0, n, LANES):
            value = read(x + i * size, n - i)
            top, poison = vmax(_vabs(value), top), vfma(value, none, poison)
        most = vtop(top)
        factor = np.float32(0.0)
        if most > _SMALLEST:
            factor = np.float32(127.0) / most
        # Infinities and NaN make a row NaN, as they do in a sum of floats.
        setf(geti(a + at.Q_S) + r * 4, most / np.float32(127.0) + vsum(poison))
        q, factors = geti(a + at.Q_Q) + r * geti(a + at.Q_Q_STRIDE), vsplat(factor)
        for i in range(0, n, LANES):
            _store_rounded(q + i, vmul(read(x + i * size, n - i), factors))
        zero(q + n, (n + 63) // 64 * 64 - n)  # there weights may be anything

    @jit
    def tell(a, panel, weights, depth):
        """int8 weights of one panel, of int4 codes."""
        groups, each = geti(a + at.Q_NUM_GROUPS), geti(a + at.Q_GROUP)
        codes = geti(a + at.Q_WEIGHTS) + panel * depth * 8
        factors = geti(a + at.Q_FACTORS) + panel * groups * 64
        for i in range(depth // 32):
            _tell(codes + i * 256, factors + i // each * 64, weights + i * 512)

    @jit
    def finish(a, sums, r, n, column):
        """sums[n, 32] of rows r.. and columns column.. as values of y."""
        columns, scale = geti(a + at.Q_OUT_SIZE), geti(a + at.Q_SCALES) + column * 4
        added, bias = geti(a + at.Q_ADDED) + column * 4, geti(a + at.Q_BIAS)
        out = geti(a + at.Q_OUT) + (r * columns + column) * size
        for i in range(n):
            mine = vsplat(getf(geti(a + at.Q_S) + (r + i) * 4))
            for c in range(0, min(32, columns - column), LANES):
                value = _sums_as_floats(sums + i * _SUMS + c * 4, added + c * 4)
                value = vmul(vmul(value, vload(scale + c * 4)), mine)
                if bias != 0:
                    value = vadd(value, vload(bias + (column + c) * 4))
                write(out + (i * columns + c) * size, value, columns - column - c)

    @jit
    def finish_gated(a, sums, r, n, column):
        """silu(gate) * up of sums[n, 16 of gate and 16 of up]."""
        scale, added = geti(a + at.Q_SCALES) + column * 4, geti(a + at.Q_ADDED) + column * 4
        columns, bias = geti(a + at.Q_OUT_SIZE) // 2, geti(a + at.Q_BIAS)
        out = geti(a + at.Q_OUT) + (r * columns + column // 2) * size
        one, limit = vsplat(np.float32(1.0)), vsplat(np.float32(100.0))
        for i in range(n):
            mine = vsplat(getf(geti(a + at.Q_S) + (r + i) * 4))
            for c in range(0, 16, LANES):
                here = sums + i * _SUMS + c * 4
                gate = vmul(_sums_as_floats(here, added + c * 4), vload(scale + c * 4))
                up = vmul(_sums_as_floats(here + 64, added + 64 + c * 4), vload(scale + 64 + c * 4))
                gate, up = vmul(gate, mine), vmul(up, mine)
                if bias != 0:
                    gate = vadd(gate, vload(bias + (column + c) * 4))
                    up = vadd(up, vload(bias + (column + c) * 4 + 64))
                power = vexp2(vmin(vmul(gate, vsplat(np.float32(-_LOG2E))), limit))
                value = vmul(vdiv(gate, vadd(one, power)), up)
                write(out + (i * columns + c) * size, value, 16)

    put = finish_gated if gated == "gated" else finish

    @jit
    def item(a, index, scratch):
        depth = (geti(a + at.Q_IN) + 63) // 64 * 64
        pairs = (geti(a + at.Q_OUT_SIZE) + 31) // 32
        pair, first = index % pairs, index // pairs * at.Q_ROWS
        rows = min(geti(a + at.ROWS), first + at.Q_ROWS)
        sums, weights = scratch, geti(a + at.Q_WEIGHTS) + pair * 32 * depth
        stride = geti(a + at.Q_Q_STRIDE)
        if at_once > 0:  # noqa: SIM102  # a constant: without it nothing here is compiled
            if rows <= at_once:
                groups, each = geti(a + at.Q_NUM_GROUPS), geti(a + at.Q_GROUP)
                codes = geti(a + at.Q_WEIGHTS) + pair * depth * 16
                factors = geti(a + at.Q_FACTORS) + pair * groups * 128
                q, last = geti(a + at.Q_Q), depth // 32
                few(sums, q, stride, rows, codes, depth * 8, factors, groups * 64, each, last)
                put(a, sums, 0, rows, pair * 32)
                return
        if told:
            weights = scratch + 32 * _SUMS
            tell(a, 2 * pair, weights, depth)
            tell(a, 2 * pair + 1, weights + 16 * depth, depth)
        for r in range(first, rows, 32):
            n = min(32, rows - r)
            block(sums, geti(a + at.Q_Q) + r * stride, stride, n, weights, 16 * depth)
            put(a, sums, r, n, pair * 32)

    @jit
    def work(a):
        rows = geti(a + at.ROWS)
        row = take(a + at.Q_TAKEN)
        while row < rows:
            quantize(a, row)
            take(a + at.Q_DONE)
            row = take(a + at.Q_TAKEN)
        pairs = (geti(a + at.Q_OUT_SIZE) + 31) // 32
        items = pairs * ((rows + at.Q_ROWS - 1) // at.Q_ROWS)
        scratch = geti(a + at.Q_SCRATCH) + take(a + at.Q_THREAD) * geti(a + at.Q_SCRATCH_SIZE)
        if tiles:
            amx.configure(scratch + 32 * _SUMS - 64, min(rows, 16), min(rows, 16))
        while _peek(a + at.Q_DONE) < rows:  # those that other threads took
            pass
        index = take(a + at.COUNTER)
        while index < items:
            item(a, index, scratch)
            index = take(a + at.COUNTER)
        if tiles:
            amx.release()

    def kernel(a: int) -> None:
        work(a)

    return kernel


def _few() -> Any:
    """Sums of up to `_FEW` rows of a pair of panels of codes; see `_told_dots`."""
    d1, d2 = _told_dots(1), _told_dots(2)

    @jit
    def few(sums, q, stride, rows, codes, panel, factors, factor_panel, each, pieces):
        r = 0
        while r < rows:
            to, line = sums + r * _SUMS, q + r * stride
            if rows - r >= 2:
                d2(to, line, stride, codes, panel, factors, factor_panel, each, pieces)
                r += 2
            else:
                d1(to, line, stride, codes, panel, factors, factor_panel, each, pieces)
                r += 1

    return few


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
