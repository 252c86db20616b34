"""Paged attention in Triton: tiles of queries over the pages of one row, and the join of pieces.

The cache of a layer is [blocks, 2, kv_heads, page], keys first; a page holds a block's codes
[block_size, head_dim] and, in a cache of codes, their float32 scales [block_size] behind them, so
that every load is aligned. Block offsets are 64 bits wide.

What to compute comes from a work list that the host writes for each step (`attention.triton`): one
item is a tile of queries of one row and a range of its keys. A fixed number of programs walks the
list, so that the grid does not depend on the step (a CUDA graph freezes it) and no program is
empty. A tile never mixes rows, and a row's keys are split at fixed positions, so a row's result
does not depend on the other rows of the step.

The softmax is computed online (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022) in
base 2. Pieces of one tile are joined in the order of their keys (split-KV, Flash-Decoding, 2023).
"""

from typing import NamedTuple

import triton
import triton.language as tl

# A work item, int32: row, first token, number of queries, position of the first one, first key,
# last key + 1, first line of the partial result that the item writes. The last one is -1 if the
# item has all keys of its queries and writes the output. Padded to 32 bytes.
ITEM_FIELDS = 8
# A join, int32: token, first line of its first partial result, number of partial results, lines
# from one of them to the next.
JOIN_FIELDS = 4

_LOG2_E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """The shape of a tile: rows (queries times heads of a group), keys at a time, and how it is
    compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _load(
    cache, scales, place, offset, dims, valid,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Keys or values of a tile, [keys, dims] or transposed, and their scales [keys] or 1.

    place, offset: [keys], of each key, the start of its page in the cache and its place therein.
    """
    inside = dims < HEAD_DIM
    if TRANSPOSED:
        x = tl.load(cache + (place + offset * HEAD_DIM)[None, :] + dims[:, None],
                    mask=valid[None, :] & inside[:, None], other=0.0)  # fmt: skip
    else:
        x = tl.load(cache + (place + offset * HEAD_DIM)[:, None] + dims[None, :],
                    mask=valid[:, None] & inside[None, :], other=0.0)  # fmt: skip
    scale = 1.0
    if CODES:
        scale = tl.load(scales + (place + BLOCK * HEAD_DIM) // 4 + offset, mask=valid, other=0.0)
    return x, scale


@triton.jit
def _exponents(
    s, keys, position, seen, soft_cap, window, WINDOW: tl.constexpr, CAPPED: tl.constexpr
):
    """Exponents to base 2 of scaled scores [rows, keys]; -inf where a row does not see a key."""
    if CAPPED:
        # tanh by its exponential: the device library's is not in the interpreter.
        s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * _LOG2_E / soft_cap))))
    seen = seen & (keys[None, :] <= position[:, None])
    if WINDOW:
        seen = seen & (keys[None, :] > position[:, None] - window)
    return tl.where(seen, s * _LOG2_E, float("-inf"))


