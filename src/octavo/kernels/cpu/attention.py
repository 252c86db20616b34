"""Paged attention on the CPU, for any mix of long and short rows.

    out[t, h] = sum over keys of softmax(scale * q[t, h] . k[key, g]) * v[key, g],  g = h // groups

The keys of a sequence are split at fixed positions, every SPLIT_KEYS keys. Each KV split yields a
maximum m, a sum l of exp(score - m), and a weighted sum o; splits are joined in order:

    M = max(m, m');  l = l e^(m - M) + l' e^(m' - M);  o = o e^(m - M) + o' e^(m' - M)

So a query's result depends only on its sequence and position: not on the other rows, on prefill
chunks, on the number of threads, nor on whether several threads computed its splits (then the
last one to finish merges the partial results, in the same order). Masked keys add exact zeros.

Cache of a layer: [blocks, kv_heads, 2, block_size * dim] with dim = head_dim rounded up to 16.
In 32-bit words (a pair of neighbouring bfloat16, or one float32) K is [dim / pair][block_size],
pairs along dim; V is [block_size / pair][dim], pairs along keys. The vector units and AMX multiply
this layout, so blocks are read in place (see `tiles`). Keys past the end of the sequence may hold
anything, even NaN: scores are masked, and V's last block is copied and padded with zeros.

A cache of codes (int8, fp8): [blocks, kv_heads, bytes]; in bytes K as
[block_size / RUN][dim / 2][RUN][2] with RUN = min(16, block_size), V as [block_size / 2][dim][2],
then float32 scales [block_size] of K and of V, which are applied to the scores and to the weights.
Vector units read the codes of queries in bfloat16 in place, those of fp8 as bfloat16 and those of
int8 as integers (see `tiles`): queries and weights become int16, which is 120 times as fine as
bfloat16 and makes each sum exact. For AMX, for float32, and of fp8 for DECODED_ROWS rows and more,
the codes of a split are decoded to words in scratch, which is exact, once for all rows of a work
item. Queries in float32 read a cache of bfloat16 in place.

A work item is a query block (queries of one row, for one KV head) over a range of KV splits. The
queries and the heads of the group are the rows of its products: row r is query r // groups. Where
decoding rows have the same blocks (a cached prefix, or choices of one prompt), a split of these
is a separate work item for all of the rows: its keys are read once.
Everything that depends only on the step (sizes, the layout of a thread's scratch) is computed by
the caller (see `abi.ATTENTION_STEP`).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import types

from octavo.kernels.cpu import abi, amx
from octavo.kernels.cpu import tiles as cpu_tiles
from octavo.kernels.cpu.attention_kv import (
    announce_next,
    decode_k,
    decode_v,
    load_k,
    load_v,
    point_to_k,
    point_to_v,
)
from octavo.kernels.cpu.attention_softmax import init_accumulators, join, softmax
from octavo.kernels.cpu.simd import (
    LANES,
    copy,
    getf,
    geti,
    jit,
    row_memory,
    setf,
    seth,
    seti,
    take,
    vabs,
    vlarger,
    vlargest,
    vload,
    vmul,
    vsplat,
    vstore,
    vstore16,
    vstoreh,
    zero,
)
from octavo.kernels.cpu.tiles import Products

_CALL, _STEP, _ITEM = abi.ATTENTION.offset, abi.ATTENTION_STEP.offset, abi.ATTENTION_ITEM.offset
_SPLIT = abi.ATTENTION_SPLIT.offset
_ITEM_BYTES = abi.ATTENTION_ITEM.nbytes
_L = abi.QUERY_ROWS * 4  # from m to l in the statistics of QUERY_ROWS rows
_ONE = np.float32(1.0)


@dataclass(frozen=True, slots=True)
class _Variant:
    """An attention kernel: kind: "float32", "bfloat16" (vectors) or "tiles" (bfloat16 on AMX);
    stored: what the cache holds, if not values of the queries' dtype."""

    kind: str
    stored: str

    @property
    def tiles(self) -> bool:
        return self.kind == "tiles"

    @property
    def half(self) -> bool:
        """Whether queries and outputs are bfloat16."""
        return self.kind != "float32"

    @property
    def coded(self) -> bool:
        """Whether the cache holds codes and scales."""
        return self.stored in ("int8", "fp8")

    @property
    def in_place(self) -> bool:
        """Whether few rows multiply the cache as it is stored."""
        return not self.coded or self.kind == "bfloat16"

    @property
    def decodes_for_many(self) -> bool:
        """Whether many rows multiply decoded words all the same: an fp8 takes five instructions,
        which is much for six rows, an int8 one."""
        return self.in_place and self.stored == "fp8"

    @property
    def products(self) -> Products:
        """What few rows are multiplied by."""
        numbers = "bfloat16" if self.half else "float32"  # tiles multiply bfloat16, too
        if self.kind == "bfloat16" and self.stored == "int8":
            numbers = "int16"
        scaled = self.coded and self.in_place
        return Products(numbers, self.stored if self.in_place else "", scaled)


