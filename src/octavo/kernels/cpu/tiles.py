"""GEMMs of small tiles: the two inner loops of attention.

    scores:    S[r, key] = sum over d of Q[r, d] * K[key, d]
    weighted:  O[r, d]   = sum over keys of P[r, key] * V[key, d]

A word is 32 bits: one float32, or two neighbouring bfloat16 of the summed index. K lies as
[words of d][keys], V as [words of keys][d], so that one vector is LANES keys (or dimensions)
of one word, and Q and P are read word by word. K and V come in pieces (blocks of the cache),
each with an address of its own; S and P lie in rows of SCORE_STRIDE bytes. Each sum runs over its
words in order, in float32, so a row's result depends only on the row. The kinds of Q and P:

    float32   one fused multiply-add a word
    bfloat16  vdpbf16ps where the processor has it, else two fused multiply-adds a word
    int16     vpdpwssd, or pmaddwd and an addition; the sums are integers, and exact
    tiles     bfloat16 on AMX: 16 rows x 16 keys x 32 deep in one instruction

K and V are stored in words of the same kind, or in something that becomes such words in registers:
int8 for int16, fp8 for bfloat16, and pairs of bfloat16 for float32. All of them lie in pairs like
bfloat16; codes take a byte each, so that a vector is half as many bytes. What is converted for
every six rows costs much where it takes five instructions (fp8), so for many rows it is decoded to
words first (see `attention_kv`); the bits of the result are the same. Scores of codes are
multiplied by the scales of K, which lie behind the scores of QUERY_ROWS rows; a row of int16 has a
scale of its own, which the softmax applies.

Measured on a Xeon with AMX, one core: 3.0 TF/s for 2 x 2 tiles with their loads; a tile of 16
keys deep takes as long as one of 32, so V is gathered into pieces of 32 keys.

All give the same two functions (strides in bytes):

    scores(s, q, q_stride, rows, keys, vectors, words, k_stride)
        keys: addresses of `vectors` vectors of K; k_stride: from word to word of K
    weighted(o, p, rows, values, pieces, words, dim)
        values: addresses of `pieces` pieces of V of `words` words of `dim` dimensions

On vector units both prefetch what is read next from memory: K and V of the keys that
are AHEAD_KEYS or AHEAD_CODES after those which are multiplied. So `keys` and `values` go
on with the addresses of what follows them. Into the second cache: measured on Zen 4 in pieces of 1
to 4 KB in random order, two cores read 14 to 17 GB/s without, 15 to 19 with prefetches into the
first cache, and 25 to 26 with those into the second, 4 to 8 KB ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.abi import AHEAD_CODES, AHEAD_KEYS, QUERY_ROWS, SCORE_STRIDE
from octavo.kernels.cpu.amx import store_tiles, sum_tiles
from octavo.kernels.cpu.simd import (
    FEATURES,
    HAS_DOT,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    call,
    const,
    consti,
    fma,
    jit,
    load,
    load_fp8_pairs,
    load_int8_pairs,
    loop,
    offset,
    op,
    prefetch,
    splat,
    store,
)

# Rows and vectors of a register tile: accumulators, vectors of K and one of Q fit in the
# 32 registers of AVX-512, or in 16.
ROWS, VECTORS = (6, 4) if LANES == 16 else (4, 2)
_ADDRESS = types.int64
Emit = Callable[..., Any]
_CODES = {"int8": load_int8_pairs, "fp8": load_fp8_pairs}


@dataclass(frozen=True, slots=True)
class Products:
    """How Q and P are multiplied by K and V.

    kind: of Q and P. stored: what K and V are stored as, if not in words of that kind. scaled:
    whether the scores are multiplied by the scales of K.
    """

    kind: str
    stored: str = ""
    scaled: bool = False

    @property
    def pair(self) -> int:
        """Values in a word of K and V."""
        return 1 if self.kind == "float32" and not self.stored else 2

    @property
    def parts(self) -> int:
        """Vectors that a stored vector becomes: of its even and of its odd values, or one."""
        return 2 if self.kind == "float32" and self.stored else 1

    @property
    def ahead(self) -> int:
        """Keys between what is multiplied and what is prefetched."""
        return AHEAD_CODES if self.stored in _CODES else AHEAD_KEYS

    @property
    def vector_bytes(self) -> int:
        """Of a stored vector."""
        return LANES * (2 if self.stored in _CODES else 4)

    @property
    def word_bytes(self) -> int:
        """Of what Q and P have for a stored word."""
        return 4 * self.parts

    def load(self, b: Any, address: Any, part: int) -> Any:
        """A part of the stored vector at `address`, as words of `kind`."""
        if self.stored in _CODES:
            return _CODES[self.stored](b, address)
        words = load(b, address, VI)
        if self.parts == 1:
            return words
        return b.and_(words, consti(-65536)) if part else b.shl(words, consti(16))


def _integer_dot(b: Any, total: Any, words: Any, vector: Any) -> Any:
    """total + the products of both int16 of each word."""
    if LANES == 16 and "avx512vnni" in FEATURES:
        return call(b, "llvm.x86.avx512.vpdpwssd.512", VI, total, words, vector)
    names = {
        16: ("avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
        8: ("avx2", "llvm.x86.avx2.pmadd.wd"),
    }
    feature, name = names[LANES]
    if feature in FEATURES:
        shorts = ir.VectorType(I16, 2 * LANES)
        pair = (b.bitcast(x, shorts) for x in (words, vector))
        return b.add(total, call(b, name, VI, *pair))
    for x, y in zip(*(_shorts(b, v) for v in (words, vector)), strict=True):
        total = b.add(total, b.mul(x, y))
    return total


def _shorts(b: Any, words: Any) -> tuple[Any, Any]:
    return b.ashr(b.shl(words, consti(16)), consti(16)), b.ashr(words, consti(16))


def _dot(b: Any, kind: str, total: Any, word: Any, vector: Any) -> Any:
    """total + word * vector; of bfloat16 pairs the odd product is added first."""
    if kind == "float32":
        return fma(b, splat(b, b.bitcast(word, VF.element)), b.bitcast(vector, VF), total)
    words = splat(b, word)
    if kind == "int16":
        return _integer_dot(b, total, words, vector)
    if HAS_DOT:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(b, name, VF, total, words, vector)
    odd = consti(-65536)
    total = fma(b, b.bitcast(b.and_(words, odd), VF), b.bitcast(b.and_(vector, odd), VF), total)
    x, y = (b.bitcast(b.shl(v, consti(16)), VF) for v in (words, vector))
    return fma(b, x, y, total)


def _add_products(b: Any, how: Products, sums: Any, rows: Any, vectors: Any) -> list[Any]:
    """sums[rows, vectors] plus the products of the word at each row with each vector."""
    out = list(sums)
    for part in range(how.parts):
        loaded = [how.load(b, address, part) for address in vectors]
        for r, address in enumerate(rows):
            word = load(b, offset(b, address, 4 * part), I32)
            for j, vector in enumerate(loaded):
                i = r * len(loaded) + j
                out[i] = _dot(b, how.kind, out[i], word, vector)
    return out


def _no_sums(how: Products, count: int) -> list[Any]:
    return [consti(0) if how.kind == "int16" else const(0.0)] * count


def _floats(b: Any, how: Products, sums: Any) -> list[Any]:
    return [b.sitofp(x, VF) for x in sums] if how.kind == "int16" else list(sums)


def _scaled_scores(b: Any, how: Products, sums: Any, of_keys: Any) -> list[Any]:
    """Scores of VECTORS vectors of codes times the scales of K at `of_keys`."""
    scores = _floats(b, how, sums)
    if not how.scaled:
        return scores
    factors = [load(b, offset(b, of_keys, j * LANES * 4), VF) for j in range(VECTORS)]
    return [b.fmul(x, factors[i % VECTORS]) for i, x in enumerate(scores)]


def _store_all(b: Any, sums: Any, base: Any, stride: Any, vectors: int) -> None:
    for i, value in enumerate(sums):
        row = b.add(base, b.mul(stride, I64(i // vectors)))
        store(b, value, offset(b, row, i % vectors * LANES * 4))


def _rows(b: Any, base: Any, stride: Any, rows: int) -> list[Any]:
    return [b.add(base, b.mul(stride, I64(r))) for r in range(rows)]


def _scores(how: Products, rows: int) -> Emit:
    """S[rows, VECTORS * LANES keys] over all words; keys[j] is the address of LANES keys."""

    def scores(b, s, q, q_stride, keys, words, k_stride, of_keys):
        groups = [load(b, offset(b, keys, 8 * j), I64) for j in range(VECTORS)]
        later = [
            load(b, offset(b, keys, 8 * (how.ahead // LANES + j)), I64) for j in range(VECTORS)
        ]
        queries = _rows(b, q, q_stride, rows)

        def body(i, *sums):
            at, word = b.mul(i, k_stride), b.mul(i, I64(how.word_bytes))
            vectors = [b.add(g, at) for g in groups]
            for address in later:
                prefetch(b, b.add(address, at), 2)
            return _add_products(b, how, sums, [b.add(x, word) for x in queries], vectors)

        sums = loop(b, words, _no_sums(how, rows * VECTORS), body)
        found = _scaled_scores(b, how, sums, of_keys)
        _store_all(b, found, s, I64(SCORE_STRIDE), VECTORS)

    return scores


def _weighted(how: Products, vectors: int, rows: int) -> Emit:
    """O[rows, vectors * LANES] over `pieces` pieces of V of `words` words each."""
    size = how.vector_bytes

    def weighted(b, o, p, values, pieces, words, stride, at):
        weights = _rows(b, p, I64(SCORE_STRIDE), rows)
        v_stride = b.mul(stride, I64(size // LANES))
        ahead = b.udiv(I64(how.ahead // how.pair), words)
        ahead = b.select(b.icmp_signed(">", ahead, I64(0)), ahead, I64(1))

        def address(i):
            return b.add(load(b, b.add(values, b.mul(i, I64(8))), I64), b.mul(at, I64(size)))

        def piece(i, *sums):
            base, later = address(i), address(b.add(i, ahead))
            first = b.mul(i, words)

            def body(w, *sums):
                word, row = b.mul(b.add(first, w), I64(how.word_bytes)), b.mul(w, v_stride)
                start = b.add(base, row)
                columns = [offset(b, start, j * size) for j in range(vectors)]
                for j in range(0, vectors * size, 64):
                    prefetch(b, offset(b, b.add(later, row), j), 2)
                return _add_products(b, how, sums, [b.add(x, word) for x in weights], columns)

            return loop(b, words, list(sums), body)

        sums = loop(b, pieces, _no_sums(how, rows * vectors), piece)
        to = b.add(o, b.mul(at, I64(LANES * 4)))
        _store_all(b, _floats(b, how, sums), to, b.mul(stride, I64(4)), vectors)

    return weighted


_ROW_COUNTS = tuple(sorted({1, 2, 3, 4, ROWS}))  # those with specialized code


@jit(returns=types.int64)
def _next_rows(left):
    """The next number of rows to compute: 7 as 4 + 3 and 8 as 4 + 4, not as 6 and a remainder."""
    if left == ROWS or left > ROWS + 2:
        return ROWS
    return 3 if left == 5 else min(left, 4)


def _switch_rows(b: Any, rows: Any, make: Callable[[int], Emit], *values: Any) -> None:
    """Code of make(rows) for each of _ROW_COUNTS, and a branch to that of `rows`."""
    after = b.append_basic_block("stored")
    blocks = {count: b.append_basic_block(f"rows_{count}") for count in _ROW_COUNTS}
    switch = b.switch(rows, blocks[ROWS])
    for count, block in blocks.items():
        if count != ROWS:
            switch.add_case(I64(count), block)
        b.position_at_end(block)
        make(count)(b, *values)
        b.branch(after)
    b.position_at_end(after)


def _scores_of(how: Products) -> Any:
    def scores(b, rows, s, q, q_stride, keys, words, k_stride, of_keys):
        make = partial(_scores, how)
        _switch_rows(b, rows, make, s, q, q_stride, keys, words, k_stride, of_keys)

    return op(types.void, *[_ADDRESS] * 8)(scores)


def _weighted_of(how: Products, vectors: int) -> Any:
    def weighted(b, rows, o, p, values, pieces, words, dim, at):
        make = partial(_weighted, how, vectors)
        _switch_rows(b, rows, make, o, p, values, pieces, words, dim, at)

    return op(types.void, *[_ADDRESS] * 8)(weighted)


def vector_products(how: Products) -> tuple[Any, Any]:
    """(scores, weighted) for any number of rows, as functions to call from a kernel."""
    some_scores = _scores_of(how)
    wide, thin = _weighted_of(how, VECTORS), _weighted_of(how, 1)
    step = LANES * 4

    @jit
    def scores(s, q, q_stride, rows, keys, vectors, words, k_stride):
        r = 0
        while r < rows:
            n = _next_rows(rows - r)
            for v in range(0, vectors, VECTORS):
                to, at = s + r * SCORE_STRIDE + v * step, q + r * q_stride
                of_keys = s + QUERY_ROWS * SCORE_STRIDE + v * step
                some_scores(n, to, at, q_stride, keys + 8 * v, words, k_stride, of_keys)
            r += n

    @jit
    def weighted(o, p, rows, values, pieces, words, dim):
        r = 0
        while r < rows:
            n = _next_rows(rows - r)
            v = 0
            while v < dim // LANES:
                to, at = o + r * dim * 4, p + r * SCORE_STRIDE
                if dim // LANES - v >= VECTORS:
                    wide(n, to, at, values, pieces, words, dim, v)
                    v += VECTORS
                else:
                    thin(n, to, at, values, pieces, words, dim, v)
                    v += 1
            r += n

    return scores, weighted


# -- AMX ------------------------------------------------------------------------------------


def _tile_scores(height: int, width: int) -> Any:
    def scores(b, s, q, q_stride, keys, k_steps, k_stride):
        groups = [load(b, offset(b, keys, 8 * j), I64) for j in range(width)]

        def right(i):
            step = b.mul(i, b.mul(k_stride, I64(16)))
            return lambda j: (b.add(groups[j], step), k_stride)

        sum_tiles(b, height, width, k_steps, q, q_stride, right)
        store_tiles(b, height, width, s, I64(SCORE_STRIDE))

    return op(types.void, *[_ADDRESS] * 6)(scores)


def _tile_weighted(height: int, width: int) -> Any:
    def weighted(b, o, p, values, pieces, stride, at):
        def right(i):
            start = load(b, b.add(values, b.mul(i, I64(8))), I64)
            return lambda j: (offset(b, b.add(start, at), 64 * j), stride)

        sum_tiles(b, height, width, pieces, p, I64(SCORE_STRIDE), right)
        store_tiles(b, height, width, o, stride)

    return op(types.void, *[_ADDRESS] * 6)(weighted)


def tile_products() -> tuple[Any, Any]:
    """(scores, weighted) on AMX for 1..32 rows, padded to 16 or 32 if above 16."""
    s14, s22 = _tile_scores(1, 4), _tile_scores(2, 2)
    w14, w11, w22, w21 = (_tile_weighted(*shape) for shape in ((1, 4), (1, 1), (2, 2), (2, 1)))

    @jit
    def scores(s, q, q_stride, rows, keys, vectors, words, k_stride):
        k_steps = words // 16
        if rows > 16:
            for v in range(0, vectors, 2):
                s22(s + 64 * v, q, q_stride, keys + 8 * v, k_steps, k_stride)
        else:
            for v in range(0, vectors, 4):
                s14(s + 64 * v, q, q_stride, keys + 8 * v, k_steps, k_stride)

    @jit
    def weighted(o, p, rows, values, pieces, words, dim):
        v, vectors, stride = 0, dim // 16, dim * 4
        while v < vectors:
            to, at = o + 64 * v, 64 * v
            if rows > 16:
                if vectors - v >= 2:
                    w22(to, p, values, pieces, stride, at)
                    v += 2
                else:
                    w21(to, p, values, pieces, stride, at)
                    v += 1
            elif vectors - v >= 4:
                w14(to, p, values, pieces, stride, at)
                v += 4
            else:
                w11(to, p, values, pieces, stride, at)
                v += 1

    return scores, weighted
