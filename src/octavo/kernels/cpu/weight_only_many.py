"""Sums of many rows for `weight_only`: codes become values in the cache, for all rows of an item.

A chunk of a panel's inputs is computed for one block of TALL rows after another. The first block
turns codes into values and writes them to a buffer, where the others read them: the conversion runs
beside the products, on other units (with AVX2 before them, as there are 16 registers). Rows lie in
blocks [16 inputs][TALL rows]: one address reaches all rows of a block, and two threads never write
to the same cache line.
"""

from typing import Any

from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import (
    I64,
    LANES,
    VF,
    VI,
    const,
    geti,
    jit,
    load,
    loop,
    offset,
    op,
    prefetch,
    splat,
    store,
    zero,
)
from octavo.kernels.cpu.weight_only_codes import SUMS, Codes, Panel, Terms, dot, lines_of

_ARGUMENTS = abi.WEIGHT_ONLY.offset
_VECTORS = 32 // LANES  # of a panel
TALL = abi.WEIGHT_ONLY_TALL[LANES]  # rows of a block
_TAIL = TALL // 2  # of the last, if that is enough
_FRESH = TALL if LANES == 16 else 0  # rows computed beside the conversion, if registers allow
_WIDTH = 2  # vectors of columns at a time: their sums and those of all rows fit registers
_CHUNK = 16  # blocks of inputs whose values are in the cache: 16 or 32 KB
_AHEAD = 4096  # bytes by which codes are requested ahead: about a chunk


class _Dots:
    """Emits to[rows, 32] += the sums of the first rows of a block over some groups of a panel."""

    def __init__(self, codes: Codes, terms: Terms, rows: int, fresh: bool) -> None:
        """fresh: values come from the codes, and are written."""
        self.codes, self.terms, self.rows, self.fresh = codes, terms, rows, fresh

    def emit(self) -> Any:
        """A function of the arguments, `to`, the panel, the first row, the memory of the values,
        the first group and the number of groups."""

        def dots(b, a, to, panel, row, values, first, groups):
            weight = Panel(b, a, self.codes, self.terms, panel)
            (q,), sums = lines_of(b, a, "q", row, 1), lines_of(b, a, "sums", row, self.rows)
            for vector in range(0, _VECTORS, _WIDTH):
                self._columns(b, weight, (values, first, groups), to, q, sums, vector)

        return op(types.void, *[types.int64] * 7)(dots)

    def _columns(
        self, b: Any, weight: Panel, span: tuple[Any, Any, Any], to: Any, q: Any,
        group_sums: list[Any], vector: int,
    ) -> None:  # fmt: skip
        """Those of `width` vectors of columns from `vector` on."""
        values, begin, groups = span
        codes, line = self.codes, 32 * self.codes.words  # bytes of a row in a block
        places = [offset(b, to, r * SUMS + 4 * LANES * (vector + v))
                  for r in range(self.rows) for v in range(_WIDTH)]  # fmt: skip

        def group(i, *totals):
            g = b.add(begin, i)
            first, count = weight.group(b, g)
            row = b.add(q, b.mul(first, I64(TALL * line)))
            here = b.add(values, b.mul(b.mul(i, weight.group_blocks), I64(codes.value_bytes)))
            here = offset(b, here, 4 * LANES * vector)
            block = b.add(weight.codes, b.mul(first, I64(codes.block_bytes)))

            def body(k, *sums):
                at = b.add(row, b.mul(k, I64(TALL * line)))
                source = b.add(block, b.mul(k, I64(codes.block_bytes)))
                value = b.add(here, b.mul(k, I64(codes.value_bytes)))
                return self._block(b, weight, at, source, value, list(sums), vector)

            sums = loop(b, count, [const(0.0)] * len(places), body)
            if self.rows == 0:
                return []
            return self.terms.apply(b, weight, group_sums, g, sums, list(totals), vector)

        totals = loop(b, groups, [load(b, place, VF) for place in places], group)
        for place, total in zip(places, totals, strict=True):
            store(b, total, place)

    def _block(
        self, b: Any, weight: Panel, row: Any, source: Any, value: Any, sums: list[Any], vector: int
    ) -> list[Any]:  # fmt: skip
        """sums plus the products of 16 inputs."""
        words = self.codes.words
        if self.fresh:
            for line in range(0, self.codes.block_bytes * _WIDTH // _VECTORS, 64):
                prefetch(b, offset(b, source, _AHEAD + line), 3)
        for word in range(8 * words):
            at = offset(b, value, SUMS * word)
            loaded = self._values(b, weight, source, at, word, vector)
            for r in range(self.rows):
                x = load(b, offset(b, row, 32 * words * r + 4 * word), loaded[0].type.element)
                x = splat(b, x)
                for v, w in enumerate(loaded):
                    i = r * _WIDTH + v
                    sums[i] = dot(b, self.codes.pairs, sums[i], x, w)
        return sums

    def _values(
        self, b: Any, weight: Panel, source: Any, at: Any, word: int, vector: int
    ) -> list[Any]:  # fmt: skip
        """_WIDTH vectors of words of the columns, from `at`, or of the codes and written there."""
        places = [offset(b, at, 4 * LANES * v) for v in range(_WIDTH)]
        if not self.fresh:
            return [load(b, place, VI if self.codes.pairs else VF) for place in places]
        p, h = divmod(word, self.codes.words)
        halves = [self.codes.values(b, weight.table, source, p, half) for half in (0, 1)]
        found = [v for half in halves for v in half[h]][vector : vector + _WIDTH]
        for place, new in zip(places, found, strict=True):
            store(b, new, place)
        return found


def many_rows(codes: Codes, terms: Terms, put: Any) -> Any:
    """A function for the rows first..end - 1 of a panel; blocks of TALL rows begin at `first`."""
    fresh, tall, tail = (
        _Dots(codes, terms, rows, new).emit()
        for rows, new in ((_FRESH, True), (TALL, False), (_TAIL, False))
    )

    @jit
    def many(a, panel, first, end, scratch):
        blocks, group_blocks = geti(a + _ARGUMENTS.blocks), geti(a + _ARGUMENTS.group_blocks)
        groups = (blocks + group_blocks - 1) // group_blocks
        chunk = max(1, _CHUNK // group_blocks)
        values = scratch + geti(a + _ARGUMENTS.item_rows) * SUMS
        zero(scratch, (end - first) * SUMS)
        for g in range(0, groups, chunk):
            some = min(chunk, groups - g)
            fresh(a, scratch, panel, first, values, g, some)
            for r in range(first + _FRESH, end, TALL):
                if end - r > _TAIL:
                    tall(a, scratch + (r - first) * SUMS, panel, r, values, g, some)
                else:
                    tail(a, scratch + (r - first) * SUMS, panel, r, values, g, some)
        put(a, scratch, first, end - first, panel)

    return many
