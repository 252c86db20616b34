"""Triton kernel that writes keys and values into the pages of `kernels.gpu.attention`."""

import triton
import triton.language as tl

# How the cache holds a value.
PLAIN, INT8, FP8 = 0, 1, 2


@triton.jit
def _scale_of(largest, LARGEST_CODE: tl.constexpr):
    """largest / LARGEST_CODE, rounded up to a bfloat16: see `reference.quantize_kv`."""
    exact = tl.div_rn(tl.maximum(largest, 7.888609052210118e-31), LARGEST_CODE)
    bits = exact.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_int8(x):
    """Nearest even integer of |x| <= 127.5, through the addition of 1.5 x 2^23; NaN becomes 0."""
    x = tl.where(x == x, x, 0.0)
    bits = (x + 12582912.0).to(tl.int32, bitcast=True)
    return (bits - 0x4B400000).to(tl.int8)


@triton.jit
def _round_to_e4m3(x):
    """The code of x in float8_e4m3fn as uint8, nearest even; below 2^-6 it is 2^-6 or zero.

    On the bits, so that every GPU, and the interpreter, gives the same codes.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    low = bits & 0x7FFFFFFF
    rounded = (low + 0x7FFFF + ((low >> 20) & 1)) >> 20  # eight bits of exponent, three of mantissa
    code = rounded - ((127 - 7) << 3)
    small = tl.where(low > 0x3C000000, 8, 0)  # 2^-7 and 2^-6
    code = tl.where(low < 0x3C800000, small, code)
    code = tl.where(low > 0x7F800000, 0x7F, code)  # NaN
    return (sign | code).to(tl.uint8)


@triton.jit
def _normed(x, inverse, weights, there, CAST_FIRST: tl.constexpr):
    """x [heads, dims] times the inverse of its root mean square [heads, 1] and weights [dims]."""
    normed = x.to(tl.float32) * inverse
    if CAST_FIRST:
        normed = normed.to(x.dtype).to(tl.float32)
    weight = tl.load(weights, mask=there, other=0.0).to(tl.float32)
    return (normed * weight[None, :]).to(x.dtype)


@triton.jit
def rotate_and_write(
    cache, scales, query, key, value, query_norm, key_norm, cos_sin, positions, slots, eps,
    stride_block: tl.int64, stride_kind: tl.int64, stride_head: tl.int64,
    stride_query, stride_key, stride_value, stride_table,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr,
    WRITES: tl.constexpr, NORMS: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of query, in place, and of key; then key and value are stored at `slots`.

    Grid: (tokens, groups of HEADS heads: those of the queries, then of the keys, then of the
    values). query [tokens, Q_HEADS, HEAD_DIM], key and value [tokens, KV_HEADS, HEAD_DIM], tokens
    stride_* elements apart; cos_sin: float32 [positions, 2 HALF], as `reference.rope` takes it;
    cache: codes of FORM; scales: the same memory as float32. HALF = 0: no rotary embedding;
    WRITES = False: nothing is stored. A slot of -1 stores nothing. NORMS, where HALF > 0: the heads
    of query and key are normed first, as `reference.head_norm` with these weights [HEAD_DIM].
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, DIMS)
    is_query = group < q_groups
    is_value = group >= q_groups + kv_groups
    first = tl.where(is_query, group, (group - q_groups) % kv_groups) * HEADS
    heads = first + tl.arange(0, HEADS)
    inside = (heads < tl.where(is_query, Q_HEADS, KV_HEADS))[:, None] & (dims < HEAD_DIM)[None, :]
    if is_query:
        source = query + token * stride_query
    elif is_value:
        source = value + token * stride_value
    else:
        source = key + token * stride_key
    offsets = heads[:, None] * HEAD_DIM
    x = tl.load(source + offsets + dims[None, :], mask=inside, other=0.0)
    if HALF > 0 and not is_value:
        rotated = inside & (dims < 2 * HALF)[None, :]
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        other = tl.load(source + offsets + partner[None, :], mask=rotated, other=0.0)
        if NORMS:
            weight = key_norm
            if is_query:
                weight = query_norm
            square = x.to(tl.float32) * x.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(square, 1) / HEAD_DIM + eps)[:, None]
            x = _normed(x, inverse, weight + dims, dims < HEAD_DIM, CAST_FIRST)
            other = _normed(other, inverse, weight + partner, dims < 2 * HALF, CAST_FIRST)
        row = cos_sin + tl.load(positions + token) * stride_table
        turning = dims < 2 * HALF
        cos = tl.load(row + dims % HALF, mask=turning, other=1.0)
        sin = tl.load(row + HALF + dims % HALF, mask=turning, other=0.0)
        sin = tl.where(dims < HALF, -sin, sin)
        wide = x.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]
        x = wide.to(x.dtype)
        if is_query:
            # Both halves have been read by all threads of the program.
            tl.debug_barrier()
            tl.store(source + offsets + dims[None, :], x, mask=inside if NORMS else rotated)
    if WRITES:
        slot = tl.load(slots + token)
        if (slot >= 0) & (not is_query):
            page = (slot // BLOCK) * stride_block + heads * stride_head
            page += tl.where(is_value, stride_kind, 0)
            at = (page + slot % BLOCK * HEAD_DIM)[:, None] + dims[None, :]
            if FORM == 0:
                tl.store(cache + at, x.to(cache.dtype.element_ty), mask=inside)
            else:
                wide = x.to(tl.float32)
                scale = _scale_of(tl.max(tl.abs(wide), 1), 127.0 if FORM == 1 else 448.0)
                scaled = wide * tl.div_rn(1.0, scale)[:, None]
                codes = _round_to_int8(scaled) if FORM == 1 else _round_to_e4m3(scaled)
                tl.store(cache + at, codes, mask=inside)
                spoiled = tl.sum(tl.where(inside, wide * 0.0, 0.0), 1)  # NaN for an infinity
                at_scale = (page + BLOCK * HEAD_DIM) // 4 + slot % BLOCK
                tl.store(scales + at_scale, scale + spoiled, mask=heads < KV_HEADS)
