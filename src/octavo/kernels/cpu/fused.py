"""Fused kernels between the GEMMs of a layer, each in one pass over its rows.

    rms_norm    r = x + residual, rounded and stored; y = r / sqrt(mean(r^2) + eps) * weight
    row_squares, divided_row_norm
                rms_norm of rows whose parts are on several ranks: what each part adds to the sum
                of squares, and the norm by the sum over all of them
    add         residual + scale * x, stored in the residual
    activation  silu(gate) * up or gelu(gate) * up (tanh form) of [gate | up]
    rope_write  head norm and rotary embedding of q (in place) and k, then k and v to the cache

Arithmetic is float32, rounded when stored. Sums run lane by lane in a fixed order, so the kernels
are batch-invariant. Each has a plain torch reference in `reference`.
"""

from typing import Any

import numpy as np
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.activations import activated
from octavo.kernels.cpu.simd import (
    LANES,
    copy,
    encode,
    get32,
    getd,
    getf,
    geti,
    jit,
    row_memory,
    set32,
    setf,
    stack,
    take,
    vabs,
    vadd,
    vdiv,
    vfma,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
    vtop,
    vup,
    zero,
)  # fmt: skip

_NORM, _ACTIVATION, _ROPE = abi.RMS_NORM.offset, abi.ACTIVATION.offset, abi.ROPE_WRITE.offset
_ADD, _SQUARES, _DIVIDED = abi.ADD.offset, abi.ROW_SQUARES.offset, abi.DIVIDED_ROW_NORM.offset
_ROWS, _CHUNK = _NORM.rows, _NORM.chunk  # of all
_ONE = np.float32(1.0)


def _by_rows(row: Any) -> Any:
    """A kernel that calls row(arguments, index) for every row, CHUNK rows at a time."""

    @jit
    def work(a):
        rows, chunk = geti(a + _ROWS), geti(a + _CHUNK)
        first = take(a) * chunk
        while first < rows:
            for index in range(first, min(first + chunk, rows)):
                row(a, index)
            first = take(a) * chunk

    def kernel(a: int) -> None:
        work(a)

    return kernel


def rms_norm(variant: str) -> Any:
    """See `reference.rms_norm` and `reference.row_norm`.

    `variant` is the dtype of x, residual and out [rows, size], and of weight [size]. "-wide" after
    it: weight is float32; "-cast": the normed row is rounded before the multiplication by weight.
    Strides apply to x and out; out may be x.
    """
    dtype, *flags = variant.split("-")
    cast = "cast" in flags
    size, read, write = row_memory(dtype == "bfloat16")
    weight_size, read_weight, _ = row_memory(dtype == "bfloat16" and "wide" not in flags)

    @jit
    def row(a, index):
        n = geti(a + _NORM.size)
        x, weight = geti(a + _NORM.x) + index * geti(a + _NORM.x_stride), geti(a + _NORM.weight)
        out = geti(a + _NORM.out) + index * geti(a + _NORM.out_stride)
        residual = x
        total = vsplat(np.float32(0.0))
        if geti(a + _NORM.residual) != 0:
            residual = geti(a + _NORM.residual) + index * n * size
            for i in range(0, n, LANES):
                here = residual + i * size
                write(here, vadd(read(here, n - i), read(x + i * size, n - i)), n - i)
                value = read(here, n - i)  # as rounded
                total = vfma(value, value, total)
        else:
            for i in range(0, n, LANES):
                value = read(x + i * size, n - i)
                total = vfma(value, value, total)
        mean = vsum(total) / np.float32(n) + np.float32(getd(a + _NORM.eps))
        factor = vsplat(_ONE / np.sqrt(mean))
        for i in range(0, n, LANES):
            value = vmul(read(residual + i * size, n - i), factor)
            if cast:
                write(out + i * size, value, n - i)
                value = read(out + i * size, n - i)
            scale = read_weight(weight + i * weight_size, n - i)
            write(out + i * size, vmul(value, scale), n - i)

    return _by_rows(row)


