"""Loads the keys and values of a KV split for attention (see `attention` for the layouts).

`load_k` writes to K_AT of a thread's scratch the addresses of the vectors (or tiles) of K, and
`load_v` to V_AT those of the pieces of V, as `tiles` expects them. Keys and values that are stored
as the products read them are used in place; the rest is gathered, or decoded from codes, to a
buffer.
Both read and complete the ATTENTION_SPLIT at SPLIT of the scratch.
"""

from typing import Any

import numpy as np
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import (
    LANES,
    copy,
    decode,
    fetch,
    fetch2,
    get32,
    geti,
    jit,
    set32,
    seti,
    vfma,
    vload,
    vlog2_above,
    vmax,
    vsplat,
    vstore,
    zero,
)

_CALL, _STEP, _ITEM = abi.ATTENTION.offset, abi.ATTENTION_STEP.offset, abi.ATTENTION_ITEM.offset
_SPLIT = abi.ATTENTION_SPLIT.offset
_ITEM_BYTES = abi.ATTENTION_ITEM.nbytes
_AHEAD = 4  # runs of codes that are prefetched before they are decoded


@jit(returns=types.int64)
def _head_of_block(a, item, index):
    """The place in the cache, in heads, of block `index` of the item's row."""
    step = geti(a + _CALL.step)
    entry = get32(geti(step + _STEP.tables) + (geti(item + _ITEM.table) + index) * 4)
    return entry * geti(step + _STEP.kv_heads) + geti(item + _ITEM.kv_head)


def _block(half: bool) -> Any:
    size = 2 if half else 4

    @jit(returns=types.int64)
    def block(a, item, index):
        """Address of K of a block; V follows after block_size * dim values."""
        step = geti(a + _CALL.step)
        values = 2 * geti(step + _STEP.block_size) * geti(step + _STEP.dim)
        return geti(a + _CALL.cache) + _head_of_block(a, item, index) * values * size

    return block


def _head_bytes(half: bool, coded: bool) -> Any:
    """A function that gives the bytes of a KV head in a block."""

    @jit(returns=types.int64)
    def head_bytes(step):
        block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
        if coded:
            return 2 * block_size * (dim + abi.SCALE_BYTES)
        return 2 * block_size * dim * (2 if half else 4)

    return head_bytes


def _locate(half: bool, coded: bool) -> Any:
    """A function that writes to BLOCK_AT the addresses of a split's blocks; returns how many."""
    head_bytes = _head_bytes(half, coded)

    @jit(returns=types.int64)
    def locate(a, item, scratch):
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        block_size, nbytes = geti(step + _STEP.block_size), head_bytes(step)
        first = geti(split + _SPLIT.start) // block_size
        blocks = (geti(split + _SPLIT.count) + block_size - 1) // block_size
        entries = geti(step + _STEP.tables) + (geti(item + _ITEM.table) + first) * 4
        stride = geti(step + _STEP.kv_heads) * nbytes
        base = geti(a + _CALL.cache) + geti(item + _ITEM.kv_head) * nbytes
        for i in range(blocks):
            seti(scratch + abi.BLOCK_AT + 8 * i, base + get32(entries + 4 * i) * stride)
        return blocks

    return locate


