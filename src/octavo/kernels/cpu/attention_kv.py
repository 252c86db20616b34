"""Loads the keys and values of a KV split for attention (see `attention` for the layouts).

`load_k` writes to K_AT of a thread's scratch the addresses of the vectors (or tiles) of K, and
`load_v` to V_AT those of the pieces of V, as `tiles` expects them. Keys and values that are stored
as the GEMMs read them are used in place; the rest is gathered, or decoded from codes, to a buffer.
Both read and complete the ATTENTION_SPLIT at SPLIT of the scratch.
"""

from typing import Any

from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import (
    LANES,
    copy,
    decode,
    fetch,
    get32,
    geti,
    jit,
    set32,
    seti,
    zero,
)

_CALL, _STEP, _ITEM = abi.ATTENTION.offset, abi.ATTENTION_STEP.offset, abi.ATTENTION_ITEM.offset
_SPLIT = abi.ATTENTION_SPLIT.offset
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


def load_k(half: bool, tiles: bool) -> Any:
    """A function (call, item, scratch) for a cache of the dtype of the queries."""
    pair, keys = 2 if half else 1, 16 if tiles else LANES  # keys of one vector or tile
    block = _block(half)

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
        vectors = (count + keys - 1) // keys
        for i in range(vectors):
            key = start + i * keys
            if direct:
                here = block(a, item, key // block_size) + key % block_size * 4
            else:
                here = buffer + i * depth // pair * keys * 4
                gather(a, item, here, key, start + count - 1)
            seti(pointers + 8 * i, here)
        for i in range(vectors, (vectors + 3) // 4 * 4):
            seti(pointers + 8 * i, geti(pointers + 8 * vectors - 8))

    return load


def load_v(half: bool, tiles: bool) -> Any:
    """A function (call, item, scratch, buffer) for a cache of the dtype of the queries."""
    size, pair = (2, 2) if half else (4, 1)
    block = _block(half)

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
        """Copies only the last block of a row, and blocks with fewer keys than a tile."""
        step, split, pointers = geti(a + _CALL.step), scratch + abi.SPLIT, scratch + abi.V_AT
        block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
        start, count = geti(split + _SPLIT.start), geti(split + _SPLIT.count)
        words, blocks = block_size // pair, (count + block_size - 1) // block_size
        gather = tiles and block_size < 32
        v_keys = 32 if tiles else block_size
        seti(split + _SPLIT.v_keys, v_keys)
        for i in range(blocks):
            here = block(a, item, start // block_size + i) + block_size * dim * size
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
    """Address of the run of codes of a key: of V if `values` is 1, else of K."""
    step = geti(a + _CALL.step)
    block_size, dim = geti(step + _STEP.block_size), geti(step + _STEP.dim)
    head = _head_of_block(a, item, key // block_size)
    block = geti(a + _CALL.cache) + head * 2 * block_size * (dim + abi.SCALE_BYTES)
    return block + (values * block_size + key % block_size) * dim


@jit(returns=types.int64)
def _run_ahead(a, item, key, last, values):
    """Address of the run of codes to prefetch while that of `key` is decoded."""
    run = min(geti(geti(a + _CALL.step) + _STEP.block_size), abi.RUN)
    return _run(a, item, min(key + _AHEAD * run, last) // run * run, values)


@jit
def _load_scales(a, item, scratch):
    """The scales of K and V of a split, zeros behind them."""
    step, split = geti(a + _CALL.step), scratch + abi.SPLIT
    start, count = geti(split + _SPLIT.start), geti(split + _SPLIT.count)
    block_size, done = geti(step + _STEP.block_size), 0
    while done < count:
        n = min(block_size, count - done)
        here = _run(a, item, start + done, 0) + 2 * block_size * geti(step + _STEP.dim)
        copy(scratch + abi.K_SCALES + done * 4, here, n * 4)
        copy(scratch + abi.V_SCALES + done * 4, here + block_size * 4, n * 4)
        done += n
    zero(scratch + abi.K_SCALES + count * 4, (abi.SPLIT_KEYS - count) * 4)
    zero(scratch + abi.V_SCALES + count * 4, (abi.SPLIT_KEYS - count) * 4)


def decode_k(half: bool, tiles: bool, kind: str) -> Any:
    """As `load_k`, from a cache of codes of `kind`: all is decoded to the buffer."""
    pair, keys = 2 if half else 1, 16 if tiles else LANES
    whole, eight = decode(kind, half, keys), decode(kind, half, 8)

    @jit
    def load(a, item, scratch):
        step, split = geti(a + _CALL.step), scratch + abi.SPLIT
        words, depth = geti(step + _STEP.dim) // pair, geti(step + _STEP.depth) // pair
        start, count = geti(split + _SPLIT.start), geti(split + _SPLIT.count)
        run, last = min(geti(step + _STEP.block_size), abi.RUN), start + count - 1
        buffer = scratch + geti(step + _STEP.at_k)
        for key in range(0, count, run):
            codes = _run(a, item, start + key, 0)
            ahead = _run_ahead(a, item, start + key, last, 0)
            for k in range(0, run, keys):
                here = buffer + (key + k) // keys * depth * keys * 4
                first, lane = codes + k, (key + k) % keys
                for w in range(words):
                    fetch(ahead + w * pair * run)
                    if run >= keys:
                        whole(here + w * keys * 4, first, first + run)
                    else:
                        eight(here + (w * keys + lane) * 4, first, first + run)
                    first += pair * run
                zero(here + words * keys * 4, (depth - words) * keys * 4)
        highest = (count + keys - 1) // keys - 1
        for i in range((highest + 4) // 4 * 4):
            seti(scratch + abi.K_AT + 8 * i, buffer + min(i, highest) * depth * keys * 4)
        seti(split + _SPLIT.k_stride, keys * 4)
        _load_scales(a, item, scratch)

    return load


def decode_v(half: bool, tiles: bool, kind: str) -> Any:
    """As `load_v`, from a cache of codes of `kind`: all is decoded to the buffer."""
    pair, lanes = 2 if half else 1, 16 if tiles else LANES
    whole = decode(kind, half, lanes)

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
            for w in range(run // pair):
                for i in range(0, dim, lanes):
                    fetch(ahead + (w * dim + i) * pair)
                    whole(to + i * 4, codes + i, codes + i + dim)
                to += dim * 4
                codes += dim * pair
        zero(to, buffer + pieces * 32 // pair * dim * 4 - to)
        for piece in range(pieces):
            seti(scratch + abi.V_AT + 8 * piece, buffer + piece * 32 // pair * dim * 4)
        seti(split + _SPLIT.v_keys, 32)

    return load