def _load_queries(numbers: str) -> Any:
    size = 4 if numbers == "float32" else 2
    integer = numbers == "int16"
    to_integers = _integer_head()

    @jit
    def load_item(a, item, to, stride):
        """Rows of Q of an item, `stride` bytes apart, each padded with zeros to `depth`."""
        step = geti(a + _CALL.step)
        used, depth = geti(step + _STEP.head_dim) * size, geti(step + _STEP.depth) * size
        groups, q_stride = geti(step + _STEP.groups), geti(a + _CALL.q_stride)
        here = geti(a + _CALL.q) + geti(item + _ITEM.token) * q_stride
        here += geti(item + _ITEM.kv_head) * groups * used
        for _ in range(geti(item + _ITEM.num_queries)):
            for g in range(groups):
                if integer:
                    to_integers(to, here + g * used, used // size, depth // size)
                else:
                    copy(to, here + g * used, used)
                    zero(to + used, depth - used)
                to += stride
            here += q_stride

    @jit
    def load_queries(a, item, scratch):
        """The queries of an item, or of the members of a shared-prefix group."""
        step, members = geti(a + _CALL.step), geti(item + _ITEM.members)
        stride = geti(step + _STEP.depth) * size + (abi.SCALE_BYTES if integer else 0)
        if members == 0:
            load_item(a, item, scratch + abi.Q, stride)
            return
        groups = geti(step + _STEP.groups)
        for i in range(geti(item + _ITEM.num_queries)):
            to = scratch + abi.Q + i * groups * stride
            load_item(a, geti(members + 8 * i), to, stride)

    return load_queries


def _integer_head() -> Any:
    """A function that rounds a head of bfloat16 to int16, zeros up to `depth`, then its scale."""
    _, read, _ = row_memory(half=True)

    @jit
    def to_integers(to, x, used, depth):
        # The scale multiplies masked scores, too (-1e30): of a head of zeros it must not hide them.
        most = vsplat(np.float32(2.0**-60))
        for i in range(0, used, LANES):
            most = vlarger(vabs(read(x + i * 2, used - i)), most)
        top = vlargest(most)
        factor = vsplat(np.float32(32767.0) / top)
        for i in range(0, used, LANES):
            vstore16(to + i * 2, vmul(read(x + i * 2, used - i), factor))
        zero(to + used * 2, (depth - used) * 2)
        setf(to + depth * 2, top / np.float32(32767.0))

    return to_integers


def _store_output(half: bool) -> Any:
    size = 2 if half else 4
    put, put_one = (vstoreh, seth) if half else (vstore, setf)

    @jit
    def store_output(a, item, scratch):
        """out = o / l for the rows of an item, from the accumulators."""
        step = geti(a + _CALL.step)
        head_dim, groups = geti(step + _STEP.head_dim), geti(step + _STEP.groups)
        o, stats = scratch + geti(step + _STEP.at_o), scratch + geti(step + _STEP.at_stats)
        first, whole = geti(item + _ITEM.kv_head) * groups, head_dim // LANES * LANES
        for r in range(geti(item + _ITEM.rows)):
            token = geti(item + _ITEM.token) + r // groups
            head = token * geti(step + _STEP.heads) + first + r % groups
            to, here = (
                geti(a + _CALL.out) + head * head_dim * size,
                o + r * geti(step + _STEP.dim) * 4,
            )
            block = stats + r // abi.QUERY_ROWS * 2 * _L
            factor = _ONE / getf(block + _L + r % abi.QUERY_ROWS * 4)
            for i in range(0, whole, LANES):
                put(to + i * size, vmul(vload(here + i * 4), vsplat(factor)))
            for i in range(whole, head_dim):
                put_one(to + i * size, getf(here + i * 4) * factor)

    return store_output


def _attend_rows(variant: _Variant, load_late: Any, decoded: bool) -> Any:
    """A function that writes o, m, l of one KV split for up to QUERY_ROWS rows of an item."""
    tiles, how = variant.tiles, variant.products
    if decoded:
        how = replace(how, stored="")
    size, pair = 4 if how.kind == "float32" else 2, how.pair
    integer = how.kind == "int16"
    row_end = abi.SCALE_BYTES if integer else 0  # of a row of Q
    scores, weighted = cpu_tiles.tile_products() if tiles else cpu_tiles.vector_products(how)
    to_weights = softmax(how.kind, variant.coded, how.scaled)
    announce = announce_next(variant.half or variant.stored != "", variant.coded)
    keys = 16 if tiles else LANES  # of one vector or tile of K; scores are computed four at a time

    @jit
    def attend_rows(a, item, scratch, first, o, stats):
        """Rows `first`... of the split in SPLIT.

        V is loaded here, if it is not yet: what it takes from memory has been prefetched meanwhile.
        If it is decoded, then over K: both would not fit in L1.
        """
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        groups, dim, depth = (
            geti(step + _STEP.groups),
            geti(step + _STEP.dim),
            geti(step + _STEP.depth),
        )
        rows = min(abi.QUERY_ROWS, geti(item + _ITEM.rows) - first)
        before = geti(item + _ITEM.position) - geti(split + _SPLIT.start)
        seen = min(abi.SPLIT_KEYS, before + (first + rows - 1) // groups + 1)
        columns = (seen + 4 * keys - 1) // (4 * keys) * 4 * keys
        v_keys = 32 if tiles or decoded else geti(step + _STEP.block_size)
        pieces = (seen + v_keys - 1) // v_keys
        s, q, k_stride = scratch + abi.S, scratch + abi.Q, geti(split + _SPLIT.k_stride)
        q_stride = depth * size + row_end
        q += first * q_stride
        scores(s, q, q_stride, rows, scratch + abi.K_AT, columns // keys, depth // pair, k_stride)
        if integer:  # the softmax applies the scales of the rows
            for r in range(rows):
                of_row = getf(q + r * q_stride + depth * size)
                setf(s + r * abi.SCORE_STRIDE + abi.SPLIT_KEYS * 4, of_row)
        filled = max(pieces * v_keys, columns)
        to_weights(scratch, step, stats, before * groups + first, rows, filled)
        if geti(split + _SPLIT.v_keys) == 0:
            load_late(
                a, item, scratch, scratch + geti(step + (_STEP.at_k if decoded else _STEP.at_v))
            )
            if not (tiles or decoded):
                announce(a, item, scratch, geti(split + _SPLIT.start) // abi.SPLIT_KEYS)
        v_at = scratch + abi.V_AT
        weighted(o, s, rows, v_at, pieces, v_keys // pair, dim)

    return attend_rows


def _finish_split(store_output: Any) -> Any:
    @jit
    def merge(a, item, scratch):
        """Merge the partial results of a query block, in the order of its splits."""
        step, rows = geti(a + _CALL.step), geti(item + _ITEM.rows)
        dim, entry = geti(step + _STEP.dim), geti(item + _ITEM.partial_bytes)
        o, stats = scratch + geti(step + _STEP.at_o), scratch + geti(step + _STEP.at_stats)
        init_accumulators(o, stats, rows, dim)
        new = geti(item + _ITEM.partial)
        for _ in range(geti(item + _ITEM.block_begin), geti(item + _ITEM.block_end)):
            join(o, stats, new, new + entry - 2 * _L, rows, dim, scratch + abi.FACTORS)
            new += entry

    @jit
    def finish_split(a, item, scratch):
        """Called after each work item of a query block; the last to finish merges the results."""
        counter = geti(item + _ITEM.counter)
        if take(counter) == geti(item + _ITEM.num_items) - 1:
            seti(counter, 0)  # for the next layer
            merge(a, item, scratch)
            store_output(a, item, scratch)

    return finish_split


def _finish_group(finish_split: Any) -> Any:
    @jit
    def finish_group(a, item, scratch):
        """Copy the rows of the split just computed to the members of a shared-prefix group."""
        step, split = geti(a + _CALL.step), geti(item + _ITEM.split_begin)
        groups, new = geti(step + _STEP.groups), scratch + geti(step + _STEP.at_new)
        o_bytes = groups * geti(step + _STEP.dim) * 4
        for i in range(geti(item + _ITEM.num_queries)):
            member = geti(geti(item + _ITEM.members) + 8 * i)
            entry = geti(member + _ITEM.partial_bytes)
            to = geti(member + _ITEM.partial)
            to += (split - geti(member + _ITEM.block_begin)) * entry
            stats, from_stats = to + entry - 2 * _L, scratch + abi.STATS + i * groups * 4
            copy(to, new + i * o_bytes, o_bytes)
            copy(stats, from_stats, groups * 4)
            copy(stats + _L, from_stats + _L, groups * 4)
            finish_split(a, member, scratch)

    return finish_group


def _loads(variant: _Variant, decoded: bool) -> tuple[Any, Any]:
    """What makes K, and V, of a split ready for the products (see `attention_kv`)."""
    tiles, numbers = variant.tiles, variant.products.kind
    if decoded:
        return decode_k(numbers, tiles, variant.stored), decode_v(numbers, tiles, variant.stored)
    if variant.coded:
        return point_to_k(logs=numbers == "int16"), point_to_v()
    half = variant.half or variant.stored == "bfloat16"
    return load_k(half, tiles), load_v(half, tiles)


def _load_split(k: Any, v: Any, early: bool) -> Any:
    @jit
    def load_split(a, item, scratch, index):
        """Fill SPLIT, and load K; if `early`, also V for many rows (see `attend_rows`)."""
        start, split = index * abi.SPLIT_KEYS, scratch + abi.SPLIT
        end = geti(item + _ITEM.position) + geti(item + _ITEM.num_queries)
        seti(split + _SPLIT.start, start)
        seti(split + _SPLIT.count, min(abi.SPLIT_KEYS, end - start))
        seti(split + _SPLIT.v_keys, 0)
        k(a, item, scratch)
        if early and geti(item + _ITEM.rows) > abi.QUERY_ROWS:
            v(a, item, scratch, scratch + geti(geti(a + _CALL.step) + _STEP.at_v))

    return load_split


def _by_rows(variant: _Variant) -> tuple[Any, Any]:
    """`load_split` and `attend_rows` of an item, which multiplies the cache in place or decoded,
    depending on its rows."""

    def functions(decoded: bool) -> tuple[Any, Any]:
        k, v = _loads(variant, decoded)
        return _load_split(k, v, variant.tiles or decoded), _attend_rows(variant, v, decoded)

    if not variant.decodes_for_many:
        return functions(decoded=not variant.in_place)
    (load_few, attend_few), (load_many, attend_many) = functions(False), functions(True)

    @jit
    def load_split(a, item, scratch, index):
        if geti(item + _ITEM.rows) < abi.DECODED_ROWS:
            load_few(a, item, scratch, index)
        else:
            load_many(a, item, scratch, index)

    @jit
    def attend_rows(a, item, scratch, first, o, stats):
        if geti(item + _ITEM.rows) < abi.DECODED_ROWS:
            attend_few(a, item, scratch, first, o, stats)
        else:
            attend_many(a, item, scratch, first, o, stats)

    return load_split, attend_rows


def _attend_split(variant: _Variant) -> Any:
    """A function that attends to one KV split with all rows of an item."""
    load_split, attend_rows = _by_rows(variant)

    @jit(returns=types.boolean)
    def sees(a, item, scratch, first):
        """Whether any of the rows from `first` on attends to a key of the split."""
        step, start = geti(a + _CALL.step), geti(scratch + abi.SPLIT + _SPLIT.start)
        groups, window = geti(step + _STEP.groups), geti(step + _STEP.window)
        end = min(first + abi.QUERY_ROWS, geti(item + _ITEM.rows))
        newest = geti(item + _ITEM.position) + (end - 1) // groups
        oldest = geti(item + _ITEM.position) + first // groups
        return newest >= start and (window == 0 or oldest - window < start + abi.SPLIT_KEYS - 1)

    @jit
    def attend_split(a, item, scratch, index):
        """Results go to the accumulators; for a split query block, to the item's partial
        results; for a shared-prefix group, to `at_new` and STATS of the scratch."""
        step, rows = geti(a + _CALL.step), geti(item + _ITEM.rows)
        dim, partial = geti(step + _STEP.dim), geti(item + _ITEM.counter) != 0
        new, new_stats = scratch + geti(step + _STEP.at_new), scratch + abi.STATS
        if partial:
            entry = geti(item + _ITEM.partial_bytes)
            new = geti(item + _ITEM.partial) + (index - geti(item + _ITEM.block_begin)) * entry
            new_stats = new + entry - 2 * _L
        load_split(a, item, scratch, index)
        for first in range(0, rows, abi.QUERY_ROWS):
            n = min(abi.QUERY_ROWS, rows - first)
            if sees(a, item, scratch, first):
                attend_rows(a, item, scratch, first, new, new_stats)
                if not partial and geti(item + _ITEM.members) == 0:
                    o = scratch + geti(step + _STEP.at_o) + first * dim * 4
                    stats = scratch + geti(step + _STEP.at_stats) + first * 8
                    join(o, stats, new, new_stats, n, dim, scratch + abi.FACTORS)
            elif partial:
                init_accumulators(new, new_stats, n, dim)

    return attend_split


def attention(name: str) -> Any:
    """The kernel for "float32", "bfloat16" (vectors) or "tiles" (bfloat16 on AMX), over a cache
    of that type, or of another one: "tiles-int8", "float32-bfloat16"."""
    kind, _, stored = name.partition("-")
    variant = _Variant(kind, stored)
    tiles = variant.tiles
    load_queries, store_output = _load_queries(variant.products.kind), _store_output(variant.half)
    attend_split, finish_split = _attend_split(variant), _finish_split(store_output)
    finish_group = _finish_group(finish_split)

    @jit
    def attend(a, item, scratch):
        step, rows = geti(a + _CALL.step), geti(item + _ITEM.rows)
        if tiles:
            amx.configure(scratch + abi.CONFIG, min(rows, 16), min(rows, 16))
        load_queries(a, item, scratch)
        o, stats = scratch + geti(step + _STEP.at_o), scratch + geti(step + _STEP.at_stats)
        init_accumulators(o, stats, rows, geti(step + _STEP.dim))
        for index in range(geti(item + _ITEM.split_begin), geti(item + _ITEM.split_end)):
            attend_split(a, item, scratch, index)
        if geti(item + _ITEM.members) != 0:
            finish_group(a, item, scratch)
        elif geti(item + _ITEM.counter) != 0:
            finish_split(a, item, scratch)
        else:
            store_output(a, item, scratch)

    @jit
    def work(a):
        step = geti(a + _CALL.step)
        thread = take(a + _CALL.thread)
        scratch = geti(step + _STEP.scratch) + thread * geti(step + _STEP.scratch_size)
        index = take(a + _CALL.counter)
        while index < geti(step + _STEP.num_items):
            attend(a, geti(step + _STEP.items) + index * _ITEM_BYTES, scratch)
            index = take(a + _CALL.counter)
        if tiles:
            amx.release()

    def attention(a: int) -> None:
        work(a)

    return attention
