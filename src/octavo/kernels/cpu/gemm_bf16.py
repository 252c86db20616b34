"""GEMM y = x W^T + b in bfloat16 on AMX, batch-invariant by construction.

    y[r, n] = sum over k of x[r, k] * W[n, k] + b[n]

Each sum runs over k in steps of 32, in order, in float32, whatever the number of rows, threads
or columns computed together; so a row's result depends only on the row. W is stored as
[N / 32][K / 32] of two tiles of 16 words (pairs along k) x 16 columns: one step reads 2 contiguous
KB, and a block of 32 columns is read sequentially.

Up to 16 rows the GEMM is bound by reading W, and 4 tiles of columns share one tile of x. Above,
2 x 2 tiles are used: a block of W comes from memory for the first 32 rows, from a cache for others.

Variants: "plain"; or an activation of `activations`. Then columns are [16 of gate | 16 of up]
alternately, and 16 of activation(gate) * up are stored.
"""

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi, amx
from octavo.kernels.cpu.activations import activated
from octavo.kernels.cpu.simd import (
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
    stack,
    store,
    take,
    vadd,
    vload,
    vmul,
    vstoreh,
)

_ARGUMENTS = abi.GEMM_BF16.offset
_BLOCK_STEP = 2048  # bytes of a block of W in one step of k


def _product(height: int, width: int) -> Any:
    """c [16 * height, 16 * width] float32 over `k_steps` of 32; w: the first of its blocks."""

    def product(b, c, c_stride, x, x_stride, w, k_steps):
        next_block = b.mul(k_steps, I64(_BLOCK_STEP))

        def right(i):
            here = b.add(w, b.mul(i, I64(_BLOCK_STEP)))
            blocks = [here, b.add(here, next_block)]
            return lambda j: (offset(b, blocks[j // 2], j % 2 * 1024), I64(64))

        amx.sum_tiles(b, height, width, k_steps, x, x_stride, right)
        amx.store_tiles(b, height, width, c, c_stride)

    return op(types.void, *[types.int64] * 6)(product)


@op(types.void, *[types.int64] * 5)
def _store_rows(b, to, stride, c, c_stride, rows):
    """`rows` rows of 32 floats of c as bfloat16, one line of memory each."""

    def row(i):
        here = b.add(c, b.mul(i, c_stride))
        low, high = (load(b, offset(b, here, 64 * j), VF) for j in (0, 1))
        name, both = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(I16, 32)
        store(b, call(b, name, both, high, low), b.add(to, b.mul(i, stride)))
        return []

    loop(b, rows, [], row)


def _store_gated(activation: str) -> Any:
    """A function that stores `rows` rows from `row` on of activation(gate) * up of a block."""
    activate = activated(activation)

    @jit
    def put(a, c, c_stride, row, rows, block):
        stride = geti(a + _ARGUMENTS.out_stride)
        to = geti(a + _ARGUMENTS.out) + row * stride + block * 32
        for _ in range(rows):
            vstoreh(to, vmul(activate(vload(c)), vload(c + 64)))
            c += c_stride
            to += stride

    return put


def _store_plain() -> Any:
    """A function that stores `rows` rows from `row` on of a block of 32 columns, plus bias."""
    spare = stack(64)

    @jit
    def put(a, c, c_stride, row, rows, block):
        bias, stride = geti(a + _ARGUMENTS.bias), geti(a + _ARGUMENTS.out_stride)
        columns = min(32, geti(a + _ARGUMENTS.columns) - block * 32)
        to = geti(a + _ARGUMENTS.out) + row * stride + block * 64
        if bias == 0 and columns == 32:
            _store_rows(to, stride, c, c_stride, rows)
            return
        for _ in range(rows):
            for n in range(0, columns, 16):
                value = vload(c + 4 * n)
                if bias != 0:
                    value = vadd(value, vload(bias + 4 * (block * 32 + n)))
                if n + 16 <= columns:
                    vstoreh(to + 2 * n, value)
                else:
                    cut = spare()
                    vstoreh(cut, value)
                    copy(to + 2 * n, cut, 2 * (columns - n))
            c += c_stride
            to += stride

    return put


def _few_rows(put: Any) -> Any:
    """A function for up to 16 rows over the blocks begin..end - 1."""
    p14, p12 = _product(1, 4), _product(1, 2)

    @jit
    def few(a, rows, begin, end, c):
        x, stride = geti(a + _ARGUMENTS.x), geti(a + _ARGUMENTS.x_stride)
        k_steps, block = geti(a + _ARGUMENTS.k_steps), begin
        while block < end:
            w = geti(a + _ARGUMENTS.weights) + block * k_steps * _BLOCK_STEP
            if block + 1 < end:
                p14(c, 256, x, stride, w, k_steps)
                put(a, c + 128, 256, 0, rows, block + 1)
            else:
                p12(c, 256, x, stride, w, k_steps)
            put(a, c, 256, 0, rows, block)
            block += 2

    return few


def _many_rows(put: Any) -> Any:
    """A function for the rows first..last - 1 over the blocks begin..end - 1, 32 x 32 at a time."""
    p12, p22 = _product(1, 2), _product(2, 2)

    @jit
    def many(a, first, last, begin, end, c, config):
        x, stride = geti(a + _ARGUMENTS.x), geti(a + _ARGUMENTS.x_stride)
        k_steps = geti(a + _ARGUMENTS.k_steps)
        for block in range(begin, end):
            w = geti(a + _ARGUMENTS.weights) + block * k_steps * _BLOCK_STEP
            for row in range(first, last - 31, 32):
                p22(c, 128, x + row * stride, stride, w, k_steps)
                put(a, c, 128, row, 32, block)
            left = (last - first) % 32
            if left > 16:
                amx.configure(config, 16, left - 16)
                p22(c, 128, x + (last - left) * stride, stride, w, k_steps)
            elif left > 0:
                amx.configure(config, left, left)
                p12(c, 128, x + (last - left) * stride, stride, w, k_steps)
            if left > 0:
                put(a, c, 128, last - left, left, block)
                amx.configure(config, 16, 16)

    return many


def linear(variant: str) -> Any:
    """The kernel for "plain" or an activation."""
    put = _store_plain() if variant == "plain" else _store_gated(variant)
    few, many = _few_rows(put), _many_rows(put)
    memory = stack(64 + 4096 + 64)  # the tile configuration, then the sums

    @jit
    def work(a):
        config = (memory() + 63) // 64 * 64
        rows, blocks = geti(a + _ARGUMENTS.rows), geti(a + _ARGUMENTS.blocks)
        item_rows, item_blocks = geti(a + _ARGUMENTS.item_rows), geti(a + _ARGUMENTS.item_blocks)
        across = (blocks + item_blocks - 1) // item_blocks
        count = (rows + item_rows - 1) // item_rows * across
        amx.configure(config, min(rows, 16), min(rows, 16))
        index = take(a + _ARGUMENTS.counter)
        while index < count:
            row, block = index // across * item_rows, index % across * item_blocks
            end = min(block + item_blocks, blocks)
            if rows <= 16:
                few(a, rows, block, end, config + 64)
            else:
                many(a, row, min(row + item_rows, rows), block, end, config + 64, config)
            index = take(a + _ARGUMENTS.counter)
        amx.release()

    def linear(a: int) -> None:
        work(a)

    return linear