@jit
def _end_of_k(scratch, vectors, values, count, ahead):
    """Repeat the last of `vectors` vectors of K up to whole groups of four. Behind those of `count`
    vectors are what is read next: V of the first `ahead` keys, `values` bytes behind K."""
    pointers = scratch + abi.K_AT
    for i in range(vectors, (vectors + 3) // 4 * 4):
        seti(pointers + 8 * i, geti(pointers + 8 * vectors - 8))
    end = pointers + (count + 3) // 4 * 4 * 8
    for i in range(ahead // LANES):
        seti(end + 8 * i, geti(pointers + 8 * min(i, count - 1)) + values)


def load_k(half: bool, tiles: bool) -> Any:
    """A function (call, item, scratch) for a cache of values; half: in bfloat16."""
    pair, keys = 2 if half else 1, 16 if tiles else LANES  # keys of one vector or tile
    block, locate = _block(half), _locate(half, coded=False)

    @jit
    def gather(a, item, to, key, last):
        """The vector or tile of K from `key` on; blocks past that of key `last` are not read."""
        step = geti(a + _CALL.step)
        block_size, words = geti(step + _STEP.block_size), geti(step + _STEP.dim) // pair
        part = min(block_size, keys)
        zero(to + words * keys * 4, (geti(step + _STEP.depth) // pair - words) * keys * 4)
        for k in range(0, keys, part):
            source = block(a, item, min(key + k, last) // block_size)
            source += (key + k) % block_size * 4
            for w in range(words):
                copy(to + (w * keys + k) * 4, source + w * block_size * 4, part * 4)

    @jit
    def load(a, item, scratch):
        """A block that is narrower than a vector, or not as deep as tiles, is gathered."""
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        block_size, depth = geti(step + _STEP.block_size), geti(step + _STEP.depth)
        start, count = geti(split + _SPLIT.start), geti(split + _SPLIT.count)
        pointers, buffer = scratch + abi.K_AT, scratch + geti(step + _STEP.at_k)
        direct = block_size % keys == 0 and geti(step + _STEP.dim) == depth
        seti(split + _SPLIT.k_stride, block_size * 4 if direct else keys * 4)
        blocks, vectors = locate(a, item, scratch), (count + keys - 1) // keys
        if direct:
            vectors = blocks * block_size // keys
            for i in range(blocks):
                here = geti(scratch + abi.BLOCK_AT + 8 * i)
                for k in range(0, block_size, keys):
                    seti(pointers, here + 4 * k)
                    pointers += 8
        else:
            for i in range(vectors):
                here = buffer + i * depth // pair * keys * 4
                gather(a, item, here, start + i * keys, start + count - 1)
                seti(pointers + 8 * i, here)
        values = block_size * geti(step + _STEP.dim) * (4 // pair)
        _end_of_k(scratch, vectors, values, (count + keys - 1) // keys, abi.AHEAD_KEYS)
        if not tiles and count % block_size != 0:  # `load_v` copies the last block
            here = geti(scratch + abi.BLOCK_AT + 8 * (blocks - 1)) + values
            for line in range(here, here + values, 64):
                fetch2(line)

    return load


def load_v(half: bool, tiles: bool) -> Any:
    """A function (call, item, scratch, buffer) for a cache of values; half: in bfloat16."""
    size, pair = (2, 2) if half else (4, 1)

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
    def point_to_gathered(scratch, buffer, count, words, dim):
        """Pieces of 32 keys in a buffer that holds `words` words of V; zeros behind them."""
        pieces = (count + 31) // 32
        if words < pieces * 16:
            zero(buffer + words * dim * 4, (pieces * 16 - words) * dim * 4)
        for piece in range(pieces):
            seti(scratch + abi.V_AT + 8 * piece, buffer + piece * 16 * dim * 4)

    @jit
    def load(a, item, scratch, buffer):
        """Copies only the last block of a row, and blocks with fewer keys than a tile. Called after
        `load_k`, which locates the blocks."""
        step, split, pointers = geti(a + _CALL.step), scratch + abi.SPLIT, scratch + abi.V_AT
        block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
        count = geti(split + _SPLIT.count)
        words, blocks = block_size // pair, (count + block_size - 1) // block_size
        gather = tiles and block_size < 32
        v_keys = 32 if tiles else block_size
        seti(split + _SPLIT.v_keys, v_keys)
        for i in range(blocks):
            here = geti(scratch + abi.BLOCK_AT + 8 * i) + block_size * dim * size
            valid = min(block_size, count - i * block_size)
            if gather or valid < block_size:
                to = buffer + i * words * dim * 4
                copy(to, here, words * dim * 4)
                here = to
                if valid < block_size:
                    clear_from(here, valid, words, dim)
            if not gather:
                for piece in range(block_size // v_keys):
                    seti(pointers, here + piece * v_keys // pair * dim * 4)
                    pointers += 8
        if gather:
            point_to_gathered(scratch, buffer, count, blocks * words, dim)

    return load


@jit(returns=types.int64)
def _run(a, item, key, values):
    """Address of the run of codes that a key is in: of V if `values` is 1, else of K."""
    step = geti(a + _CALL.step)
    block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
    head = _head_of_block(a, item, key // block_size)
    block = geti(a + _CALL.cache) + head * 2 * block_size * (dim + abi.SCALE_BYTES)
    run = min(block_size, abi.RUN)
    return block + (values * block_size + key % block_size // run * run) * dim


@jit(returns=types.int64)
def _run_ahead(a, item, key, last, values):
    """Address of the run of codes to prefetch while that of `key` is decoded."""
    run = min(geti(geti(a + _CALL.step) + _STEP.block_size), abi.RUN)
    return _run(a, item, min(key + _AHEAD * run, last), values)


@jit
def _load_scales(a, scratch, blocks):
    """The scales of K and V of a split, whose blocks are located; zeros behind them."""
    step, count = geti(a + _CALL.step), geti(scratch + abi.SPLIT + _SPLIT.count)
    block_size, to = geti(step + _STEP.block_size), scratch + abi.K_SCALES
    codes, of_v = 2 * block_size * geti(step + _STEP.dim), abi.V_SCALES - abi.K_SCALES
    for i in range(blocks):
        here = geti(scratch + abi.BLOCK_AT + 8 * i) + codes
        for _ in range(0, block_size, 8):
            copy(to, here, 32)
            copy(to + of_v, here + block_size * 4, 32)
            to, here = to + 32, here + 32
    if count < abi.SPLIT_KEYS:
        zero(scratch + abi.K_SCALES + count * 4, (abi.SPLIT_KEYS - count) * 4)
        zero(scratch + abi.V_SCALES + count * 4, (abi.SPLIT_KEYS - count) * 4)


@jit
def _take_logs(scratch):
    """V_LOGS and V_BROKEN from V_SCALES: of keys past the last one, too, which are masked.

    The smallest logarithm keeps weights in float32 finite (see `attention_softmax`).
    """
    none, broken = vsplat(np.float32(0.0)), vsplat(np.float32(0.0))
    least = vsplat(np.float32(-60.0))
    for i in range(0, abi.SPLIT_KEYS * 4, LANES * 4):
        scale = vload(scratch + abi.V_SCALES + i)
        broken = vfma(scale, none, broken)
        vstore(scratch + abi.V_LOGS + i, vmax(vlog2_above(scale), least))
    vstore(scratch + abi.V_BROKEN, broken)


def point_to_k(logs: bool) -> Any:
    """As `load_k`, for products that read codes: only runs narrower than a vector are gathered.

    logs: whether the softmax reads V_LOGS.
    """
    locate = _locate(half=True, coded=True)

    @jit
    def gather(scratch, to, first, blocks, dim):
        """The vector of K made of the blocks from `first` on, half a vector each."""
        run = abi.RUN // 2
        for k in range(0, LANES, run):
            block = min(first + k // run, blocks - 1)
            source = geti(scratch + abi.BLOCK_AT + 8 * block)
            for w in range(dim // 2):
                copy(to + (w * LANES + k) * 2, source + w * run * 2, run * 2)

    @jit
    def load(a, item, scratch):
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
        count, run = geti(split + _SPLIT.count), min(block_size, abi.RUN)
        seti(split + _SPLIT.k_stride, max(run, LANES) * 2)
        blocks, pointers, vectors = locate(a, item, scratch), scratch + abi.K_AT, 0
        if run >= LANES:
            for i in range(blocks):
                here = geti(scratch + abi.BLOCK_AT + 8 * i)
                for first in range(here, here + block_size * dim, run * dim):
                    for k in range(0, run, LANES):
                        seti(pointers + 8 * vectors, first + 2 * k)
                        vectors += 1
        else:
            for i in range(0, blocks, LANES // run):
                here = scratch + geti(step + _STEP.at_k) + vectors * LANES * dim
                gather(scratch, here, i, blocks, dim)
                seti(pointers + 8 * vectors, here)
                vectors += 1
        count = (count + LANES - 1) // LANES
        _end_of_k(scratch, vectors, block_size * dim, count, abi.AHEAD_CODES)
        _load_scales(a, scratch, blocks)
        if logs:
            _take_logs(scratch)

    return load


def point_to_v() -> Any:
    """As `load_v`, for products that read codes: any code is finite, and hidden keys weigh 0."""

    @jit
    def load(a, item, scratch, buffer):
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
        seti(split + _SPLIT.v_keys, block_size)
        for i in range((geti(split + _SPLIT.count) + block_size - 1) // block_size):
            here = geti(scratch + abi.BLOCK_AT + 8 * i)
            seti(scratch + abi.V_AT + 8 * i, here + block_size * dim)

    return load


def announce_next(half: bool, coded: bool) -> Any:
    """A function that writes, behind the pieces of V, where the keys lie that are read next, and
    prefetches their scales."""
    head_bytes = _head_bytes(half, coded)
    ahead = abi.AHEAD_CODES if coded else abi.AHEAD_KEYS

    @jit
    def announce_next(a, item, scratch, index):
        """Of the next split of the item; else of the item that will probably be claimed next."""
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        block_size, nbytes = geti(step + _STEP.block_size), head_bytes(step)
        following, first = item, index + 1
        if first >= geti(item + _ITEM.split_end):
            place = min(geti(a + _CALL.counter), geti(step + _STEP.num_items) - 1)
            following = geti(step + _STEP.items) + place * _ITEM_BYTES
            first = geti(following + _ITEM.split_begin)
        end = geti(following + _ITEM.position) + geti(following + _ITEM.num_queries)
        keys = min(end - first * abi.SPLIT_KEYS, abi.SPLIT_KEYS)
        entries = geti(step + _STEP.tables) + geti(following + _ITEM.table) * 4
        entries += first * abi.SPLIT_KEYS // block_size * 4
        stride = geti(step + _STEP.kv_heads) * nbytes
        base = geti(a + _CALL.cache) + geti(following + _ITEM.kv_head) * nbytes
        blocks = (keys + block_size - 1) // block_size
        pieces = (geti(split + _SPLIT.count) + block_size - 1) // block_size
        for i in range(max(1, ahead // block_size)):
            here = base + get32(entries + 4 * min(i, blocks - 1)) * stride
            seti(scratch + abi.V_AT + 8 * (pieces + i), here)
        for i in range(blocks if coded else 0):
            end_of_block = base + get32(entries + 4 * i) * stride + nbytes
            for line in range(end_of_block - 8 * block_size, end_of_block, 64):
                fetch2(line)

    return announce_next


def decode_k(numbers: str, tiles: bool, kind: str) -> Any:
    """As `load_k`, from a cache of codes of `kind`: all is decoded to words of `numbers` in the
    buffer."""
    pair, keys = 1 if numbers == "float32" else 2, 16 if tiles else LANES
    whole, eight = decode(kind, numbers, keys), decode(kind, numbers, 8)
    locate = _locate(half=True, coded=True)

    @jit
    def load(a, item, scratch):
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        words, depth = geti(step + _STEP.dim) // pair, geti(step + _STEP.depth) // pair
        start, count = geti(split + _SPLIT.start), geti(split + _SPLIT.count)
        run, last = min(geti(step + _STEP.block_size), abi.RUN), start + count - 1
        buffer, stride = scratch + geti(step + _STEP.at_k), keys * 4
        for key in range(0, count, run):
            codes = _run(a, item, start + key, 0)
            ahead = _run_ahead(a, item, start + key, last, 0)
            for k in range(0, run, keys):
                here = buffer + (key + k) // keys * depth * keys * 4
                first, lane = codes + 2 * k, (key + k) % keys
                for w in range(0, words, 2 // pair):
                    fetch(ahead + w * pair * run)
                    if run >= keys:
                        whole(here + w * stride, stride, first)
                    else:
                        eight(here + w * stride + lane * 4, stride, first)
                    first += 2 * run
                zero(here + words * stride, (depth - words) * stride)
        highest = (count + keys - 1) // keys - 1
        for i in range((highest + 4) // 4 * 4):
            seti(scratch + abi.K_AT + 8 * i, buffer + min(i, highest) * depth * keys * 4)
        seti(split + _SPLIT.k_stride, stride)
        _load_scales(a, scratch, locate(a, item, scratch))

    return load


def decode_v(numbers: str, tiles: bool, kind: str) -> Any:
    """As `load_v`, from a cache of codes of `kind`: all is decoded to words of `numbers` in the
    buffer."""
    pair, lanes = 1 if numbers == "float32" else 2, 16 if tiles else LANES
    whole = decode(kind, numbers, lanes)

    @jit
    def load(a, item, scratch, buffer):
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        dim, start, count = (
            geti(step + _STEP.dim),
            geti(split + _SPLIT.start),
            geti(split + _SPLIT.count),
        )
        run, last = min(geti(step + _STEP.block_size), abi.RUN), start + count - 1
        pieces, to = (count + 31) // 32, buffer
        for key in range(0, count, run):
            codes = _run(a, item, start + key, 1)
            ahead = _run_ahead(a, item, start + key, last, 1)
            for first in range(0, run * dim, 2 * dim):
                for i in range(0, dim, lanes):
                    fetch(ahead + first + 2 * i)
                    whole(to + i * 4, dim * 4, codes + first + 2 * i)
                to += 2 // pair * dim * 4
        zero(to, buffer + pieces * 32 // pair * dim * 4 - to)
        for piece in range(pieces):
            seti(scratch + abi.V_AT + 8 * piece, buffer + piece * 32 // pair * dim * 4)
        seti(split + _SPLIT.v_keys, 32)

    return load
