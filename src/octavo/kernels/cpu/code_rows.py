"""Rows of a weight that is laid out for `weight_only`, looked up and dequantized one by one.

A row's bytes are spread over its panel, so a lookup reads more lines than the row has; it is a
hundredth of what a step computes for the token.
"""

from typing import Any

from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.gguf import byte, half, signed
from octavo.kernels.cpu.simd import getf, geti, jit, setf, seth, take

_CALL = abi.CODE_ROWS.offset


def _code(bits: int) -> Any:
    """A function: code k of a block, from the column's low and high parts of it."""

    @jit(returns=types.int64)
    def low(at, high, k):
        place = at + k // 8 * 64 + k % 2 * 2 + k % 8 // 4
        return (byte(place) >> (k % 4 // 2 * 4)) & 15

    @jit(returns=types.int64)
    def five(at, high, k):
        return low(at, high, k) | (((byte(high + k % 2) >> (k // 2)) & 1) << 4)

    @jit(returns=types.int64)
    def six(at, high, k):
        pair = byte(high + k % 2 * 2 + k // 8) >> (k // 2 % 4 * 2)
        return low(at, high, k) | ((pair & 3) << 4)

    @jit(returns=types.int64)
    def eight(at, high, k):
        return byte(at + k * 16) ^ 128

    return {4: low, 5: five, 6: six, 8: eight}[bits]


def rows(variant: str) -> Any:
    """`variant` is "5-half-minimum-bfloat16" and so on: bits, terms, offset, type of the values."""
    bits_name, terms_kind, offset_kind, dtype = variant.split("-")
    bits = int(bits_name)
    is_super, has_offset = terms_kind == "super", offset_kind == "minimum"
    term_bytes = {"half": 2, "single": 4, "super": 1}[terms_kind]
    term = {"half": half, "single": getf, "super": signed}[terms_kind]
    put, size = (seth, 2) if dtype == "bfloat16" else (setf, 4)
    each, code, width = 2 if has_offset else 1, _code(bits), max(0, bits - 4)
    # Of a half of a panel's block, and of a column in it.
    half_bytes, column_bytes = (256, 1) if bits == 8 else (128, 4)

    @jit(returns=types.float32)
    def factor(factors, number, which, i):
        if not is_super:
            return types.float32(1.0)
        return half(factors + ((number * each + which) * 32 + i) * 2)

    @jit
    def block(a, at, high, count, scale, offset, out):
        for k in range(count):
            value = getf(geti(a + _CALL.table) + code(at, high, k) * 4) * scale
            if has_offset:
                value = value + offset
            put(out + k * size, value)

    @jit
    def row(a, number, out):
        columns, blocks = geti(a + _CALL.columns), geti(a + _CALL.blocks)
        panel, i = number // 32, number % 32
        codes = geti(a + _CALL.codes) + panel * blocks * 64 * bits
        terms = geti(a + _CALL.terms) + panel * geti(a + _CALL.terms_size)
        factors = geti(a + _CALL.factors) + panel * geti(a + _CALL.factors_size)
        at = codes + i // 16 * half_bytes + i % 16 * column_bytes
        high = codes + 256 + i // 16 * 32 * width + i % 16 * 2 * width
        for j in range(blocks):
            group, number = j // geti(a + _CALL.group_blocks), j // 16
            scale = term(terms + (group * each * 32 + i) * term_bytes)
            scale = scale * factor(factors, number, 0, i)
            offset = scale
            if has_offset:
                offset = term(terms + ((group * each + 1) * 32 + i) * term_bytes)
                offset = offset * factor(factors, number, 1, i)
            step = j * 64 * bits
            count = min(16, columns - j * 16)
            block(a, at + step, high + step, count, scale, offset, out + j * 16 * size)

    @jit
    def work(a):
        count, ids = geti(a + _CALL.rows), geti(a + _CALL.ids)
        number = take(a)
        while number < count:
            out = geti(a + _CALL.out) + number * geti(a + _CALL.out_stride)
            row(a, geti(ids + number * 8), out)
            number = take(a)

    def kernel(a: int) -> None:
        work(a)

    return kernel