def row_squares(dtype: str) -> Any:
    """See `reference.row_squares`; a column of it, of x [rows, size] with strides."""
    size, read, _ = row_memory(dtype == "bfloat16")

    @jit
    def row(a, index):
        n = geti(a + _SQUARES.size)
        x = geti(a + _SQUARES.x) + index * geti(a + _SQUARES.x_stride)
        total = vsplat(np.float32(0.0))
        for i in range(0, n, LANES):
            value = read(x + i * size, n - i)
            total = vfma(value, value, total)
        setf(geti(a + _SQUARES.out) + index * 8, vsum(total))

    return _by_rows(row)


def divided_row_norm(variant: str) -> Any:
    """See `reference.divided_row_norm`; `variant` as of `rms_norm`."""
    dtype, *flags = variant.split("-")
    cast = "cast" in flags
    size, read, write = row_memory(dtype == "bfloat16")
    weight_size, read_weight, _ = row_memory(dtype == "bfloat16" and "wide" not in flags)

    @jit
    def row(a, index):
        n, weight = geti(a + _DIVIDED.size), geti(a + _DIVIDED.weight)
        x = geti(a + _DIVIDED.x) + index * geti(a + _DIVIDED.x_stride)
        total = getf(geti(a + _DIVIDED.squares) + index * 8)
        mean = total / np.float32(getd(a + _DIVIDED.count)) + np.float32(getd(a + _DIVIDED.eps))
        factor = vsplat(_ONE / np.sqrt(mean))
        for i in range(0, n, LANES):
            value = vmul(read(x + i * size, n - i), factor)
            if cast:
                write(x + i * size, value, n - i)
                value = read(x + i * size, n - i)
            scale = read_weight(weight + i * weight_size, n - i)
            write(x + i * size, vmul(value, scale), n - i)

    return _by_rows(row)


def add(dtype: str) -> Any:
    """See `reference.add`; x and residual are contiguous [rows, size]."""
    size, read, write = row_memory(dtype == "bfloat16")

    @jit
    def row(a, index):
        n, scale = geti(a + _ADD.size), vsplat(np.float32(getd(a + _ADD.scale)))
        x = geti(a + _ADD.x) + index * n * size
        residual = geti(a + _ADD.residual) + index * n * size
        for i in range(0, n, LANES):
            here = residual + i * size
            value = vfma(read(x + i * size, n - i), scale, read(here, n - i))
            write(here, value, n - i)

    return _by_rows(row)


def activation(variant: str) -> Any:
    """`variant` is "silu-bfloat16" or "gelu-..." and so on; x [rows, 2 size], out [rows, size]."""
    name, _, dtype = variant.partition("-")
    activate = activated("gelu_tanh" if name == "gelu" else name, 126.0)
    size, read, write = row_memory(dtype == "bfloat16")

    @jit
    def row(a, index):
        n = geti(a + _ACTIVATION.size)
        gate = geti(a + _ACTIVATION.x) + index * 2 * n * size
        out = geti(a + _ACTIVATION.out) + index * n * size
        up = gate + n * size
        for i in range(0, n, LANES):
            value = activate(read(gate + i * size, n - i))
            write(out + i * size, vmul(value, read(up + i * size, n - i)), n - i)

    return _by_rows(row)


def _put(size: int, write: Any) -> Any:
    """A function that rounds a row of float32 to the dtype of `write`."""

    @jit
    def put(x, to, head_dim):
        for i in range(0, head_dim, LANES):
            write(to + i * size, vload(x + i * 4), head_dim - i)

    return put


