"""Triton kernels for a mixture of experts: routing, and products of rows and their own matrices.

A pair is a token and one of its choices, numbered token * CHOICES + choice. `sort_pairs` orders the
pairs by expert, and cuts each expert's into tiles of ROWS: a work list, made on the device, since
only that knows the routing, and of a length that depends on the number of pairs alone. A fixed
number of programs walks it (`multiply_experts`), so that a CUDA graph can hold it. A tile never
mixes experts, and a row's sum runs over the inputs in order, so its result does not depend on the
rows beside it. `combine` adds a token's results in the order of its choices.
"""

import triton
import triton.language as tl

from octavo.kernels.gpu.fused import activated
from octavo.kernels.gpu.matmul import from_fp8

# A work item, int32: expert, first of its rows in the order of experts, number of rows or 0. Padded
# to 16 bytes.
ITEM_FIELDS = 4

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def route(
    chosen, weights, logits, stride_logits,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr, PLACES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The CHOICES largest of logits [tokens, EXPERTS], of equal ones the first; grid: tokens.

    chosen: int32 [tokens, CHOICES]; weights: float32, their shares of the softmax over all experts,
    RENORMALIZE: over the chosen ones. COLUMNS, PLACES: EXPERTS and CHOICES up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    left = tl.load(logits + token * stride_logits + expert, mask=expert < EXPERTS,
                   other=float("-inf")).to(tl.float32)  # fmt: skip
    share = tl.exp2((left - tl.max(left, 0)) * _LOG2_E)
    total = tl.sum(share, 0)
    shares = tl.zeros([PLACES], tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, EXPERTS), 0)
        tl.store(chosen + token * CHOICES + choice, best)
        found = tl.sum(tl.where(expert == best, share, 0.0), 0)
        shares = tl.where(place == choice, found, shares)
        left = tl.where(expert == best, float("-inf"), left)
    if RENORMALIZE:
        total = tl.sum(shares, 0)
    tl.store(weights + token * CHOICES + place, shares / total, mask=place < CHOICES)


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(
    order, items, chosen, pairs,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The pairs of each expert in their order, and the work list. Grid: experts.

    order: int32 [pairs], pairs by expert; items: int32 [pairs // ROWS + EXPERTS, FIELDS]; chosen:
    int32 [pairs], the expert of each. An expert whose first row is `first` has the items from
    first // ROWS + expert on: enough for its rows, whatever the others have; those left are empty.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    less, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, pairs, BLOCK):
        of = tl.load(chosen + begin + at, mask=begin + at < pairs, other=EXPERTS)
        less += (of < expert).to(tl.int32)
        own += (of == expert).to(tl.int32)
    first, count = tl.sum(less, 0), tl.sum(own, 0)

    place = first
    for begin in range(0, pairs, BLOCK):
        of = tl.load(chosen + begin + at, mask=begin + at < pairs, other=EXPERTS)
        mine = (of == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - mine, begin + at, mask=mine > 0)
        place += tl.sum(mine, 0)

    item = first // ROWS + expert
    for tile in range((first + count) // ROWS + 1 - first // ROWS):
        rows = tl.minimum(tl.maximum(count - tile * ROWS, 0), ROWS)
        target = items + (item + tile) * FIELDS
        tl.store(target, expert)
        tl.store(target + 1, first + tile * ROWS)
        tl.store(target + 2, rows)


@triton.jit
def _weights(
    weight, scale, rows, span, mask, stride, stride_scale, K, dtype: tl.constexpr,
    SPAN: tl.constexpr, FP8: tl.constexpr, SPANS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(weights [rows, SPAN] of a span of inputs as `dtype`, the scale of their sums [rows] or 1).

    rows: [rows], of the weight and of the scale.
    """
    k = span * SPAN + tl.arange(0, SPAN)
    place = weight + rows.to(tl.int64)[:, None] * stride + k[None, :]
    stored = tl.load(place, mask=mask[:, None] & (k < K)[None, :], other=0.0)
    factor = 1.0
    if FP8:
        values = from_fp8(stored, dtype, NATIVE)
        factor = tl.load(scale + rows * stride_scale + span // SPANS, mask=mask, other=0.0)
    else:
        values = stored
    return values, factor


@triton.jit
def _dot(w, x, acc, factor, FP8: tl.constexpr, WIDE: tl.constexpr):
    """acc [outputs, rows] + w [outputs, span] x [span, rows], of FP8 times `factor` [outputs]."""
    if WIDE:
        w, x = w.to(tl.float32), x.to(tl.float32)
    # The weights come first: a matrix unit takes its first operand from registers.
    if FP8:
        acc += tl.dot(w, x, input_precision="ieee") * factor[:, None]
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_items"])
def multiply_experts(
    y, x, weight, scale, order, items, N, K, num_items, stride_x, stride_weight, stride_scale,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, FP8: tl.constexpr, SPANS: tl.constexpr,
    NATIVE: tl.constexpr, WIDE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Rows times the matrices of their experts; a program for each multiprocessor, or several.

    GATED: y [pairs, N], in the order of experts, is activation(gate) * up of the tokens of x
    [tokens, K]; weight: [experts, 2 N, K], the gates first. Else x [pairs, K] is in the order of
    experts, y [pairs, N] in that of pairs; weight: [experts, N, K].

    FP8: weight is float8_e4m3fn, uint8 unless NATIVE; scale: float32 [rows of all experts,
    stride_scale], of groups of SPANS spans. WIDE: multiply in float32.
    """
    tiles = tl.cdiv(N, OUTPUTS)
    line = tl.arange(0, ROWS)
    index = tl.program_id(0)
    while index < num_items * tiles:
        item = items + (index // tiles) * FIELDS
        count = tl.load(item + 2)
        if count > 0:
            first, alive = tl.load(item + 1), line < count
            pair = tl.load(order + first + line, mask=alive, other=0)
            source = pair // CHOICES if GATED else first + line
            target = first + line if GATED else pair
            outputs = (index % tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
            inside = outputs < N
            rows = tl.load(item) * (2 * N if GATED else N) + outputs
            place = x + source.to(tl.int64)[:, None] * stride_x
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
            ups = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for span in range(tl.cdiv(K, SPAN)):
                k = span * SPAN + tl.arange(0, SPAN)
                a = tl.load(place + k[None, :], mask=alive[:, None] & (k < K)[None, :], other=0.0)
                w, factor = _weights(weight, scale, rows, span, inside, stride_weight, stride_scale,
                                     K, a.dtype, SPAN, FP8, SPANS, NATIVE)  # fmt: skip
                acc = _dot(w, tl.trans(a), acc, factor, FP8, WIDE)
                if GATED:
                    w, factor = _weights(weight, scale, rows + N, span, inside, stride_weight,
                                         stride_scale, K, a.dtype, SPAN, FP8, SPANS,
                                         NATIVE)  # fmt: skip
                    ups = _dot(w, tl.trans(a), ups, factor, FP8, WIDE)
            if GATED:
                acc = activated(acc, GELU) * ups
            at = target.to(tl.int64)[:, None] * N + outputs[None, :]
            tl.store(y + at, tl.trans(acc).to(y.dtype.element_ty),
                     mask=alive[:, None] & inside[None, :])  # fmt: skip
        index += tl.num_programs(0)


@triton.jit
def combine(out, y, weights, N, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):
    """out [tokens, N] = the sum of y [tokens, CHOICES, N] by weights [tokens, CHOICES], in order.

    Grid: (tokens, groups of COLUMNS columns).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        part = tl.load(y + pair * N + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=inside)
