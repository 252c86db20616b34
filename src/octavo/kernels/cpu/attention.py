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
and AMX multiply, so blocks are used where they lie (see `tiles`). Keys past the end of the
sequence may hold anything, NaN too: scores are masked, and V's last block is copied with zeros.

A cache of codes (int8, fp8): [blocks, kv_heads, bytes]; in bytes K as [block_size / RUN][dim][RUN]
with RUN = min(16, block_size), V as [block_size][dim], then float32 scales [block_size] of K and of
V. The codes of a piece are decoded to words in scratch, which is exact, once for all rows of an
item; K's scales go on the scores, V's on the weights.

An item of work is some queries of one row for one KV head over a range of pieces. The queries
and the heads of the group are the rows of its products: row r is query r // groups. Where rows that
decode have the same blocks (a prefix of theirs was cached, or they are choices of one prompt), a
piece of these is an item of its own for all of them: its keys are read once.
"""

from typing import Any

import numpy as np
from numba import types

from octavo.kernels.cpu import abi, amx
from octavo.kernels.cpu import tiles as cpu_tiles
from octavo.kernels.cpu.simd import (
    LANES,
    Vec,
    copy,
    decode,
    fetch,
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
    vexp2_rough,
    vfma,
    vkeep,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vstore2,
    vstoreh,
    vstoreh2,
    vsub,
    vsum,
    vtop,
    zero,
)  # fmt: skip

_CALL, _STEP, _ITEM = abi.ATTENTION.offset, abi.ATTENTION_STEP.offset, abi.ATTENTION_ITEM.offset
_ITEM_BYTES = abi.ATTENTION_ITEM.nbytes
_LOG2E = 1.4426950408889634
_NONE = np.float32(-1e30)  # below any score; finite, so that two of them can be subtracted
_ONE = np.float32(1.0)
_AHEAD = 4  # runs of codes that are asked for before they are decoded


@jit(returns=types.int64)
def of_step(a, field):
    """A field of the step, which all layers of one kind share."""
    return geti(geti(a + _CALL.step) + field)


@jit(returns=types.int64)
def groups_of(a):
    """Query heads of a KV head."""
    return of_step(a, _STEP.heads) // of_step(a, _STEP.kv_heads)


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


def _softmax(half: bool, coded: bool) -> Any:
    size, step = (2 if half else 4), 4 * LANES
    put, exp2 = (vstoreh2, vexp2_rough) if half else (vstore2, vexp2)

    @jit(returns=types.float32)
    def peak(s, low, high, factor):
        """Mask a row of scores outside low..high-1, up to whole steps; returns its maximum."""
        first, end = low // step * 4, (high + step - 1) // step * 4  # in vectors
        for v in range(first, (low + LANES - 1) // LANES):
            here = s + v * LANES * 4
            vstore(here, vkeep(vload(here), low - v * LANES, LANES, _NONE))
        for v in range(high // LANES, end):
            here = s + v * LANES * 4
            vstore(here, vkeep(vload(here), 0, high - v * LANES, _NONE))
        t0 = t1 = t2 = t3 = vsplat(_NONE)
        for here in range(s + first * LANES * 4, s + end * LANES * 4, step * 4):
            t0, t1 = vmax(vload(here), t0), vmax(vload(here + LANES * 4), t1)
            t2, t3 = vmax(vload(here + LANES * 8), t2), vmax(vload(here + LANES * 12), t3)
        return vtop(vmax(vmax(t0, t1), vmax(t2, t3))) * factor

    @jit(returns=Vec)
    def scaled(w, scales, index):
        return vmul(w, vload(scales + index * LANES * 4)) if coded else w

    @jit
    def descale(s, low, high, scales):
        for v in range(low // step * 4, (high + step - 1) // step * 4):
            vstore(s + v * LANES * 4, scaled(vload(s + v * LANES * 4), scales, v))

    @jit(returns=Vec)
    def weights(s, low, high, filled, factor, m, scales):
        """Scores to exp2(factor * score - m), in place; 0 outside low..high-1, up to `filled`.
        Returns the sum by lanes: lane i of sum j adds keys i + LANES * (j + 4 n) in order.
        What is stored has V's scales on it."""
        first, end = low // step * 4, (high + step - 1) // step * 4
        slope, shift = vsplat(factor), vsplat(-m)
        t0 = t1 = t2 = t3 = vsplat(np.float32(0.0))
        to = s + first * LANES * size
        for here in range(s + first * LANES * 4, s + end * LANES * 4, step * 4):
            w0 = exp2(vfma(vload(here), slope, shift))
            w1 = exp2(vfma(vload(here + LANES * 4), slope, shift))
            w2 = exp2(vfma(vload(here + LANES * 8), slope, shift))
            w3 = exp2(vfma(vload(here + LANES * 12), slope, shift))
            t0, t1, t2, t3 = vadd(t0, w0), vadd(t1, w1), vadd(t2, w2), vadd(t3, w3)
            v = (here - s) // (LANES * 4)
            put(to, scaled(w0, scales, v), scaled(w1, scales, v + 1))
            put(to + step // 2 * size, scaled(w2, scales, v + 2), scaled(w3, scales, v + 3))
            to += step * size
        if first > 0:
            zero(s, first * LANES * size)
        if end * LANES < filled:
            zero(s + end * LANES * size, (filled - end * LANES) * size)
        return vadd(vadd(t0, t1), vadd(t2, t3))

    @jit
    def softmax(scratch, rows, first, groups, window, filled, scale, cap, m, l):  # noqa: E741
        """Scores of `rows` rows to weights, in place; m (in base 2) and l of each.

        Row r is query (first + r) // groups, counted so that query i sees the keys up to i. Three
        passes over the rows, so that no row waits for the sum of the one before.
        """
        factor = np.float32((scale if cap == 0.0 else 1.0) * _LOG2E)
        s, room = scratch + abi.S, scratch + abi.SUMS
        for r in range(rows):
            high = (first + r) // groups + 1
            low = max(0, high - window) if window > 0 else 0
            row, high = s + r * abi.SCORE_STRIDE, min(high, abi.SPLIT_KEYS)
            top = _NONE
            if low < high:
                if coded:
                    descale(row, low, high, scratch + abi.K_SCALES)
                if cap > 0.0:
                    begin, end = low // step * 4, (high + step - 1) // step * 4
                    _squash(row, begin, end, cap, scale / cap)
                top = peak(row, low, high, factor)
            setf(m + 4 * r, top)
        for r in range(rows):
            high = (first + r) // groups + 1
            low = max(0, high - window) if window > 0 else 0
            row, high = s + r * abi.SCORE_STRIDE, min(high, abi.SPLIT_KEYS)
            total = vsplat(np.float32(0.0))
            if low < high:
                scales = scratch + abi.V_SCALES
                total = weights(row, low, high, filled, factor, getf(m + 4 * r), scales)
            else:
                zero(row, filled * size)
            vstore(room + r * LANES * 4, total)
        for r in range(rows):
            setf(l + 4 * r, vsum(vload(room + r * LANES * 4)))

    return softmax


@jit
def _join(o, m, l, new_o, new_m, new_l, rows, dim, room):  # noqa: E741
    """Join a piece (new_...) to what up to SUB rows have so far. A row that saw nothing yet, or
    sees nothing of this piece, has l = 0, o = 0 and a least m."""
    for i in range(0, rows * 4, LANES * 4):
        old, new = vload(m + i), vload(new_m + i)
        top = vmax(old, new)
        a, b = vexp2(vsub(old, top)), vexp2(vsub(new, top))
        vstore(room + i, a)
        vstore(room + abi.QUERY_ROWS * 4 + i, b)
        vstore(m + i, top)
        vstore(l + i, vfma(vload(l + i), a, vmul(vload(new_l + i), b)))
    for r in range(rows):
        a, b = vsplat(getf(room + 4 * r)), vsplat(getf(room + abi.QUERY_ROWS * 4 + 4 * r))
        for i in range(r * dim * 4, (r + 1) * dim * 4, LANES * 4):
            vstore(o + i, vfma(vload(o + i), a, vmul(vload(new_o + i), b)))


def _finish(half: bool) -> Any:
    size = 2 if half else 4
    put, put_one = (vstoreh, seth) if half else (vstore, setf)

    @jit
    def finish(a, item, o, l, dim):  # noqa: E741
        """out = o / l for the rows of an item."""
        heads, head_dim = of_step(a, _STEP.heads), of_step(a, _STEP.head_dim)
        groups = heads // of_step(a, _STEP.kv_heads)
        for r in range(geti(item + _ITEM.num_queries) * groups):
            row = (geti(item + _ITEM.token) + r // groups) * heads
            head = geti(item + _ITEM.kv_head) * groups + r % groups
            to = geti(a + _CALL.out) + (row + head) * head_dim * size
            here, factor = o + r * dim * 4, _ONE / getf(l + 4 * r)
            whole = head_dim // LANES * LANES
            for i in range(0, whole, LANES):
                put(to + i * size, vmul(vload(here + i * 4), vsplat(factor)))
            for i in range(whole, head_dim):
                put_one(to + i * size, getf(here + i * 4) * factor)

    return finish


def _placement(half: bool, tiles: bool) -> tuple[Any, Any, Any]:
    size, pair = (2, 2) if half else (4, 1)
    keys = 16 if tiles else LANES  # of one vector or tile of K

    @jit(returns=types.int64)
    def block(a, item, index):
        """Address of K of a block; V follows after block_size * dim values."""
        entry = get32(of_step(a, _STEP.tables) + (geti(item + _ITEM.table) + index) * 4)
        dim = (of_step(a, _STEP.head_dim) + 15) // 16 * 16
        head = entry * of_step(a, _STEP.kv_heads) + geti(item + _ITEM.kv_head)
        return geti(a + _CALL.cache) + head * 2 * of_step(a, _STEP.block_size) * dim * size

    @jit(returns=types.int64)
    def place_k(a, item, start, count, dim, depth, scratch, room):
        """Addresses (at K_AT) of the vectors of K of keys start..start+count-1; returns their
        stride.

        A block that is narrower than a vector, or whose depth is no multiple of a tile's, is
        gathered to `room`.
        """
        size_of_block, pointers = of_step(a, _STEP.block_size), scratch + abi.K_AT
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

    @jit(returns=types.int64)
    def place_v(a, item, start, count, dim, scratch, room):
        """Addresses (at V_AT) of the parts of V of these keys; returns keys in a part."""
        size_of_block, pointers = of_step(a, _STEP.block_size), scratch + abi.V_AT
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
        """Rows of Q of an item, one after the other, each padded with zeros to `depth`."""
        head_dim, groups = of_step(a, _STEP.head_dim), groups_of(a)
        first = geti(item + _ITEM.kv_head) * groups * head_dim * size
        here = geti(a + _CALL.q) + geti(item + _ITEM.token) * geti(a + _CALL.q_stride) + first
        for _ in range(geti(item + _ITEM.num_queries)):
            for g in range(groups):
                copy(to, here + g * head_dim * size, head_dim * size)
                zero(to + head_dim * size, (depth - head_dim) * size)
                to += depth * size
            here += geti(a + _CALL.q_stride)

    return place_k, place_v, pack_q


def _decoding(half: bool, tiles: bool, kind: str) -> tuple[Any, Any]:
    """What `_placement` does, from a cache of codes of `kind`: everything goes to `room`."""
    pair, keys = 2 if half else 1, 16 if tiles else LANES
    whole, eight = decode(kind, half, keys), decode(kind, half, 8)

    @jit(returns=types.int64)
    def run_of(a, item, key, dim, values):
        """Address of the run of codes of a key: of V if `values` is 1, else of K."""
        size = of_step(a, _STEP.block_size)
        entry = get32(of_step(a, _STEP.tables) + (geti(item + _ITEM.table) + key // size) * 4)
        head = entry * of_step(a, _STEP.kv_heads) + geti(item + _ITEM.kv_head)
        block = geti(a + _CALL.cache) + head * 2 * size * (dim + abi.SCALE_BYTES)
        return block + (values * size + key % size) * dim

    @jit
    def take_scales(a, item, start, count, dim, scratch):
        size, done = of_step(a, _STEP.block_size), 0
        while done < count:
            n = min(size, count - done)
            here = run_of(a, item, start + done, dim, 0) + 2 * size * dim
            copy(scratch + abi.K_SCALES + done * 4, here, n * 4)
            copy(scratch + abi.V_SCALES + done * 4, here + size * 4, n * 4)
            done += n
        zero(scratch + abi.K_SCALES + count * 4, (abi.SPLIT_KEYS - count) * 4)
        zero(scratch + abi.V_SCALES + count * 4, (abi.SPLIT_KEYS - count) * 4)

    @jit(returns=types.int64)
    def place_k(a, item, start, count, dim, depth, scratch, room):
        run, last = min(of_step(a, _STEP.block_size), abi.RUN), start + count - 1
        for key in range(0, count, run):
            codes = run_of(a, item, start + key, dim, 0)
            ahead = run_of(a, item, min(start + key + _AHEAD * run, last) // run * run, dim, 0)
            for k in range(0, run, keys):
                here = room + (key + k) // keys * depth // pair * keys * 4
                first, lane = codes + k, (key + k) % keys
                for w in range(dim // pair):
                    fetch(ahead + w * pair * run)
                    if run >= keys:
                        whole(here + w * keys * 4, first, first + run)
                    else:
                        eight(here + (w * keys + lane) * 4, first, first + run)
                    first += pair * run
                zero(here + dim // pair * keys * 4, (depth - dim) // pair * keys * 4)
        most = (count + keys - 1) // keys - 1
        for g in range((most + 4) // 4 * 4):
            seti(scratch + abi.K_AT + 8 * g, room + min(g, most) * depth // pair * keys * 4)
        take_scales(a, item, start, count, dim, scratch)
        return keys * 4

    @jit(returns=types.int64)
    def place_v(a, item, start, count, dim, scratch, room):
        run, last = min(of_step(a, _STEP.block_size), abi.RUN), start + count - 1
        parts, to = (count + 31) // 32, room
        for key in range(0, count, run):
            codes = run_of(a, item, start + key, dim, 1)
            ahead = run_of(a, item, min(start + key + _AHEAD * run, last) // run * run, dim, 1)
            for w in range(run // pair):
                for i in range(0, dim, keys):
                    fetch(ahead + (w * dim + i) * pair)
                    whole(to + i * 4, codes + i, codes + i + dim)
                to += dim * 4
                codes += dim * pair
        zero(to, room + parts * 32 // pair * dim * 4 - to)
        for part in range(parts):
            seti(scratch + abi.V_AT + 8 * part, room + part * 32 // pair * dim * 4)
        return 32

    return place_k, place_v


def attention(variant: str) -> Any:
    """The kernel for "float32", "bfloat16" (vectors) or "tiles" (bfloat16 on AMX), over a cache
    of that type, or of codes: "tiles-int8"."""
    kind, _, codes = variant.partition("-")
    half, tiles, coded = kind != "float32", kind == "tiles", bool(codes)
    size, pair = (2, 2) if half else (4, 1)
    scores, weighted = cpu_tiles.tile_products() if tiles else cpu_tiles.vector_products(half)
    softmax, finish = _softmax(half, coded), _finish(half)
    place_k, place_v, pack_q = _placement(half, tiles)
    if coded:
        place_k, place_v = _decoding(half, tiles, codes)
    step = 4 * (16 if tiles else LANES)  # columns of scores are computed in steps of this many
    keys = 16 if tiles else LANES

    @jit
    def piece(a, item, index, scratch, q, o, m, l, r, count, k_stride, per_part, room):  # noqa: E741
        """o, m, l of one piece of the keys for rows r..r+count-1 (row r of Q is at q).

        With a `per_part` of 0, V is decoded here, where K was: both would not stay in L1.
        """
        head_dim, groups = of_step(a, _STEP.head_dim), groups_of(a)
        dim = (head_dim + 15) // 16 * 16
        depth = (dim + 31) // 32 * 32 if tiles else dim
        window, start, position = (
            of_step(a, _STEP.window),
            index * abi.SPLIT_KEYS,
            geti(item + _ITEM.position),
        )
        seen = min(abi.SPLIT_KEYS, position + (r + count - 1) // groups + 1 - start)
        columns = (seen + step - 1) // step * step
        unit = per_part if per_part > 0 else 32
        parts = (seen + unit - 1) // unit
        s, k_at, v_at = scratch + abi.S, scratch + abi.K_AT, scratch + abi.V_AT
        words, wide = depth // pair, dim // LANES
        scores(s, abi.SCORE_STRIDE, q, depth * size, count, k_at, columns // keys, words, k_stride)
        first = (position - start) * groups + r
        filled = max(parts * unit, columns)
        scale, cap = (
            getd(geti(a + _CALL.step) + _STEP.scale),
            getd(geti(a + _CALL.step) + _STEP.cap),
        )
        softmax(scratch, count, first, groups, window, filled, scale, cap, m, l)
        if coded and per_part == 0:
            whole = min(abi.SPLIT_KEYS, position + geti(item + _ITEM.num_queries) - start)
            place_v(a, item, start, whole, dim, scratch, room)
        words = unit // pair
        weighted(o, dim * 4, s, abi.SCORE_STRIDE, count, v_at, parts, words, dim * 4, wide)

    @jit
    def nothing(o, m, l, rows, dim):  # noqa: E741
        """What rows have that see no key."""
        zero(o, rows * dim * 4)
        zero(l, rows * 4)
        for r in range(rows):
            setf(m + 4 * r, _NONE)

    @jit
    def join_shares(a, item, o, m, l, rows, dim, room):  # noqa: E741
        """Join what all items of a group left, in the order of the pieces."""
        tall = (rows + 15) // 16 * 16
        entry = (tall * dim + 2 * abi.QUERY_ROWS) * 4
        kept = of_step(a, _STEP.partial) + geti(item + _ITEM.partial) * 4
        nothing(o, m, l, rows, dim)
        for _ in range(geti(item + _ITEM.block_begin), geti(item + _ITEM.block_end)):
            stats = kept + tall * dim * 4
            _join(o, m, l, kept, stats, stats + abi.QUERY_ROWS * 4, rows, dim, room)
            kept += entry

    @jit
    def settle(a, item, o, m, l, rows, dim, room):  # noqa: E741
        """An item of a group is done; the last one to be joins what all left."""
        if take(geti(item + _ITEM.counter)) == geti(item + _ITEM.num_items) - 1:
            seti(geti(item + _ITEM.counter), 0)  # for the next layer
            join_shares(a, item, o, m, l, rows, dim, room)
            finish(a, item, o, l, dim)

    @jit
    def attend_together(a, item, scratch):
        """A piece that one query of each of several rows sees whole."""
        head_dim, groups = of_step(a, _STEP.head_dim), groups_of(a)
        dim = (head_dim + 15) // 16 * 16
        depth = (dim + 31) // 32 * 32 if tiles else dim
        members, count = geti(item + _ITEM.members), geti(item + _ITEM.num_queries)
        index, rows = geti(item + _ITEM.split_begin), count * groups
        q = scratch + abi.REST
        o = q + abi.QUERY_ROWS * depth * size
        m, new_o = o + abi.QUERY_ROWS * dim * 4, o + abi.QUERY_ROWS * dim * 4 + abi.QUERY_ROWS * 8
        l, new_m = m + abi.QUERY_ROWS * 4, scratch + abi.STATS  # noqa: E741
        new_l = new_m + abi.QUERY_ROWS * 4
        room_k = new_o + abi.QUERY_ROWS * dim * 4
        room_v = room_k + abi.SPLIT_KEYS * depth * size
        if tiles:
            amx.configure(scratch + abi.CONFIG, min(rows, 16), min(rows, 16))
        for i in range(count):
            pack_q(a, geti(members + 8 * i), q + i * groups * depth * size, depth)
        start = index * abi.SPLIT_KEYS
        k_stride = place_k(a, item, start, abi.SPLIT_KEYS, dim, depth, scratch, room_k)
        per_part = 0
        if not coded:
            per_part = place_v(a, item, start, abi.SPLIT_KEYS, dim, scratch, room_v)
        piece(a, item, index, scratch, q, new_o, new_m, new_l, 0, rows, k_stride, per_part, room_k)
        tall = (groups + 15) // 16 * 16
        for i in range(count):
            mine = geti(members + 8 * i)
            number = index - geti(mine + _ITEM.block_begin)
            kept = of_step(a, _STEP.partial) + geti(mine + _ITEM.partial) * 4
            kept += number * (tall * dim + 2 * abi.QUERY_ROWS) * 4
            stats = kept + tall * dim * 4
            copy(kept, new_o + i * groups * dim * 4, groups * dim * 4)
            copy(stats, new_m + i * groups * 4, groups * 4)
            copy(stats + abi.QUERY_ROWS * 4, new_l + i * groups * 4, groups * 4)
            settle(a, mine, o, m, l, groups, dim, scratch + abi.FACTORS)

    @jit
    def attend(a, item, scratch):
        head_dim, groups = of_step(a, _STEP.head_dim), groups_of(a)
        dim = (head_dim + 15) // 16 * 16
        depth = (dim + 31) // 32 * 32 if tiles else dim
        rows, window = geti(item + _ITEM.num_queries) * groups, of_step(a, _STEP.window)
        padded = (rows + abi.QUERY_ROWS - 1) // abi.QUERY_ROWS * abi.QUERY_ROWS
        q = scratch + abi.REST
        o = q + padded * depth * size
        m, new_o = o + padded * dim * 4, o + padded * dim * 4 + padded * 8
        l, new_m = m + padded * 4, scratch + abi.STATS  # noqa: E741
        new_l = new_m + abi.QUERY_ROWS * 4
        room_k = new_o + abi.QUERY_ROWS * dim * 4
        room_v = room_k + abi.SPLIT_KEYS * depth * size
        if tiles:
            amx.configure(scratch + abi.CONFIG, min(rows, 16), min(rows, 16))
        pack_q(a, item, q, depth)
        nothing(o, m, l, rows, dim)
        shared, position = geti(item + _ITEM.counter) != 0, geti(item + _ITEM.position)
        kept = of_step(a, _STEP.partial) + geti(item + _ITEM.partial) * 4
        for index in range(geti(item + _ITEM.split_begin), geti(item + _ITEM.split_end)):
            start = index * abi.SPLIT_KEYS
            count = min(abi.SPLIT_KEYS, position + geti(item + _ITEM.num_queries) - start)
            k_stride = place_k(a, item, start, count, dim, depth, scratch, room_k)
            per_part = 0
            if not coded or rows > abi.QUERY_ROWS:
                per_part = place_v(a, item, start, count, dim, scratch, room_v)
            for r in range(0, rows, abi.QUERY_ROWS):
                n = min(abi.QUERY_ROWS, rows - r)
                to_o, to_m, to_l = new_o, new_m, new_l
                if shared:
                    number = index - geti(item + _ITEM.block_begin)
                    tall = (rows + 15) // 16 * 16
                    to_o = kept + number * (tall * dim + 2 * abi.QUERY_ROWS) * 4
                    to_m = to_o + tall * dim * 4
                    to_l = to_m + abi.QUERY_ROWS * 4
                newest, oldest = position + (r + n - 1) // groups, position + r // groups
                if newest < start or (window > 0 and oldest - window >= start + abi.SPLIT_KEYS - 1):
                    if shared:
                        nothing(to_o, to_m, to_l, n, dim)
                    continue
                q_at = q + r * depth * size
                piece(
                    a,
                    item,
                    index,
                    scratch,
                    q_at,
                    to_o,
                    to_m,
                    to_l,
                    r,
                    n,
                    k_stride,
                    per_part,
                    room_k,
                )
                if not shared:
                    o_at, m_at, l_at = o + r * dim * 4, m + r * 4, l + r * 4
                    _join(o_at, m_at, l_at, to_o, to_m, to_l, n, dim, scratch + abi.FACTORS)
        if shared:
            settle(a, item, o, m, l, rows, dim, scratch + abi.FACTORS)
        else:
            finish(a, item, o, l, dim)

    @jit
    def work(a):
        scratch = of_step(a, _STEP.scratch) + take(a + _CALL.thread) * of_step(
            a, _STEP.scratch_size
        )
        index = take(a + _CALL.counter)
        while index < of_step(a, _STEP.num_items):
            item = of_step(a, _STEP.items) + index * _ITEM_BYTES
            if geti(item + _ITEM.members) != 0:
                attend_together(a, item, scratch)
            else:
                attend(a, item, scratch)
            index = take(a + _CALL.counter)
        if tiles:
            amx.release()

    def attention(a: int) -> None:
        work(a)

    return attention