def _stored(half: bool, given: tuple[int, Any, Any]) -> Any:
    """store(x, v, to, slot, ...): a key (float32) and a value to the head's part of a block at
    `to`, in bfloat16 if `half`, else in float32; given: the memory that values are read from."""
    pair, (given_size, read, _) = 2 if half else 1, given
    size, _, write = row_memory(half)
    put, rounded, widened = _put(size, write), stack(1024 + LANES * 4), stack(1024 + LANES * 4)

    @jit(returns=types.int64)
    def in_type_of_cache(v, head_dim):
        if given_size == size:
            return v
        wide, near = widened(), rounded()
        for i in range(0, head_dim, LANES):
            vstore(wide + i * 4, read(v + i * given_size, head_dim - i))
        put(wide, near, head_dim)
        return near

    @jit
    def store(x, v, to, slot, block_size, head_dim, dim):
        near = rounded()
        put(x, near, head_dim)
        zero(near + head_dim * size, (dim - head_dim) * size)
        here = to + slot * 4
        for w in range(dim // pair):
            set32(here + w * block_size * 4, get32(near + w * 4))
        here = to + block_size * dim * size + slot // pair * dim * 4 + slot % pair * size
        values = in_type_of_cache(v, head_dim)
        for d in range(head_dim):
            copy(here + d * 4, values + d * size, size)
        for d in range(head_dim, dim):
            zero(here + d * 4, size)

    return store


def _coded(kind: str, read: Any, size: int) -> Any:
    """`store` as of `_stored`, for codes of `kind`, as `reference.quantize_kv` makes them."""
    put_codes, top = encode(kind), np.float32(127.0 if kind == "int8" else 448.0)
    widened, near = stack(1024 + LANES * 4), stack(256 + LANES)

    @jit(returns=types.float32)
    def quantize(x, to, head_dim, dim):
        """Codes of a row x of float32, zeros up to dim; returns the scale."""
        zero(x + head_dim * 4, (dim - head_dim) * 4)
        most, broken = vsplat(np.float32(2.0**-100)), vsplat(np.float32(0.0))
        for i in range(0, dim, LANES):
            value = vload(x + i * 4)
            most = vmax(vabs(value), most)
            broken = vfma(value, vsplat(np.float32(0.0)), broken)  # NaN if one is NaN or infinite
        scale = vup(vsplat(vtop(most) / top))
        factor = vdiv(vsplat(_ONE), scale)
        for i in range(0, dim, LANES):
            put_codes(to + i, vmul(vload(x + i * 4), factor))
        return vtop(scale) + vsum(broken)

    @jit
    def store(x, v, to, slot, block_size, head_dim, dim):
        codes, wide = near(), widened()
        scales = to + 2 * block_size * dim + slot * 4
        setf(scales, quantize(x, codes, head_dim, dim))
        run = min(block_size, abi.RUN)
        here = to + slot // run * run * dim + slot % run * 2
        for d in range(0, dim, 2):
            copy(here + d * run, codes + d, 2)
        for i in range(0, head_dim, LANES):
            vstore(wide + i * 4, read(v + i * size, head_dim - i))
        setf(scales + block_size * 4, quantize(wide, codes, head_dim, dim))
        here = to + (block_size + slot // 2 * 2) * dim + slot % 2
        for d in range(dim):
            copy(here + 2 * d, codes + d, 1)

    return store


@jit
def _rotate(x, cos, count):
    """NeoX rotary embedding of `count` pairs at x, by `count` cosines, then sines, at cos."""
    y, sin = x + count * 4, cos + count * 4
    whole = count // LANES * LANES * 4
    for i in range(0, whole, LANES * 4):
        first, second, c, s = vload(x + i), vload(y + i), vload(cos + i), vload(sin + i)
        vstore(x + i, vsub(vmul(first, c), vmul(second, s)))
        vstore(y + i, vfma(second, c, vmul(first, s)))
    for i in range(whole, count * 4, 4):
        one, two, cosine, sine = getf(x + i), getf(y + i), getf(cos + i), getf(sin + i)
        setf(x + i, one * cosine - two * sine)
        setf(y + i, two * cosine + one * sine)


def _heads(memory: tuple[int, Any, Any], weight_memory: tuple[int, Any, Any], cast: bool) -> Any:
    """A function that reads a head in float32; the memories of heads and of norm weights.

    cast: a normed head is rounded before the multiply by the weight.
    """
    size, read, write = memory
    weight_size, read_weight, _ = weight_memory
    rounded = stack(LANES * 4)

    @jit
    def norm(x, head_dim, weight, eps):
        total = vsplat(np.float32(0.0))
        for i in range(0, head_dim, LANES):
            value = vload(x + i * 4)
            total = vfma(value, value, total)
        factor = vsplat(_ONE / np.sqrt(vsum(total) / np.float32(head_dim) + np.float32(eps)))
        for i in range(0, head_dim, LANES):
            here = x + i * 4
            value = vmul(vload(here), factor)
            if cast:
                near = rounded()
                write(near, value, LANES)
                value = read(near, LANES)
            vstore(here, vmul(value, read_weight(weight + i * weight_size, head_dim - i)))

    @jit
    def head(a, x, here, weight, cos):
        """One head at `here`, widened, normed and rotated, to the buffer x."""
        head_dim = geti(a + _ROPE.head_dim)
        for i in range(0, head_dim, LANES):
            vstore(x + i * 4, read(here + i * size, head_dim - i))
        if weight != 0:
            norm(x, head_dim, weight, getd(a + _ROPE.eps))
        if cos != 0:
            _rotate(x, cos, geti(a + _ROPE.half))

    return head


def rope_write(variant: str) -> Any:
    """Head norms if weights are given, rope if cos_sin is, cache write if a cache is.

    `variant` is the dtype of q, k and v, then that of the cache if it is another ("bfloat16-int8",
    "float32-bfloat16"),
    or flags of `rms_norm` where there is a norm but no cache ("bfloat16-wide-cast").

    The cache's layout is that of `attention`. The norm's result is not rounded before rope.
    k itself is changed only when there is no cache.
    """
    dtype, *flags = variant.split("-")
    kind = next((flag for flag in flags if flag in ("int8", "fp8")), "")
    half = dtype == "bfloat16"
    memory = size, read, write = row_memory(half)
    head = _heads(memory, row_memory(half and "wide" not in flags), "cast" in flags)
    half_cache = half or "bfloat16" in flags
    put = _put(size, write)
    store = _coded(kind, read, size) if kind else _stored(half_cache, memory)
    of_token = 2 * abi.SCALE_BYTES if kind else 0  # scales of a KV head
    code_size = 1 if kind else 2 if half_cache else 4
    widened = stack(1024 + LANES * 4)

    @jit
    def row(a, index):
        x, head_dim, kv_heads = widened(), geti(a + _ROPE.head_dim), geti(a + _ROPE.kv_heads)
        cos, cache = geti(a + _ROPE.cos_sin), geti(a + _ROPE.cache)
        if cos != 0:
            cos += geti(geti(a + _ROPE.positions) + index * 8) * geti(a + _ROPE.half) * 8
        if geti(a + _ROPE.q) != 0:
            q = geti(a + _ROPE.q) + index * geti(a + _ROPE.q_stride)
            for h in range(geti(a + _ROPE.heads)):
                head(a, x, q + h * head_dim * size, geti(a + _ROPE.q_norm), cos)
                put(x, q + h * head_dim * size, head_dim)
        if geti(a + _ROPE.k) == 0:
            return
        k = geti(a + _ROPE.k) + index * geti(a + _ROPE.k_stride)
        v = geti(a + _ROPE.v) + index * geti(a + _ROPE.v_stride)
        dim = (head_dim + 15) // 16 * 16
        for h in range(kv_heads):
            head(a, x, k + h * head_dim * size, geti(a + _ROPE.k_norm), cos)
            if cache == 0:
                put(x, k + h * head_dim * size, head_dim)
                continue
            slot, block_size = geti(geti(a + _ROPE.slots) + index * 8), geti(a + _ROPE.block_size)
            block = slot // block_size * kv_heads + h
            to = cache + block * block_size * (2 * dim * code_size + of_token)
            store(x, v + h * head_dim * size, to, slot % block_size, block_size, head_dim, dim)

    return _by_rows(row)
