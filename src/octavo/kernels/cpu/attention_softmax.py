"""The softmax of attention: scores of a KV split to weights, and merging splits (see `attention`).

A row's scores occupy SCORE_STRIDE bytes at S of a thread's scratch. Statistics of up to QUERY_ROWS
rows are m [QUERY_ROWS] (the maximum, in base 2), then l [QUERY_ROWS] (the sum of the weights).

Weights are stored as the products multiply them (see `tiles`), and times the scales of V. As int16
they are integers already: m is chosen so that the largest product of weight and scale is almost
32767, not the largest weight, because the keys with the largest weights may have the smallest
values. It is found in the pass over the scores, by logarithms: an upper bound, 6% too large at
most. l, o and the merging of splits take any m alike. The scale of a row of Q in int16 follows its
scores.
"""

from typing import Any

import numpy as np
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import (
    LANES,
    Vec,
    getd,
    getf,
    geti,
    jit,
    setf,
    vadd,
    vdiv,
    vexp2,
    vexp2_rough,
    vfma,
    vkeep,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vstore2,
    vstore16x2,
    vstoreh2,
    vsub,
    vsum,
    vtop,
    zero,
)

_STEP = abi.ATTENTION_STEP.offset
_L = abi.QUERY_ROWS * 4  # from m to l
_LOG2E = 1.4426950408889634
_LOG2_MOST = 14.99  # of the largest weight in int16, which is known to 0.5%
_ROUNDER = np.float32(1.5 * 2**23)  # a sum with it has a unit of 1
_NONE = np.float32(-1e30)  # below any score; finite, so that two of them can be subtracted
_ONE = np.float32(1.0)
_UNROLL = 4 * LANES  # keys of a step of the loops over a row


@jit
def _soft_cap(s, first, end, cap, factor):
    """s = cap * tanh(s * factor), with factor = scale / cap, in vectors first..end-1."""
    one, two = vsplat(_ONE), vsplat(np.float32(2.0))
    limit, most = vsplat(np.float32(factor * 2.0 * _LOG2E)), vsplat(np.float32(100.0))
    for v in range(first, end):
        here = s + v * LANES * 4
        power = vexp2(vmin(vmul(vload(here), limit), most))  # e^2x; tanh x = 1 - 2 / (e^2x + 1)
        tanh = vsub(one, vdiv(two, vadd(power, one)))
        vstore(here, vmul(tanh, vsplat(np.float32(cap))))


