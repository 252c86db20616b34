"""Dense products y = x W^T + b in bfloat16 on AMX, with a row's bits its own.

    y[r, n] = sum over k of x[r, k] * W[n, k] + b[n]

Each sum runs over k in steps of 32, in order, in float32, whatever the number of rows, threads
or columns taken together; so a row depends on nothing but itself. W lies as [N / 32][K / 32] of
two tiles of 16 words (pairs along k) x 16 columns: what one turn reads is 2 KB without a gap,
and a block of 32 columns is read front to back.

Up to 16 rows the work is to read W, and 4 tiles of columns share one tile of x. Above, 2 x 2
tiles: a block of W comes from memory for its first 32 rows and from a cache for the others.

`gated`: columns are [16 of gate | 16 of up] in turn, and 16 of silu(gate) * up are stored.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi as at
from octavo.kernels.cpu import amx
from octavo.kernels.cpu.simd import (
    I8,
    I16,
    I64,
    VF,
    call,
    copy,
    geti,
    jit,
    load,
    loop,
    offset,
    op,
    pointer,
    stack,
    store,
    take,
    vadd,
    vdiv,
    vexp2,
    vload,
    vmin,
    vmul,
    vsplat,
    vstoreh,
)  # fmt: skip

_LOG2E = 1.4426950408889634


def _product(tall: int, wide: int) -> Any:
    """c [16 * tall, 16 * wide] float32 over `turns` of 32 along k; w: the first of its blocks."""

    def product(b, c, c_stride, x, x_stride, w, turns):
        next_block = b.mul(turns, ir.Constant(I64, 2048))
        line = ir.Constant(I64, 64)

        def piece(i):
            here = b.add(w, b.mul(i, ir.Constant(I64, 2048)))
            blocks = [here, b.add(here, next_block)]
            return lambda j: (pointer(b, offset(b, blocks[j // 2], j % 2 * 1024), I8), line)

        amx.sum_tiles(b, tall, wide, turns, x, x_stride, piece)
        amx.store_tiles(b, tall, wide, c, c_stride)

    return op(types.void, *[types.int64] * 6)(product)


@op(types.void, *[types.int64] * 5)
def _put_rows(b, to, stride, c, c_stride, rows):
    """`rows` rows of 32 floats of c as bfloat16, one line of memory each."""

    def row(i):
        here = b.add(c, b.mul(i, c_stride))
        low, high = (load(b, offset(b, here, 64 * j), VF) for j in (0, 1))
        name, both = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(I16, 32)
        store(b, call(b, name, both, high, low), b.add(to, b.mul(i, stride)))
        return []

    loop(b, rows, [], row)


def _stores(gated: bool) -> Any:
    """A function that stores a block of c: `rows` rows from `row` on, 32 columns."""
    spare = stack(64)

    @jit
    def put_gated(a, c, c_stride, row, rows, block):
        one, most = vsplat(np.float32(1.0)), vsplat(np.float32(100.0))
        to = geti(a + at.L_OUT) + row * geti(a + at.L_OUT_STRIDE) + block * 32
        for _ in range(rows):
            gate = vload(c)
            power = vexp2(vmin(vmul(gate, vsplat(np.float32(-_LOG2E))), most))
            vstoreh(to, vmul(vdiv(gate, vadd(one, power)), vload(c + 64)))
            c += c_stride
            to += geti(a + at.L_OUT_STRIDE)

    @jit
    def put(a, c, c_stride, row, rows, block):
        bias, stride = geti(a + at.L_BIAS), geti(a + at.L_OUT_STRIDE)
        columns = min(32, geti(a + at.L_COLUMNS) - block * 32)
        to = geti(a + at.L_OUT) + row * stride + block * 64
        if bias == 0 and columns == 32:
            _put_rows(to, stride, c, c_stride, rows)
            return
        for _ in range(rows):
            for n in range(0, columns, 16):
                value = vload(c + 4 * n)
                if bias != 0:
                    value = vadd(value, vload(bias + 4 * (block * 32 + n)))
                if n + 16 <= columns:
                    vstoreh(to + 2 * n, value)
                else:
                    room = spare()
                    vstoreh(room, value)
                    copy(to + 2 * n, room, 2 * (columns - n))
            c += c_stride
            to += stride

    return put_gated if gated else put


def linear(kind: str) -> Any:
    """The kernel for "plain" or "gated"."""
    p14, p12, p22 = _product(1, 4), _product(1, 2), _product(2, 2)
    put = _stores(kind == "gated")
    room = stack(64 + 4096 + 64)

    @jit
    def few(a, rows, block, end, c):
        """Up to 16 rows over the blocks of an item."""
        x, stride, turns = geti(a + at.L_X), geti(a + at.L_X_STRIDE), geti(a + at.L_TURNS)
        while block < end:
            w = geti(a + at.L_W) + block * turns * 2048
            if block + 1 < end:
                p14(c, 256, x, stride, w, turns)
                put(a, c + 128, 256, 0, rows, block + 1)
            else:
                p12(c, 256, x, stride, w, turns)
            put(a, c, 256, 0, rows, block)
            block += 2

    @jit
    def many(a, first, last, block, end, c, config):
        """Rows first..last-1 over the blocks of an item, 32 x 32 at a time."""
        x, stride, turns = geti(a + at.L_X), geti(a + at.L_X_STRIDE), geti(a + at.L_TURNS)
        for block in range(block, end):  # noqa: B020
            w = geti(a + at.L_W) + block * turns * 2048
            for row in range(first, last - 31, 32):
                p22(c, 128, x + row * stride, stride, w, turns)
                put(a, c, 128, row, 32, block)
            left = (last - first) % 32
            if left > 16:
                amx.configure(config, 16, left - 16)
                p22(c, 128, x + (last - left) * stride, stride, w, turns)
            elif left > 0:
                amx.configure(config, left, left)
                p12(c, 128, x + (last - left) * stride, stride, w, turns)
            if left > 0:
                put(a, c, 128, last - left, left, block)
                amx.configure(config, 16, 16)

    @jit
    def work(a):
        config = (room() + 63) // 64 * 64
        rows, blocks = geti(a + at.L_ROWS), geti(a + at.L_BLOCKS)
        tall, wide = geti(a + at.L_TALL), geti(a + at.L_WIDE)
        across = (blocks + wide - 1) // wide
        count = (rows + tall - 1) // tall * across
        amx.configure(config, min(rows, 16), min(rows, 16))
        index = take(a)
        while index < count:
            row, block = index // across * tall, index % across * wide
            end = min(block + wide, blocks)
            if rows <= 16:
                few(a, rows, block, end, config + 64)
            else:
                many(a, row, min(row + tall, rows), block, end, config + 64, config)
            index = take(a)
        amx.release()

    def linear(a: int) -> None:
        work(a)

    return linear
