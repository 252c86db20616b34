"""Paged attention on the CPU, for any mix of long and short rows.

    out[t, h] = sum over keys of softmax(scale * q[t, h] . k[key, g]) * v[key, g],  g = h // groups

The keys of a sequence are cut at fixed places, every KEYS of them. Each piece gives a maximum m,
a sum l of exp(score - m), and a weighted sum o; pieces are joined in order:

    M = max(m, m');  l = l e^(m - M) + l' e^(m' - M);  o = o e^(m - M) + o' e^(m' - M)

So a query's result depends on its sequence and position alone: not on the other rows, on how a
prompt was chunked, on the number of threads, nor on whether its pieces were shared among threads
(then the last one to finish joins them, in the same order). Masked keys add exact zeros.

Cache of a layer: [blocks, kv_heads, 2, block_size * dim] with dim = head_dim rounded up to 16.
In 32-bit words (a pair of neighbouring bfloat16, or one float32) K is [dim / pair][block_size],
pairs along dim; V is [block_size / pair][dim], pairs along keys. That is what the vector units
and AMX multiply, so blocks are used where they lie (see `cpu_tiles`). Keys past the end of the
sequence may hold anything, NaN too: scores are masked, and V's last block is copied with zeros.

An item of work is some queries of one row for one KV head over a range of pieces. The queries
and the heads of the group are the rows of its products: row r is query r // groups.
"""

from typing import Any

import numpy as np

from octavo.kernels import cpu_layout as at
from octavo.kernels import cpu_tiles
from octavo.kernels.cpu_vector import (
    LANES,
    copy,
    get32,
    getd,
    getf,
    geti,
    jit,
    set32,
    setf,
    seth,
    seti,
    take,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vkeep,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vstoreh,
    vsub,
    vsum,
    vtop,
    zero,
)  # fmt: skip

_LOG2E = 1.4426950408889634
_NONE = np.float32(-np.inf)
_ONE = np.float32(1.0)


@jit
def _exp2(x):
    return vtop(vexp2(vsplat(x)))


@jit
def _squash(s, first, end, cap, factor):
    """s = cap * tanh(s * factor), with factor = scale / cap, in vectors first..end-1."""
    one, two = vsplat(_ONE), vsplat(np.float32(2.0))
    limit, most = vsplat(np.float32(factor * 2.0 * _LOG2E)), vsplat(np.float32(100.0))
    for v in range(first, end):
        here = s + v * LANES * 4
        power = vexp2(vmin(vmul(vload(here), limit), most))  # e^2x; tanh x = 1 - 2 / (e^2x + 1)
        tanh = vsub(one, vdiv(two, vadd(power, one)))
        vstore(here, vmul(tanh, vsplat(np.float32(cap))))


def _softmax(half: bool) -> Any:
    size = 2 if half else 4
    put = vstoreh if half else vstore

    @jit
    def softmax(s, p, low, high, columns, scale, cap, stats):
        """p = exp(score - m) of keys low..high-1, 0 of the other columns; m (base 2), l to stats.

        The sum runs lane by lane: lane i adds keys i, i + LANES, ... in order.
        """
        first, end = low // LANES, (high + LANES - 1) // LANES
        factor = scale * _LOG2E
        if cap > 0.0:
            _squash(s, first, end, cap, scale / cap)
            factor = _LOG2E
        for v in (first, end - 1):
            here = s + v * LANES * 4
            vstore(here, vkeep(vload(here), low - v * LANES, high - v * LANES, _NONE))
        top = vsplat(_NONE)
        for v in range(first, end):
            top = vmax(vload(s + v * LANES * 4), top)
        m = vtop(top) * np.float32(factor)
        slope, shift, total = vsplat(np.float32(factor)), vsplat(-m), vsplat(np.float32(0.0))
        for v in range(first, end):
            weight = vexp2(vfma(vload(s + v * LANES * 4), slope, shift))
            total = vadd(total, weight)
            put(p + v * LANES * size, weight)
        zero(p, first * LANES * size)
        zero(p + end * LANES * size, (columns - end * LANES) * size)
        setf(stats, m)
        setf(stats + 4, vsum(total))

    return softmax


