"""Triton kernels between the products: norms, residual sums, gated activations.

Arithmetic is in float32, rounded once, when the result is stored. One program computes a whole row
(or fixed parts of one), so a row's result does not depend on how many there are.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    out, x, residual, weight, stride_out: tl.int64, stride_x: tl.int64, stride_residual: tl.int64,
    stride_head: tl.int64, eps, rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ADDS: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """The norm of each of `rows` rows of SIZE columns: HEADS rows of each token, stride_head apart.

    Grid: groups of ROWS rows. ADDS: residual += x first, and the rounded values are normed. out
    may be x.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64)[:, None], (row % HEADS).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    offsets = head * stride_head + column[None, :]
    value = tl.load(x + token * stride_x + offsets, mask=inside, other=0.0)
    if ADDS:
        place = residual + token * stride_residual + offsets
        added = tl.load(place, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
        value = added.to(residual.dtype.element_ty)
        tl.store(place, value, mask=inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    if CAST_FIRST:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    result = (normed * scale[None, :]).to(out.dtype.element_ty)
    tl.store(out + token * stride_out + offsets, result, mask=inside)


@triton.jit
def _tile(rows, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows [ROWS, 1], columns [1, COLUMNS], which exist) of this program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < rows) & (column < size)


@triton.jit(do_not_specialize=["rows"])
def add(
    x, residual, stride_x: tl.int64, stride_residual: tl.int64, rows, size, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """residual += scale * x. Grid: (groups of ROWS rows, groups of COLUMNS columns)."""
    row, column, inside = _tile(rows, size, ROWS, COLUMNS)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    place = residual + row * stride_residual + column
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + value * scale
    tl.store(place, total.to(residual.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(z):
    """1 / (1 + e^-z), without an overflow."""
    small = tl.exp2(tl.abs(z) * -1.4426950408889634)
    return tl.where(z >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """SiLU of `gate`; or GELU in its tanh form: x (1 + tanh y) / 2 = x sigmoid(2 y)."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * _sigmoid(2.0 * inner)
    else:
        active = gate * _sigmoid(gate)
    return active


@triton.jit(do_not_specialize=["rows"])
def gated(
    out, gate_up, stride_out: tl.int64, stride: tl.int64, rows, size,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, of rows gate | up. Grid: as of `add`."""
    row, column, inside = _tile(rows, size, ROWS, COLUMNS)
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    active = activated(gate, GELU)
    tl.store(out + row * stride_out + column, (active * up).to(out.dtype.element_ty), mask=inside)
