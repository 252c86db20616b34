"""The softmax of attention: scores of a KV split to weights, and merging splits (see `attention`).

A row's scores occupy SCORE_STRIDE bytes at S of a thread's scratch. Statistics of up to QUERY_ROWS
rows are m [QUERY_ROWS] (the maximum, in base 2), then l [QUERY_ROWS] (the sum of the weights).

Weights are rounded to the type of the products: for int8 codes to int16, by a scale that makes the
row's largest one 32767, and lies behind its scores. It is that of the weights times V's scales: the
keys with the largest weights may have the smallest values.
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
    vlarger,
    vlargest,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vstore2,
    vstore16,
    vstoreh2,
    vsub,
    vsum,
    vtop,
    zero,
)

_STEP = abi.ATTENTION_STEP.offset
_L = abi.QUERY_ROWS * 4  # from m to l
_LOG2E = 1.4426950408889634
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


@jit(returns=types.float32)
def _peak(s, low, high, factor):
    """Mask a row of scores outside low..high-1, up to whole steps; returns its maximum."""
    first, end = low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4  # in vectors
    for v in range(first, (low + LANES - 1) // LANES):
        here = s + v * LANES * 4
        vstore(here, vkeep(vload(here), low - v * LANES, LANES, _NONE))
    for v in range(high // LANES, end):
        here = s + v * LANES * 4
        vstore(here, vkeep(vload(here), 0, high - v * LANES, _NONE))
    t0 = t1 = t2 = t3 = vsplat(_NONE)
    for here in range(s + first * LANES * 4, s + end * LANES * 4, _UNROLL * 4):
        t0, t1 = vmax(vload(here), t0), vmax(vload(here + LANES * 4), t1)
        t2, t3 = vmax(vload(here + LANES * 8), t2), vmax(vload(here + LANES * 12), t3)
    return vtop(vmax(vmax(t0, t1), vmax(t2, t3))) * factor


@jit
def _to_integers(s, first, end, most):
    """Weights in vectors first..end-1, whose largest is `most`, to int16, in place; their scale."""
    factor = vsplat(np.float32(32767.0) / most)
    for v in range(first, end):
        vstore16(s + v * LANES * 2, vmul(vload(s + v * LANES * 4), factor))
    setf(s + abi.SPLIT_KEYS * 4, most / np.float32(32767.0))


def _weights(kind: str, coded: bool) -> Any:
    """kind: of the products (see `tiles`). coded: whether keys and values have scales."""
    integer, half = coded and kind == "int8", kind != "float32"
    size = 2 if half else 4
    exp2 = vexp2_rough if half else vexp2
    put, put_size = (vstoreh2, 2) if half and not integer else (vstore2, 4)

    @jit(returns=Vec)
    def scaled(w, scales, index):
        return vmul(w, vload(scales + index * LANES * 4)) if coded else w

    @jit(returns=Vec)
    def weights(s, low, high, filled, factor, m, scales):
        """Scores to exp2(factor * score - m), in place; 0 outside low..high-1, up to `filled`.
        Returns the sum by lanes: lane i of sum j adds keys i + LANES * (j + 4 n) in order.
        The stored weights include V's scales."""
        first, end = low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4
        slope, shift = vsplat(factor), vsplat(-m)
        t0 = t1 = t2 = t3 = most = vsplat(np.float32(0.0))
        to = s + first * LANES * put_size
        for here in range(s + first * LANES * 4, s + end * LANES * 4, _UNROLL * 4):
            w0 = exp2(vfma(vload(here), slope, shift))
            w1 = exp2(vfma(vload(here + LANES * 4), slope, shift))
            w2 = exp2(vfma(vload(here + LANES * 8), slope, shift))
            w3 = exp2(vfma(vload(here + LANES * 12), slope, shift))
            t0, t1, t2, t3 = vadd(t0, w0), vadd(t1, w1), vadd(t2, w2), vadd(t3, w3)
            v = (here - s) // (LANES * 4)
            w0, w1 = scaled(w0, scales, v), scaled(w1, scales, v + 1)
            w2, w3 = scaled(w2, scales, v + 2), scaled(w3, scales, v + 3)
            put(to, w0, w1)
            put(to + _UNROLL // 2 * put_size, w2, w3)
            to += _UNROLL * put_size
            if integer:
                most = vlarger(most, vlarger(vlarger(w0, w1), vlarger(w2, w3)))
        if integer:
            _to_integers(s, first, end, vlargest(most))
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


def softmax(kind: str, coded: bool) -> Any:
    """The softmax for products of one kind (see `tiles`), over a cache of values or of codes."""
    weights = _weights(kind, coded)
    decoded = coded and kind not in ("int8", "fp8")  # those products apply the scales of K
    size = 4 if kind == "float32" else 2

    @jit
    def tops(scratch, step, stats, first, rows):
        """Mask the scores; m of each row."""
        groups, cap = geti(step + _STEP.groups), getd(step + _STEP.cap)
        scale = getd(step + _STEP.scale)
        factor = np.float32((scale if cap == 0.0 else 1.0) * _LOG2E)
        for r in range(rows):
            high = (first + r) // groups + 1
            low, high = _first_key(step, high), min(high, abi.SPLIT_KEYS)
            row, top = scratch + abi.S + r * abi.SCORE_STRIDE, _NONE
            if low < high:
                if decoded:
                    _scale(row, low, high, scratch + abi.K_SCALES)
                if cap > 0.0:
                    begin, end = low // _UNROLL * 4, (high + _UNROLL - 1) // _UNROLL * 4
                    _soft_cap(row, begin, end, cap, scale / cap)
                top = _peak(row, low, high, factor)
            setf(stats + 4 * r, top)

    @jit
    def softmax(scratch, step, stats, first, rows, filled):
        """Scores of `rows` rows to weights, in place, zeros up to `filled`; m and l of each.

        Row r is query (first + r) // groups, counted so that query i sees the keys up to i. Three
        passes over the rows, so that no row depends on the sum of the previous one.
        """
        tops(scratch, step, stats, first, rows)
        groups, cap = geti(step + _STEP.groups), getd(step + _STEP.cap)
        factor = np.float32((getd(step + _STEP.scale) if cap == 0.0 else 1.0) * _LOG2E)
        sums, scales = scratch + abi.SUMS, scratch + abi.V_SCALES
        for r in range(rows):
            high = (first + r) // groups + 1
            low, high = _first_key(step, high), min(high, abi.SPLIT_KEYS)
            row, total = scratch + abi.S + r * abi.SCORE_STRIDE, vsplat(np.float32(0.0))
            if low < high:
                total = weights(row, low, high, filled, factor, getf(stats + 4 * r), scales)
            else:
                zero(row, filled * size)
                setf(row + abi.SPLIT_KEYS * 4, np.float32(0.0))
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