@jit
def _join(o, stats, o_new, stats_new, dim):
    """Join a piece (o_new; m, l here stats_new) to what a row has so far."""
    m, m_new = getf(stats), getf(stats_new)
    if m_new == _NONE:
        return
    top = max(m, m_new)
    a, b = _exp2(m - top), _exp2(m_new - top)
    setf(stats, top)
    setf(stats + 4, getf(stats + 4) * a + getf(stats_new + 4) * b)
    va, vb = vsplat(a), vsplat(b)
    for i in range(0, dim * 4, LANES * 4):
        vstore(o + i, vfma(vload(o + i), va, vmul(vload(o_new + i), vb)))


@jit
def _reset(o, stats, rows, dim):
    zero(o, rows * dim * 4)
    for r in range(rows):
        setf(stats + 8 * r, _NONE)
        setf(stats + 8 * r + 4, np.float32(0.0))


def _finish(half: bool) -> Any:
    size = 2 if half else 4
    put, put_one = (vstoreh, seth) if half else (vstore, setf)

    @jit
    def finish(a, item, o, stats, dim):
        """out = o / l for the rows of an item."""
        heads, head_dim = geti(a + at.HEADS), geti(a + at.HEAD_DIM)
        groups = heads // geti(a + at.KV_HEADS)
        for r in range(geti(item + at.QUERIES) * groups):
            row = (geti(item + at.TOKEN) + r // groups) * heads
            head = geti(item + at.KV_HEAD) * groups + r % groups
            to = geti(a + at.OUT) + (row + head) * head_dim * size
            here, factor = o + r * dim * 4, _ONE / getf(stats + 8 * r + 4)
            whole = head_dim // LANES * LANES
            for i in range(0, whole, LANES):
                put(to + i * size, vmul(vload(here + i * 4), vsplat(factor)))
            for i in range(whole, head_dim):
                put_one(to + i * size, getf(here + i * 4) * factor)

    return finish


def _placement(half: bool, tiles: bool) -> tuple[Any, Any, Any]:
    size, pair = (2, 2) if half else (4, 1)
    keys = 16 if tiles else LANES  # of one vector or tile of K

    @jit
    def block(a, item, index):
        """Address of K of a block; V follows after block_size * dim values."""
        entry = get32(geti(a + at.TABLES) + (geti(item + at.TABLE) + index) * 4)
        dim = (geti(a + at.HEAD_DIM) + 15) // 16 * 16
        head = entry * geti(a + at.KV_HEADS) + geti(item + at.KV_HEAD)
        return geti(a + at.CACHE) + head * 2 * geti(a + at.BLOCK_SIZE) * dim * size

    @jit
    def place_k(a, item, start, count, dim, depth, pointers, room):
        """Addresses of the vectors of K of keys start..start+count-1; returns their stride.

        A block that is narrower than a vector, or whose depth is no multiple of a tile's, is
        gathered to `room`.
        """
        size_of_block = geti(a + at.BLOCK_SIZE)
        groups = (count + keys - 1) // keys
        direct = size_of_block % keys == 0 and dim == depth
        stride = size_of_block * 4 if direct else keys * 4
        for g in range(groups):
            key = start + g * keys
            if direct:
                here = block(a, item, key // size_of_block) + key % size_of_block * 4
            else:
                here = room + g * depth // pair * keys * 4
                part = min(size_of_block, keys)
                zero(here + dim // pair * keys * 4, (depth - dim) // pair * keys * 4)
                for k in range(0, keys, part):
                    index = min(key + k, start + count - 1) // size_of_block
                    source = block(a, item, index) + (key + k) % size_of_block * 4
                    for w in range(dim // pair):
                        copy(here + (w * keys + k) * 4, source + w * size_of_block * 4, part * 4)
            seti(pointers + 8 * g, here)
        for g in range(groups, (groups + 3) // 4 * 4):
            seti(pointers + 8 * g, geti(pointers + 8 * groups - 8))
        return stride

    @jit
    def clear_from(values, valid, words, dim):
        """Zero the keys from `valid` on in `words` words of V."""
        word = valid // pair
        if valid % pair:
            for i in range(dim):
                here = values + (word * dim + i) * 4
                set32(here, get32(here) & 0xFFFF)
            word += 1
        if word < words:
            zero(values + word * dim * 4, (words - word) * dim * 4)

    @jit
    def place_v(a, item, start, count, dim, pointers, room):
        """Addresses of the parts of V of keys start..start+count-1; returns keys in a part."""
        size_of_block = geti(a + at.BLOCK_SIZE)
        words = size_of_block // pair
        gather = tiles and size_of_block < 32
        per_part = 32 if tiles else size_of_block
        for b in range((count + size_of_block - 1) // size_of_block):
            here = block(a, item, start // size_of_block + b) + size_of_block * dim * size
            valid = min(size_of_block, count - b * size_of_block)
            if gather or valid < size_of_block:
                to = room + b * words * dim * 4
                copy(to, here, words * dim * 4)
                here = to
                if valid < size_of_block:
                    clear_from(here, valid, words, dim)
            if not gather:
                for part in range(size_of_block // per_part):
                    seti(pointers, here + part * per_part // pair * dim * 4)
                    pointers += 8
        if gather:
            end = (count + size_of_block - 1) // size_of_block * words
            parts = (count + 31) // 32
            if end < parts * 16:
                zero(room + end * dim * 4, (parts * 16 - end) * dim * 4)
            for part in range(parts):
                seti(pointers + 8 * part, room + part * 16 * dim * 4)
        return per_part

    @jit
    def pack_q(a, item, to, depth):
        """Rows of at.Q of an item, one after the other, each padded with zeros to `depth`."""
        head_dim, groups = geti(a + at.HEAD_DIM), geti(a + at.HEADS) // geti(a + at.KV_HEADS)
        first = geti(item + at.KV_HEAD) * groups * head_dim * size
        here = geti(a + at.Q) + geti(item + at.TOKEN) * geti(a + at.Q_STRIDE) + first
        for _ in range(geti(item + at.QUERIES)):
            for g in range(groups):
                copy(to, here + g * head_dim * size, head_dim * size)
                zero(to + head_dim * size, (depth - head_dim) * size)
                to += depth * size
            here += geti(a + at.Q_STRIDE)

    return place_k, place_v, pack_q


def attention(kind: str) -> Any:
    """The kernel for "float32", "bfloat16" (vectors) or "tiles" (bfloat16 on AMX)."""
    half, tiles = kind != "float32", kind == "tiles"
    size, pair = (2, 2) if half else (4, 1)
    scores, weighted = cpu_tiles.tile_products() if tiles else cpu_tiles.vector_products(half)
    softmax, finish = _softmax(half), _finish(half)
    place_k, place_v, pack_q = _placement(half, tiles)
    step = 4 * (16 if tiles else LANES)  # columns of scores are computed in steps of this many
    keys = 16 if tiles else LANES

    @jit
    def piece(a, item, index, scratch, q, o_new, r, count, dim, depth, k_stride, per_part):
        """One piece for rows r..r+count-1: o to o_new, (m, l) to stats; False if none is seen."""
        groups = geti(a + at.HEADS) // geti(a + at.KV_HEADS)
        window, start = geti(a + at.WINDOW), index * at.KEYS
        position = geti(item + at.POSITION)
        stats = scratch + at.STATS
        seen = min(at.KEYS, position + (r + count - 1) // groups + 1 - start)
        if seen <= 0:
            return False
        columns = (seen + step - 1) // step * step
        parts = (seen + per_part - 1) // per_part
        s, p, here = scratch + at.S, scratch + at.P, q + r * depth * size
        words, stride = depth // pair, depth * size
        keys_at, groups_of = scratch + at.K_AT, columns // keys
        scores(s, at.S_STRIDE, here, stride, count, keys_at, groups_of, words, k_stride)
        filled = max(parts * per_part, columns)
        scale, cap = getd(a + at.SCALE), getd(a + at.CAP)
        for i in range(count):
            high = position + (r + i) // groups + 1 - start
            low = max(0, high - window) if window > 0 else 0
            high = min(high, at.KEYS)
            row, to = s + i * at.S_STRIDE, p + i * at.P_STRIDE
            if low < high:
                softmax(row, to, low, high, filled, scale, cap, stats + 8 * i)
            else:
                zero(to, parts * per_part * size)
                setf(stats + 8 * i, _NONE)
        values, length, wide = scratch + at.V_AT, per_part // pair, dim // LANES
        weighted(o_new, dim * 4, p, at.P_STRIDE, count, values, parts, length, dim * 4, wide)
        return True

    @jit
    def join_shares(a, item, o, stats, rows, dim):
        """Join what all items of a group left, in the order of the pieces."""
        entry = (dim + 16) * 4
        here = geti(a + at.PARTIAL) + geti(item + at.SHARED) * 4
        _reset(o, stats, rows, dim)
        for _ in range(geti(item + at.GROUP_FIRST), geti(item + at.GROUP_LAST)):
            for r in range(rows):
                _join(o + r * dim * 4, stats + 8 * r, here, here + dim * 4, dim)
                here += entry

    @jit
    def attend(a, item, scratch):
        head_dim, groups = geti(a + at.HEAD_DIM), geti(a + at.HEADS) // geti(a + at.KV_HEADS)
        dim = (head_dim + 15) // 16 * 16
        depth = (dim + 31) // 32 * 32 if tiles else dim
        rows = geti(item + at.QUERIES) * groups
        padded = (rows + at.SUB - 1) // at.SUB * at.SUB
        q = scratch + at.REST
        o = q + padded * depth * size
        stats = o + padded * dim * 4
        o_new = stats + padded * 8
        room_k = o_new + at.SUB * dim * 4
        room_v = room_k + at.KEYS * depth * size
        if tiles:
            cpu_tiles.tiles_shape(scratch + at.CONFIG, min(rows, 16))
        pack_q(a, item, q, depth)
        _reset(o, stats, rows, dim)
        shared = geti(item + at.COUNT) != 0
        entry = (dim + 16) * 4
        end = geti(item + at.POSITION) + geti(item + at.QUERIES)
        for index in range(geti(item + at.FIRST), geti(item + at.LAST)):
            start = index * at.KEYS
            count = min(at.KEYS, end - start)
            k_stride = place_k(a, item, start, count, dim, depth, scratch + at.K_AT, room_k)
            per_part = place_v(a, item, start, count, dim, scratch + at.V_AT, room_v)
            number = index - geti(item + at.GROUP_FIRST)
            kept = geti(a + at.PARTIAL) + geti(item + at.SHARED) * 4 + number * rows * entry
            for r in range(0, rows, at.SUB):
                n = min(at.SUB, rows - r)
                there = piece(
                    a, item, index, scratch, q, o_new, r, n, dim, depth, k_stride, per_part
                )
                for i in range(n):
                    new, new_stats = o_new + i * dim * 4, scratch + at.STATS + 8 * i
                    if shared:
                        here = kept + (r + i) * entry
                        copy(here, new, dim * 4)
                        setf(here + dim * 4, getf(new_stats) if there else _NONE)
                        setf(here + dim * 4 + 4, getf(new_stats + 4))
                    elif there:
                        _join(o + (r + i) * dim * 4, stats + 8 * (r + i), new, new_stats, dim)
        if shared:
            if take(geti(item + at.COUNT)) != geti(item + at.SHARES) - 1:
                return
            seti(geti(item + at.COUNT), 0)  # for the next layer
            join_shares(a, item, o, stats, rows, dim)
        finish(a, item, o, stats, dim)

    @jit
    def work(a):
        scratch = geti(a + at.SCRATCH) + take(a + at.THREAD) * geti(a + at.SCRATCH_SIZE)
        index = take(a + at.COUNTER)
        while index < geti(a + at.NUM_ITEMS):
            attend(a, geti(a + at.ITEMS) + index * at.ITEM_SLOTS * 8, scratch)
            index = take(a + at.COUNTER)
        if tiles:
            cpu_tiles.tiles_off()

    def attention(a: int) -> None:
        work(a)

    return attention
