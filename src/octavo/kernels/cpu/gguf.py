"""GGUF's block formats decoded to float32 or bfloat16, block by block.

Each format's layout is ggml's (`ggml-common.h`); the torch twin is in `octavo.quant.gguf`,
which calls these kernels. Products and sums are rounded one by one, in ggml's order, so that
the values equal the twin's bit for bit.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.kernels.codes import LEVELS
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    VF,
    VI,
    Vec,
    consti,
    geti,
    jit,
    lane_ids,
    load,
    op,
    splat,
    take,
    vadd,
    vmul,
    vsplat,
    vstore,
    vstoreh,
    vsub,
)  # fmt: skip

_CALL = abi.GGUF_DECODE.offset

_VB = ir.VectorType(I8, LANES)
_FOUR = types.int64, types.int64, types.int64, types.int64


@op(types.float32, types.int64)
def half(b, address):
    """A float16, by arithmetic: not every processor has the instruction."""
    bits = b.zext(load(b, address, I16), I32)
    size = b.shl(b.and_(bits, ir.Constant(I32, 0x7FFF)), ir.Constant(I32, 13))
    value = b.fmul(b.bitcast(size, F32), ir.Constant(F32, 2.0**112))
    sign = b.shl(b.and_(bits, ir.Constant(I32, 0x8000)), ir.Constant(I32, 16))
    return b.bitcast(b.or_(b.bitcast(value, I32), sign), F32)


@op(types.int64, types.int64)
def byte(b, address):
    return b.zext(load(b, address, I8), ir.IntType(64))


@op(types.float32, types.int64)
def signed(b, address):
    return b.sitofp(b.sext(load(b, address, I8), I32), F32)


@op(Vec, types.int64)
def vsigned(b, address):
    """LANES signed bytes."""
    return b.sitofp(b.sext(load(b, address, _VB), VI), VF)


def _field(b: Any, address: Any, shift: Any, mask: int) -> Any:
    """(byte >> shift) & mask of LANES bytes, as int32."""
    wide = b.zext(load(b, address, _VB), VI)
    return b.and_(b.lshr(wide, splat(b, b.trunc(shift, I32))), consti(mask))


def _joined(bits: int, more: int) -> Any:
    """Codes of LANES bytes: `bits` of those at `low`, `more` above them of those at `high`."""

    def joined(b, low, low_shift, high, high_shift):
        top = b.shl(_field(b, high, high_shift, (1 << more) - 1), consti(bits))
        return b.uitofp(b.or_(_field(b, low, low_shift, (1 << bits) - 1), top), VF)

    return op(Vec, *_FOUR)(joined)


vnibble_with_bits, vnibble_with_bit, vpair_with_bit = _joined(4, 2), _joined(4, 1), _joined(2, 1)


@op(Vec, types.int64, types.int64)
def vnibble(b, address, shift):
    return b.uitofp(_field(b, address, shift, 15), VF)


@op(Vec, *_FOUR)
def vnibble_with_mask(b, low, low_shift, mask, first):
    """Four bits of LANES bytes, a fifth from bits first, first + 1, ... of 32 at `mask`."""
    shifts = b.add(lane_ids(), splat(b, b.trunc(first, I32)))
    bits = b.and_(b.lshr(splat(b, load(b, mask, I32)), shifts), consti(1))
    return b.uitofp(b.or_(_field(b, low, low_shift, 15), b.shl(bits, consti(4))), VF)


@op(Vec, types.int64, types.int64)
def vpair(b, address, shift):
    """Two bits of LANES bytes."""
    return b.uitofp(_field(b, address, shift, 3), VF)


@op(Vec, types.int64, types.int64)
def vlevel(b, address, shift):
    """What four bits of LANES bytes stand for in IQ4_NL and IQ4_XS."""
    code, value = _field(b, address, shift, 15), consti(LEVELS[0])
    for number, level in enumerate(LEVELS[1:], 1):
        value = b.select(b.icmp_signed("==", code, consti(number)), consti(level), value)
    return b.sitofp(value, VF)


def decode(variant: str) -> Any:
    """`variant` is "Q4_1-bfloat16" and so on: format and type of the values."""
    name, _, dtype = variant.partition("-")
    put = vstoreh if dtype == "bfloat16" else vstore
    size = 2 if dtype == "bfloat16" else 4
    values, nbytes, block = _FORMATS[name](put, size)

    @jit
    def work(a):
        blocks, chunk = geti(a + _CALL.blocks), geti(a + _CALL.chunk)
        raw, out = geti(a + _CALL.raw), geti(a + _CALL.out)
        first = take(a) * chunk
        while first < blocks:
            for index in range(first, min(first + chunk, blocks)):
                block(raw + index * nbytes, out + index * values * size)
            first = take(a) * chunk

    def kernel(a: int) -> None:
        work(a)

    return kernel


def _q8_0(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        scale = vsplat(half(raw))
        for i in range(0, 32, LANES):
            put(out + i * size, vmul(vsigned(raw + 2 + i), scale))

    return 32, 34, block


def _q4_0(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        scale, middle = vsplat(half(raw)), vsplat(np.float32(8.0))
        for i in range(0, 32, LANES):
            value = vnibble(raw + 2 + i % 16, i // 16 * 4)
            put(out + i * size, vmul(vsub(value, middle), scale))

    return 32, 18, block


def _q4_1(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        scale, low = vsplat(half(raw)), vsplat(half(raw + 2))
        for i in range(0, 32, LANES):
            value = vnibble(raw + 4 + i % 16, i // 16 * 4)
            put(out + i * size, vadd(vmul(value, scale), low))

    return 32, 20, block


def _q5_0(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        scale, middle = vsplat(half(raw)), vsplat(np.float32(16.0))
        for i in range(0, 32, LANES):
            value = vnibble_with_mask(raw + 6 + i % 16, i // 16 * 4, raw + 2, i)
            put(out + i * size, vmul(vsub(value, middle), scale))

    return 32, 22, block


def _q5_1(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        scale, low = vsplat(half(raw)), vsplat(half(raw + 2))
        for i in range(0, 32, LANES):
            value = vnibble_with_mask(raw + 8 + i % 16, i // 16 * 4, raw + 4, i)
            put(out + i * size, vadd(vmul(value, scale), low))

    return 32, 24, block


@jit(returns=types.int64)
def _group_scale(packed, group):
    """Six bits of group 0-7 among the twelve bytes at `packed` (see quant.gguf)."""
    if group < 4:
        return byte(packed + group) & 63
    return (byte(packed + 4 + group) & 15) | ((byte(packed + group - 4) >> 6) << 4)


@jit(returns=types.int64)
def _group_minimum(packed, group):
    if group < 4:
        return byte(packed + 4 + group) & 63
    return (byte(packed + 4 + group) >> 4) | ((byte(packed + group) >> 6) << 4)


def _q4_k(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        for group in range(8):
            scale = vsplat(half(raw) * np.float32(_group_scale(raw + 4, group)))
            low = vsplat(half(raw + 2) * np.float32(_group_minimum(raw + 4, group)))
            for i in range(0, 32, LANES):
                value = vnibble(raw + 16 + group // 2 * 32 + i, group % 2 * 4)
                put(out + (group * 32 + i) * size, vsub(vmul(value, scale), low))

    return 256, 144, block


def _q5_k(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        for group in range(8):
            scale = vsplat(half(raw) * np.float32(_group_scale(raw + 4, group)))
            low = vsplat(half(raw + 2) * np.float32(_group_minimum(raw + 4, group)))
            for i in range(0, 32, LANES):
                packed = raw + 48 + group // 2 * 32 + i
                value = vnibble_with_bit(packed, group % 2 * 4, raw + 16 + i, group)
                put(out + (group * 32 + i) * size, vsub(vmul(value, scale), low))

    return 256, 176, block


def _q6_k(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        middle = vsplat(np.float32(32.0))
        for group in range(8):
            part, quarter = group // 4, group % 4
            low = raw + part * 64 + quarter % 2 * 32
            high = raw + 128 + part * 32
            for i in range(0, 32, LANES):
                scale = half(raw + 208) * signed(raw + 192 + group * 2 + i // 16)
                value = vnibble_with_bits(low + i, quarter // 2 * 4, high + i, quarter * 2)
                put(out + (group * 32 + i) * size, vmul(vsub(value, middle), vsplat(scale)))

    return 256, 210, block


def _q2_k(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        for group in range(16):
            both = byte(raw + group)
            scale = vsplat(half(raw + 80) * np.float32(both & 15))
            low = vsplat(half(raw + 82) * np.float32(both >> 4))
            packed = raw + 16 + group // 8 * 32 + group % 2 * 16
            for i in range(0, 16, LANES):
                value = vpair(packed + i, group // 2 % 4 * 2)
                put(out + (group * 16 + i) * size, vsub(vmul(value, scale), low))

    return 256, 84, block


def _q3_k(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        middle = vsplat(np.float32(4.0))
        for group in range(16):
            low = (byte(raw + 96 + group % 8) >> (group // 8 * 4)) & 15
            high = (byte(raw + 104 + group % 4) >> (group // 4 * 2)) & 3
            scale = half(raw + 108) * np.float32((low | (high << 4)) - 32)
            at = group % 2 * 16
            for i in range(0, 16, LANES):
                packed = raw + 32 + group // 8 * 32 + at + i
                value = vpair_with_bit(packed, group // 2 % 4 * 2, raw + at + i, group // 2)
                put(out + (group * 16 + i) * size, vmul(vsub(value, middle), vsplat(scale)))

    return 256, 110, block


def _iq4_nl(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        scale = vsplat(half(raw))
        for i in range(0, 32, LANES):
            put(out + i * size, vmul(vlevel(raw + 2 + i % 16, i // 16 * 4), scale))

    return 32, 18, block


def _iq4_xs(put: Any, size: int) -> Any:
    @jit
    def block(raw, out):
        for group in range(8):
            low = (byte(raw + 4 + group // 2) >> (group % 2 * 4)) & 15
            high = (byte(raw + 2 + group // 4) >> (group % 4 * 2)) & 3
            scale = vsplat(half(raw) * np.float32((low | (high << 4)) - 32))
            for i in range(0, 32, LANES):
                value = vlevel(raw + 8 + group * 16 + i % 16, i // 16 * 4)
                put(out + (group * 32 + i) * size, vmul(value, scale))

    return 256, 136, block


_FORMATS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "Q2_K": _q2_k, "Q3_K": _q3_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}  # fmt: skip