@triton.jit
def _finite(most):
    """`most` [rows]; 0 where no key was seen yet, since inf - inf is NaN."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def _store_shares(out, acc, weight, most, sinks, heads, mask, SINKS: tl.constexpr):
    """Add the sinks, divide acc [rows, dims] by weight [rows], and store it at `out`."""
    if SINKS:
        alive = tl.max(mask.to(tl.int32), 1) > 0
        sink = tl.load(sinks + heads, mask=alive, other=0.0).to(tl.float32) * _LOG2_E
        now = tl.maximum(most, sink)
        fade = tl.exp2(most - now)
        weight = weight * fade + tl.exp2(sink - now)
        acc = acc * fade[:, None]
    shares = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
    tl.store(out, shares.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_table"])
def attend(
    out, partials, moments, query, cache, scales, tables, items, count, sinks,
    stride_block: tl.int64, stride_kind: tl.int64, stride_head: tl.int64,
    stride_table, stride_query, stride_out, scale, soft_cap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CODES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Compute the items of a work list, each for every KV head.

    out, query: [tokens, heads, HEAD_DIM], rows `stride_*` apart; partials: float32 [lines,
    KV_HEADS, HEAD_DIM], a line for each query and head of a group, not normalized; moments:
    float32 [lines, KV_HEADS, 2], the largest exponent and the sum of weights; cache: see above,
    strides in its elements; scales: the same memory as float32; tables: int32 [rows, blocks];
    items: int32 [items, FIELDS]; count: int32 [1]; sinks: [heads]; window: 0 for none.

    GROUP: query heads of a KV head; DIMS: HEAD_DIM rounded up to a power of two; CODES: whether
    the cache holds codes with scales; WIDE: multiply in float32.
    """
    index = tl.program_id(0)
    total = tl.load(count) * KV_HEADS
    line = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    while index < total:
        item = items + (index // KV_HEADS) * FIELDS
        head = index % KV_HEADS
        table = tables + tl.load(item).to(tl.int64) * stride_table
        token = (tl.load(item + 1) + line // GROUP).to(tl.int64)
        alive = line < tl.load(item + 2) * GROUP
        position = tl.load(item + 3) + line // GROUP
        end = tl.load(item + 5)
        partial = tl.load(item + 6)
        heads = head * GROUP + line % GROUP
        mask = alive[:, None] & (dims < HEAD_DIM)[None, :]
        at = (token * stride_query + heads * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(query + at, mask=mask, other=0.0)
        if WIDE:
            q = q.to(tl.float32)

        most = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        for first in range(tl.load(item + 4), end, KEYS):
            keys = first + tl.arange(0, KEYS)
            valid = keys < end
            block = tl.load(table + keys // BLOCK, mask=valid, other=0).to(tl.int64)
            place = block * stride_block + head * stride_head
            k, k_scale = _load(cache, scales, place, keys % BLOCK, dims, valid,
                               HEAD_DIM, BLOCK, CODES, True)  # fmt: skip
            s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            if CODES:
                s = s * k_scale[None, :]
            s = _exponents(s, keys, position, valid[None, :] & alive[:, None], soft_cap, window,
                           WINDOW, CAPPED)  # fmt: skip
            now = tl.maximum(most, tl.max(s, 1))
            p = tl.exp2(s - _finite(now)[:, None])
            fade = tl.exp2(most - _finite(now))
            weight = weight * fade + tl.sum(p, 1)
            v, v_scale = _load(cache, scales, place + stride_kind, keys % BLOCK, dims, valid,
                               HEAD_DIM, BLOCK, CODES, False)  # fmt: skip
            if CODES:
                p = p * v_scale[None, :]
            acc = acc * fade[:, None]
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
            most = now

        if partial < 0:
            at = (token * stride_out + heads * HEAD_DIM)[:, None] + dims[None, :]
            _store_shares(out + at, acc, weight, most, sinks, heads, mask, SINKS)
        else:
            line_of = (partial + line).to(tl.int64) * KV_HEADS + head
            tl.store(moments + line_of * 2, most, mask=alive)
            tl.store(moments + line_of * 2 + 1, weight, mask=alive)
            tl.store(partials + line_of[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        index += tl.num_programs(0)


@triton.jit
def join(
    out, partials, moments, joins, count, sinks, stride_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, SINKS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of `attend` for each token of `joins`, in the order of keys.

    joins: int32 [joins, FIELDS]; HEADS: GROUP rounded up to a power of two. The rest as `attend`.
    """
    index = tl.program_id(0)
    total = tl.load(count) * KV_HEADS
    line = tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    alive = line < GROUP
    mask = alive[:, None] & (dims < HEAD_DIM)[None, :]
    while index < total:
        record = joins + (index // KV_HEADS) * FIELDS
        head = index % KV_HEADS
        token = tl.load(record).to(tl.int64)
        pieces = tl.load(record + 2)
        step = tl.load(record + 3)
        lines = (tl.load(record + 1) + line).to(tl.int64) * KV_HEADS + head

        most = tl.full([HEADS], float("-inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIMS], tl.float32)
        for _ in range(pieces):
            theirs = tl.load(moments + lines * 2, mask=alive, other=float("-inf"))
            now = tl.maximum(most, theirs)
            fade, grow = tl.exp2(most - _finite(now)), tl.exp2(theirs - _finite(now))
            weight = weight * fade
            weight += tl.load(moments + lines * 2 + 1, mask=alive, other=0.0) * grow
            piece = tl.load(partials + lines[:, None] * HEAD_DIM + dims[None, :], mask=mask,
                            other=0.0)  # fmt: skip
            acc = acc * fade[:, None] + piece * grow[:, None]
            most = now
            lines += KV_HEADS * step

        heads = head * GROUP + line
        at = token * stride_out + heads[:, None] * HEAD_DIM + dims[None, :]
        _store_shares(out + at, acc, weight, most, sinks, heads, mask, SINKS)
        index += tl.num_programs(0)
