"""Triton kernels for products y = x W^T + b: weights as codes, and dense ones in fixed tiles.

Codes are dequantized in registers and multiplied in the type of x, so that the result is that of
the dequantized model, with its rounding. They are stored in chunks of two spans of inputs: 4-bit
codes of the first span are the low halves of the bytes, those of the second the high halves. So a
byte is unpacked without moving anything between threads, and each span has one scale per output
(a span is a group, or a part of one).

float8_e4m3fn codes are converted to the type of x, which holds each of them, and multiplied; scales
are applied to sums in float32: to those of a group, or to the whole sum where there is one group.

Every sum runs over the inputs in order, in one program or in a fixed number of parts that are
added in order: the number depends on the shape of the weight only.
"""

import torch
import triton
import triton.language as tl


def is_wide(dtype: torch.dtype) -> bool:
    """Whether products are computed in float32: the interpreter multiplies no bfloat16."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret)


@triton.jit
def _terms(scale, minimum, outputs, span, mask, stride, SPANS: tl.constexpr):
    """Scale and minimum [outputs] of a span, in float32; SPANS: spans of a group."""
    at = outputs * stride + span // SPANS
    return (tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)[:, None],
            tl.load(minimum + at, mask=mask, other=0.0).to(tl.float32)[:, None])  # fmt: skip


@triton.jit
def _inputs(x, rows, begin, mask, K, stride, SPAN: tl.constexpr):
    """x [rows, SPAN] from input `begin` on; 0 behind the last one."""
    k = begin + tl.arange(0, SPAN)
    at = rows.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(x + at, mask=mask[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _store(y, acc, bias, rows, outputs, mask, N, part, M, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """The result, or with several parts a partial sum, float32 [PARTS, M, N]."""
    if BIAS and PARTS == 1:
        acc += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    at = (part.to(tl.int64) * M + rows)[:, None] * N + outputs[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def multiply_codes(
    y, x, codes, scale, minimum, bias, M, N, K, stride_x, stride_codes, stride_scale,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    BITS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, K] times weights of codes; grid: (tiles of N, tiles of M, PARTS).

    codes: uint8 [N, stride_codes], chunks of two spans of SPAN inputs, padded with zeros to whole
    chunks; scale, minimum: [N, stride_scale], of groups of SPANS spans; WIDE: multiply in float32.
    With several PARTS y is float32 [PARTS, M, N], to be added.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    inside, alive = outputs < N, rows < M
    chunks = tl.cdiv(K, 2 * SPAN)
    share = tl.cdiv(chunks, PARTS)
    line = codes + outputs.to(tl.int64)[:, None] * stride_codes + tl.arange(0, SPAN)[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for chunk in range(part * share, min((part + 1) * share, chunks)):
        first = chunk * 2 * SPAN
        if BITS == 4:
            both = tl.load(line + chunk * SPAN, mask=inside[:, None], other=0)
            low, high = both & 15, both >> 4
        else:
            low = tl.load(line + first, mask=inside[:, None], other=0)
            high = tl.load(line + first + SPAN, mask=inside[:, None], other=0)
        for half in tl.static_range(2):
            a = _inputs(x, rows, first + half * SPAN, alive, K, stride_x, SPAN)
            # The last chunk may end with a span behind the inputs, which has no scale.
            there = inside & (first + half * SPAN < K)
            d, m = _terms(scale, minimum, outputs, 2 * chunk + half, there, stride_scale, SPANS)
            w = (low if half == 0 else high).to(tl.float32) * d + m
            w = w.to(a.dtype)
            if WIDE:
                a, w = a.to(tl.float32), w.to(tl.float32)
            # The weights come first: a matrix unit takes its first operand from registers.
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    _store(y, tl.trans(acc), bias, rows, outputs, alive[:, None] & inside[None, :], N, part, M,
           PARTS, BIAS)  # fmt: skip


@triton.jit
def from_fp8(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """float8_e4m3fn as `dtype`; or, of their bits in uint8, their 256th part.

    The bits of a float8_e4m3fn in the places of a float16's stand for it over 2^8, by the biases of
    the exponents; subnormals too.
    """
    if NATIVE:
        values = codes.to(dtype)
    else:
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        values = half.to(tl.float16, bitcast=True).to(dtype)
    return values


@triton.jit(do_not_specialize=["M"])
def multiply_fp8(
    y, x, codes, scale, bias, M, N, K, stride_x, stride_codes, stride_scale,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, K] times weights in float8_e4m3fn; grid and PARTS as in `multiply_codes`.

    codes: [N, stride_codes], padded with zeros to whole spans, uint8 unless NATIVE; scale: float32
    [N, stride_scale], of groups of SPANS spans; of all inputs if SPANS is 0. WIDE: multiply in
    float32.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    inside, alive = outputs < N, rows < M
    spans = tl.cdiv(K, SPAN)
    share = tl.cdiv(spans, PARTS)
    line = codes + outputs.to(tl.int64)[:, None] * stride_codes + tl.arange(0, SPAN)[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for span in range(part * share, min((part + 1) * share, spans)):
        stored = tl.load(line + span * SPAN, mask=inside[:, None], other=0.0)
        a = _inputs(x, rows, span * SPAN, alive, K, stride_x, SPAN)
        w = from_fp8(stored, a.dtype, NATIVE)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        if SPANS:
            of_group = tl.load(scale + outputs * stride_scale + span // SPANS, mask=inside,
                               other=0.0)  # fmt: skip
            acc += tl.dot(w, tl.trans(a), input_precision="ieee") * of_group[:, None]
        else:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    if not SPANS:
        acc *= tl.load(scale + outputs * stride_scale, mask=inside, other=0.0)[:, None]
    _store(y, tl.trans(acc), bias, rows, outputs, alive[:, None] & inside[None, :], N, part, M,
           PARTS, BIAS)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def multiply(
    y, x, weight, bias, M, N, K, stride_x, stride_weight,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, K] times dense weight [N, K]; as `multiply_codes`."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    inside, alive = outputs < N, rows < M
    spans = tl.cdiv(K, SPAN)
    share = tl.cdiv(spans, PARTS)
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for span in range(part * share, min((part + 1) * share, spans)):
        a = _inputs(x, rows, span * SPAN, alive, K, stride_x, SPAN)
        w = _inputs(weight, outputs, span * SPAN, inside, K, stride_weight, SPAN)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    _store(y, acc, bias, rows, outputs, alive[:, None] & inside[None, :], N, part, M, PARTS, BIAS)


@triton.jit(do_not_specialize=["M"])
def add_parts(y, parts, bias, M, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """y [M, N] = the sum of parts [PARTS, M, N], in order, plus bias [N]. Grid: blocks of y."""
    size = M.to(tl.int64) * N
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)
