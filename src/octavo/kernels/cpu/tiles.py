"""Products of small tiles: the two inner loops of attention.

    scores:    S[r, key] = sum over d of Q[r, d] * K[key, d]
    weighted:  O[r, d]   = sum over keys of P[r, key] * V[key, d]

A word is 32 bits: one float32, or two neighbouring bfloat16 of the summed index. K lies as
[words of d][keys], V as [words of keys][d], so that one vector is LANES keys (or dimensions)
of one word, and Q and P are read word by word. K and V come in pieces (blocks of the cache),
each with an address of its own. Each sum runs over its words in order, in float32, so a row's
result depends on nothing but the row. Three kinds of product:

    float32   one fused multiply-add a word
    bfloat16  vdpbf16ps where the processor has it, else two fused multiply-adds a word
    tiles     AMX: 16 rows x 16 keys x 32 deep in one instruction

Measured on a Xeon with AMX, one core: 3.0 TF/s for 2 x 2 tiles with their loads; a tile of 16
keys deep takes as long as one of 32, so V is put together to 32 keys.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.amx import store_tiles, sum_tiles
from octavo.kernels.cpu.simd import (
    HAS_DOT,
    I32,
    I64,
    LANES,
    VF,
    VI,
    call,
    const,
    consti,
    fma,
    jit,
    load,
    loop,
    offset,
    op,
    splat,
    store,
)

# Rows and vectors of a register tile: accumulators, vectors of K and one of Q fit in the
# 32 registers of AVX-512, or in 16.
ROWS, VECTORS = (6, 4) if LANES == 16 else (4, 2)
_ADDRESS = types.int64
Emit = Callable[..., Any]


def _dot(b: Any, half: bool, total: Any, word: Any, vector: Any) -> Any:
    """total + word * vector; of bfloat16 pairs the odd product is added first."""
    if not half:
        return fma(b, splat(b, b.bitcast(word, VF.element)), b.bitcast(vector, VF), total)
    words = splat(b, word)
    if HAS_DOT:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(b, name, VF, total, words, vector)
    odd = consti(-65536)
    total = fma(b, b.bitcast(b.and_(words, odd), VF), b.bitcast(b.and_(vector, odd), VF), total)
    x, y = (b.bitcast(b.shl(v, consti(16)), VF) for v in (words, vector))
    return fma(b, x, y, total)


def _turn(b: Any, half: bool, sums: Any, rows: Any, vectors: Any) -> list[Any]:
    loaded = [load(b, address, VI) for address in vectors]
    out = []
    for r, address in enumerate(rows):
        word = load(b, address, I32)
        out += [
            _dot(b, half, sums[r * len(loaded) + j], word, vector)
            for j, vector in enumerate(loaded)
        ]
    return out


def _store_all(b: Any, sums: Any, base: Any, stride: Any, columns: int) -> None:
    for i, value in enumerate(sums):
        row = b.add(base, b.mul(stride, ir.Constant(I64, i // columns)))
        store(b, value, offset(b, row, i % columns * LANES * 4))


def _rows(b: Any, base: Any, stride: Any, rows: int) -> list[Any]:
    return [b.add(base, b.mul(stride, ir.Constant(I64, r))) for r in range(rows)]


def _scores(half: bool, rows: int) -> Any:
    """S[rows, VECTORS * LANES keys] over all words; keys[j] is the address of LANES keys."""

    def scores(b, s, s_stride, q, q_stride, keys, words, k_stride):
        groups = [load(b, offset(b, keys, 8 * j), I64) for j in range(VECTORS)]
        queries = _rows(b, q, q_stride, rows)

        def turn(i, *sums):
            step, word = b.mul(i, k_stride), b.mul(i, ir.Constant(I64, 4))
            vectors = [b.add(g, step) for g in groups]
            return _turn(b, half, sums, [b.add(x, word) for x in queries], vectors)

        sums = loop(b, words, [const(0.0)] * (rows * VECTORS), turn)
        _store_all(b, sums, s, s_stride, VECTORS)

    return op(types.void, *[_ADDRESS] * 7)(scores)


def _weighted(half: bool, rows: int, columns: int) -> Any:
    """O[rows, columns * LANES] over `pieces` pieces of V of `words` words each."""

    def weighted(b, o, o_stride, p, p_stride, values, pieces, words, v_stride, at):
        weights = _rows(b, p, p_stride, rows)

        def piece(i, *sums):
            base = b.add(load(b, b.add(values, b.mul(i, ir.Constant(I64, 8))), I64), at)
            first = b.mul(i, words)

            def turn(w, *sums):
                word = b.mul(b.add(first, w), ir.Constant(I64, 4))
                start = b.add(base, b.mul(w, v_stride))
                vectors = [offset(b, start, j * LANES * 4) for j in range(columns)]
                return _turn(b, half, sums, [b.add(x, word) for x in weights], vectors)

            return loop(b, words, list(sums), turn)

        sums = loop(b, pieces, [const(0.0)] * (rows * columns), piece)
        _store_all(b, sums, o, o_stride, columns)

    return op(types.void, *[_ADDRESS] * 9)(weighted)


def vector_products(half: bool) -> tuple[Any, Any]:
    """(scores, weighted) for any number of rows, as functions to call from a kernel."""
    s1, s2, s3, s4, s6 = (_scores(half, rows) for rows in (1, 2, 3, 4, ROWS))
    wide = [_weighted(half, rows, VECTORS) for rows in (1, 2, 3, 4, ROWS)]
    thin = [_weighted(half, rows, 1) for rows in (1, 2, 3, 4, ROWS)]
    w1, w2, w3, w4, w6 = wide
    t1, t2, t3, t4, t6 = thin
    most, step = ROWS, LANES * 4

    @jit(returns=types.int64)
    def group(left):
        """Rows to take next: 7 as 4 + 3 and 8 as 4 + 4, not as 6 and a remainder."""
        if left == most or left > most + 2:
            return most
        return 3 if left == 5 else min(left, 4)

    @jit
    def scores(s, s_stride, q, q_stride, rows, keys, groups, words, k_stride):
        r = 0
        while r < rows:
            n = group(rows - r)
            for g in range(0, groups, VECTORS):
                to, at, k = s + r * s_stride + g * step, q + r * q_stride, keys + 8 * g
                if n == 1:
                    s1(to, s_stride, at, q_stride, k, words, k_stride)
                elif n == 2:
                    s2(to, s_stride, at, q_stride, k, words, k_stride)
                elif n == 3:
                    s3(to, s_stride, at, q_stride, k, words, k_stride)
                elif n == 4:
                    s4(to, s_stride, at, q_stride, k, words, k_stride)
                else:
                    s6(to, s_stride, at, q_stride, k, words, k_stride)
            r += n

    @jit
    def weighted(o, o_stride, p, p_stride, rows, values, pieces, words, v_stride, columns):
        r = 0
        while r < rows:
            n = group(rows - r)
            c = 0
            while c < columns:
                to, at, z = o + r * o_stride + c * step, p + r * p_stride, c * step
                if columns - c >= VECTORS:
                    if n == 1:
                        w1(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    elif n == 2:
                        w2(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    elif n == 3:
                        w3(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    elif n == 4:
                        w4(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    else:
                        w6(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    c += VECTORS
                else:
                    if n == 1:
                        t1(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    elif n == 2:
                        t2(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    elif n == 3:
                        t3(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    elif n == 4:
                        t4(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    else:
                        t6(to, o_stride, at, p_stride, values, pieces, words, v_stride, z)
                    c += 1
            r += n

    return scores, weighted


# -- AMX ------------------------------------------------------------------------------------


def _tile_scores(tall: int, wide: int) -> Any:
    def scores(b, s, s_stride, q, q_stride, keys, turns, k_stride):
        groups = [load(b, offset(b, keys, 8 * j), I64) for j in range(wide)]

        def piece(i):
            step = b.mul(i, b.mul(k_stride, ir.Constant(I64, 16)))
            return lambda j: (b.add(groups[j], step), k_stride)

        sum_tiles(b, tall, wide, turns, q, q_stride, piece)
        store_tiles(b, tall, wide, s, s_stride)

    return op(types.void, *[_ADDRESS] * 7)(scores)


def _tile_weighted(tall: int, wide: int) -> Any:
    def weighted(b, o, o_stride, p, p_stride, values, pieces, v_stride, at):
        def piece(i):
            start = load(b, b.add(values, b.mul(i, ir.Constant(I64, 8))), I64)
            return lambda j: (offset(b, b.add(start, at), 64 * j), v_stride)

        sum_tiles(b, tall, wide, pieces, p, p_stride, piece)
        store_tiles(b, tall, wide, o, o_stride)

    return op(types.void, *[_ADDRESS] * 8)(weighted)


def tile_products() -> tuple[Any, Any]:
    """(scores, weighted) on AMX for 1..32 rows, padded to 16 or 32 if above 16."""
    s14, s22 = _tile_scores(1, 4), _tile_scores(2, 2)
    w14, w11, w22, w21 = (_tile_weighted(*shape) for shape in ((1, 4), (1, 1), (2, 2), (2, 1)))

    @jit
    def scores(s, s_stride, q, q_stride, rows, keys, groups, words, k_stride):
        turns = words // 16
        if rows > 16:
            for g in range(0, groups, 2):
                s22(s + 64 * g, s_stride, q, q_stride, keys + 8 * g, turns, k_stride)
        else:
            for g in range(0, groups, 4):
                s14(s + 64 * g, s_stride, q, q_stride, keys + 8 * g, turns, k_stride)

    @jit
    def weighted(o, o_stride, p, p_stride, rows, values, pieces, words, v_stride, columns):
        c = 0
        while c < columns:
            to, at = o + 64 * c, 64 * c
            if rows > 16:
                if columns - c >= 2:
                    w22(to, o_stride, p, p_stride, values, pieces, v_stride, at)
                    c += 2
                else:
                    w21(to, o_stride, p, p_stride, values, pieces, v_stride, at)
                    c += 1
            elif columns - c >= 4:
                w14(to, o_stride, p, p_stride, values, pieces, v_stride, at)
                c += 4
            else:
                w11(to, o_stride, p, p_stride, values, pieces, v_stride, at)
                c += 1

    return scores, weighted