@jit
def _mask(s, low, high, first, end):
    """Mask a row of scores outside low..high-1, in vectors first..end-1."""
    for v in range(first, (low + LANES - 1) // LANES):
        here = s + v * LANES * 4
        vstore(here, vkeep(vload(here), low - v * LANES, LANES, _NONE))
    for v in range(high // LANES, end):
        here = s + v * LANES * 4
        vstore(here, vkeep(vload(here), 0, high - v * LANES, _NONE))


def _peak(integer: bool) -> Any:
    @jit(returns=types.float32)
    def peak(s, low, high, factor, logs):
        """Mask a row of scores, up to whole steps; returns m: the maximum times `factor`, or what
        makes the weights times V's scales at most 32767."""
        first, end = low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4  # in vectors
        _mask(s, low, high, first, end)
        slope = vsplat(factor)
        t0 = t1 = t2 = t3 = vsplat(_NONE)
        for i in range(first * LANES * 4, end * LANES * 4, _UNROLL * 4):
            here, log = s + i, logs + i
            s0, s1 = vload(here), vload(here + LANES * 4)
            s2, s3 = vload(here + LANES * 8), vload(here + LANES * 12)
            if integer:
                s0, s1 = vfma(s0, slope, vload(log)), vfma(s1, slope, vload(log + LANES * 4))
                s2 = vfma(s2, slope, vload(log + LANES * 8))
                s3 = vfma(s3, slope, vload(log + LANES * 12))
            t0, t1, t2, t3 = vmax(s0, t0), vmax(s1, t1), vmax(s2, t2), vmax(s3, t3)
        top = vtop(vmax(vmax(t0, t1), vmax(t2, t3)))
        if integer:  # with room for the rounding of scores, which are as exact as their size
            return top - np.float32(_LOG2_MOST) + abs(top) * np.float32(2.0**-21)
        return top * factor

    return peak


def _weights(kind: str, coded: bool) -> Any:
    """kind: of the products (see `tiles`). coded: whether keys and values have scales."""
    integer, half = kind == "int16", kind != "float32"
    size = 2 if half else 4
    exp2 = vexp2_rough if half else vexp2
    put = vstore16x2 if integer else vstoreh2 if half else vstore2

    @jit(returns=Vec)
    def stored(w, scales, index):
        """A vector of weights as `put` takes it."""
        if not coded:
            return w
        scale = vload(scales + index * LANES * 4)
        return vfma(w, scale, vsplat(_ROUNDER)) if integer else vmul(w, scale)

    @jit(returns=Vec)
    def weights(s, low, high, filled, factor, m, scales):
        """Scores to exp2(factor * score - m), in place; 0 outside low..high-1, up to `filled`.
        Returns the sum by lanes: lane i of sum j adds keys i + LANES * (j + 4 n) in order.
        The stored weights include V's scales."""
        first, end = low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4
        slope, shift = vsplat(factor), vsplat(-m)
        t0 = t1 = t2 = t3 = vsplat(np.float32(0.0))
        to = s + first * LANES * size
        for here in range(s + first * LANES * 4, s + end * LANES * 4, _UNROLL * 4):
            w0 = exp2(vfma(vload(here), slope, shift))
            w1 = exp2(vfma(vload(here + LANES * 4), slope, shift))
            w2 = exp2(vfma(vload(here + LANES * 8), slope, shift))
            w3 = exp2(vfma(vload(here + LANES * 12), slope, shift))
            t0, t1, t2, t3 = vadd(t0, w0), vadd(t1, w1), vadd(t2, w2), vadd(t3, w3)
            v = (here - s) // (LANES * 4)
            put(to, stored(w0, scales, v), stored(w1, scales, v + 1))
            put(to + _UNROLL // 2 * size, stored(w2, scales, v + 2), stored(w3, scales, v + 3))
            to += _UNROLL * size
        if first > 0:
            zero(s, first * LANES * size)
        if end * LANES < filled:
            zero(s + end * LANES * size, (filled - end * LANES) * size)
        return vadd(vadd(t0, t1), vadd(t2, t3))

    return weights


@jit
def _scale(s, low, high, scales):
    """Scores of codes times the scales of K."""
    for v in range(low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4):
        here = s + v * LANES * 4
        vstore(here, vmul(vload(here), vload(scales + v * LANES * 4)))


@jit(returns=types.int64)
def _first_key(step, end):
    """The first key visible to a query whose last visible key is end - 1."""
    window = geti(step + _STEP.window)
    return max(0, end - window) if window > 0 else 0


def softmax(kind: str, coded: bool, scaled: bool) -> Any:
    """The softmax for products of one kind (see `tiles`), over a cache of values or of codes.

    scaled: the scores of codes come multiplied by the scales of K.
    """
    integer = kind == "int16"
    weights, peak = _weights(kind, coded), _peak(integer)
    size = 4 if kind == "float32" else 2

    @jit(returns=types.float32)
    def slope_of(step, row):
        """What scores are multiplied by: those of rows of int16 have no scale yet."""
        of_row = getf(row + abi.SPLIT_KEYS * 4) if integer else _ONE
        return np.float32(getd(step + _STEP.scale) * of_row)

    @jit(returns=types.float32)
    def factor_of(step, row):
        """What the scores of the softmax are multiplied by, for a base of 2."""
        scale = slope_of(step, row) if getd(step + _STEP.cap) == 0.0 else _ONE
        return np.float32(scale * _LOG2E)

    @jit
    def tops(scratch, step, stats, first, rows):
        """Mask the scores; m of each row."""
        groups, cap = geti(step + _STEP.groups), getd(step + _STEP.cap)
        for r in range(rows):
            high = (first + r) // groups + 1
            low, high = _first_key(step, high), min(high, abi.SPLIT_KEYS)
            row, top = scratch + abi.S + r * abi.SCORE_STRIDE, _NONE
            if low < high:
                if coded and not scaled:
                    _scale(row, low, high, scratch + abi.K_SCALES)
                if cap > 0.0:
                    begin, end = low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4
                    _soft_cap(row, begin, end, cap, slope_of(step, row) / cap)
                top = peak(row, low, high, factor_of(step, row), scratch + abi.V_LOGS)
            setf(stats + 4 * r, top)

    @jit
    def softmax(scratch, step, stats, first, rows, filled):
        """Scores of `rows` rows to weights, in place, zeros up to `filled`; m and l of each.

        Row r is query (first + r) // groups, counted so that query i sees the keys up to i. Three
        passes over the rows, so that no row depends on the sum of the previous one.
        """
        tops(scratch, step, stats, first, rows)
        groups = geti(step + _STEP.groups)
        sums, scales = scratch + abi.SUMS, scratch + abi.V_SCALES
        for r in range(rows):
            high = (first + r) // groups + 1
            low, high = _first_key(step, high), min(high, abi.SPLIT_KEYS)
            row, total = scratch + abi.S + r * abi.SCORE_STRIDE, vsplat(np.float32(0.0))
            if low < high:
                factor, m = factor_of(step, row), getf(stats + 4 * r)
                total = weights(row, low, high, filled, factor, m, scales)
                if integer:
                    total = vadd(total, vload(scratch + abi.V_BROKEN))
            else:
                zero(row, filled * size)
            vstore(sums + r * LANES * 4, total)
        for r in range(rows):
            setf(stats + _L + 4 * r, vsum(vload(sums + r * LANES * 4)))

    return softmax


@jit
def init_accumulators(o, stats, rows, dim):
    """o [rows, dim], m and l of rows with no visible key, by QUERY_ROWS rows of statistics."""
    zero(o, rows * dim * 4)
    for first in range(0, rows, abi.QUERY_ROWS):
        here, n = stats + first * 8, min(abi.QUERY_ROWS, rows - first)
        zero(here + _L, n * 4)
        for r in range(n):
            setf(here + 4 * r, _NONE)


@jit
def join(o, stats, new_o, new_stats, rows, dim, factors):
    """Merge a KV split (new_...) into the accumulators of up to QUERY_ROWS rows.

    A row without visible keys so far, or in this split, has l = 0, o = 0 and the smallest m.
    factors: scratch for two float32 per row.
    """
    for i in range(0, rows * 4, LANES * 4):
        m, l = stats + i, stats + _L + i  # noqa: E741
        old, new = vload(m), vload(new_stats + i)
        top = vmax(old, new)
        a, b = vexp2(vsub(old, top)), vexp2(vsub(new, top))
        vstore(factors + i, a)
        vstore(factors + _L + i, b)
        vstore(m, top)
        vstore(l, vfma(vload(l), a, vmul(vload(new_stats + _L + i), b)))
    for r in range(rows):
        a, b = vsplat(getf(factors + 4 * r)), vsplat(getf(factors + _L + 4 * r))
        for i in range(r * dim * 4, (r + 1) * dim * 4, LANES * 4):
            vstore(o + i, vfma(vload(o + i), a, vmul(vload(new_o + i), b)))
