"""GEMM of weights in groups of codes with activations as they are: nothing is rounded on the way.

    y[r, n] = sum over groups g of scale[n, g] * (sum over k in g of v(code[n, k]) x[r, k])
              + minimum[n, g] * (sum over k in g of x[r, k])          + bias[n]

v(code) is an integer that bfloat16 holds exactly (`codes.Form`), so each product of a value and a
bfloat16 x is exact in float32, where all sums are formed: those of a group over its pairs of k in
order, then one fused multiply-add for its scale and one for its offset, over the groups in order.
The order does not depend on the number of rows, so a row's result depends only on the row.

Codes become values in registers (`weight_only_codes`): by a table of words where there are 16 lanes
of float32 (any table, of 16 to 64 entries), else by conversion. Two kinds of products:

    pairs   vdpbf16ps of pairs of k, where x is bfloat16 and the processor has it
    floats  fused multiply-adds of x in float32

Up to 8 rows are bound by reading the codes, which become values in registers, for all of them at
once. For more rows see `weight_only_many`. Layout of the weight: see `weight_only_layout`.
"""

from typing import Any

import numpy as np
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.panels import put_rows
from octavo.kernels.cpu.simd import (
    F32,
    HAS_DOT,
    I32,
    I64,
    LANES,
    const,
    geti,
    jit,
    load,
    loop,
    offset,
    op,
    peek,
    prefetch,
    row_memory,
    setf,
    splat,
    stack,
    store,
    take,
    vadd,
    vsplat,
    vsum,
)  # fmt: skip
from octavo.kernels.cpu.weight_only_codes import SUMS, Codes, Panel, Terms, dot, lines_of
from octavo.kernels.cpu.weight_only_many import TALL, many_rows

_ARGUMENTS = abi.WEIGHT_ONLY.offset
_PARTS = 16 // LANES  # vectors of float32 of half a panel
_VECTORS = 2 * _PARTS  # of a panel
_ROWS = (1, 2, 4, 8) if LANES == 16 else (1, 3)  # rows for which codes are read together
_FEW = _ROWS[-1]  # rows up to which codes are read for each block of them
_DIRECT = 2 if LANES == 16 else 1  # rows read where they are: no more than one of _ROWS computes
_FETCHING_ROWS, _FETCHED = 2, 4096  # up to which rows codes are requested ahead, and by how much


def _dots(codes: Codes, terms: Terms, rows: int, source: str) -> Any:
    """to[rows, 32]: the sums of `rows` rows, of `source` (x or q), over all groups of a panel."""
    size = 2 if codes.pairs else 4  # bytes of a value of x

    def block_sums(b: Any, table: Any, block: Any, lines: Any, sums: list[Any]) -> list[Any]:
        sums = list(sums)
        for p in range(8):
            values = [codes.values(b, table, block, p, half) for half in (0, 1)]
            for h in range(len(values[0])):
                vectors = [vector for half in values for vector in half[h]]
                for r, line in enumerate(lines):
                    word = load(b, offset(b, line, size * (2 * p + h)), I32 if codes.pairs else F32)
                    x = splat(b, word)
                    for v, value in enumerate(vectors):
                        at = r * _VECTORS + v
                        sums[at] = dot(b, codes.pairs, sums[at], x, value)
        return sums

    def dots(b, a, to, panel, row):
        weight = Panel(b, a, codes, terms, panel)
        starts = lines_of(b, a, source, row, rows)
        group_sums = lines_of(b, a, "sums", row, rows)

        def group(g, *totals):
            first, count = weight.group(b, g)
            here = b.add(weight.codes, b.mul(first, I64(codes.block_bytes)))
            lines = [b.add(start, b.mul(first, I64(16 * size))) for start in starts]

            def body(i, *sums):
                block = b.add(here, b.mul(i, I64(codes.block_bytes)))
                if rows <= _FETCHING_ROWS:
                    for line in range(0, codes.block_bytes, 64):
                        prefetch(b, offset(b, block, _FETCHED + line), 3)
                at = b.mul(i, I64(16 * size))
                words = [b.add(line, at) for line in lines]
                return block_sums(b, weight.table, block, words, list(sums))

            sums = loop(b, count, [const(0.0)] * (rows * _VECTORS), body)
            return terms.apply(b, weight, group_sums, g, sums, list(totals))

        totals = loop(b, weight.groups, [const(0.0)] * (rows * _VECTORS), group)
        for i, total in enumerate(totals):
            line, vector = divmod(i, _VECTORS)
            store(b, total, offset(b, to, line * SUMS + vector * 4 * LANES))

    return op(types.void, *[types.int64] * 4)(dots)


def _prepare(dtype: str, pairs: bool, has_offset: str) -> Any:
    """A function that writes the rows first..end - 1 to q, and the sums of their groups.

    many: in blocks [16 inputs][TALL rows], else one by one. Sums are negative where they are to
    be subtracted.
    """
    size, read, _ = row_memory(dtype == "bfloat16")
    _, _, write = row_memory(pairs)
    wide = 16 * (2 if pairs else 4)  # bytes of 16 inputs
    sign = np.float32(-1.0 if has_offset == "zero" else 1.0)
    sums_wanted = has_offset != "none"

    @jit
    def prepare(a, r, many, copies):
        x = geti(a + _ARGUMENTS.x) + r * geti(a + _ARGUMENTS.x_stride)
        q, q_stride = geti(a + _ARGUMENTS.q), geti(a + _ARGUMENTS.q_stride)
        to, step = q + r * q_stride, wide
        if many:
            to, step = q + r // TALL * TALL * q_stride + r % TALL * wide, wide * TALL
        n, deep = geti(a + _ARGUMENTS.in_size), geti(a + _ARGUMENTS.blocks) * 16
        sums = geti(a + _ARGUMENTS.sums) + r * geti(a + _ARGUMENTS.sums_stride)
        group, nothing = geti(a + _ARGUMENTS.group_blocks) * 16, vsplat(np.float32(0.0))
        for first in range(0, n, group):
            total = nothing
            for i in range(first, min(first + group, n), LANES):
                value = read(x + i * size, n - i)
                if copies:
                    write(to + i // 16 * step + i % 16 * wide // 16, value, LANES)
                total = vadd(total, value)
            if sums_wanted:
                setf(sums + first // group * 4, vsum(total) * sign)
        if copies:
            for i in range((n + LANES - 1) // LANES * LANES, deep, LANES):
                write(to + i // 16 * step + i % 16 * wide // 16, nothing, LANES)

    return prepare


def product(variant: str) -> Any:
    """`variant` is "4-half-none-bfloat16", "6-super-none-float32", "4table-half-none-float32" and
    so on: bits, how terms are stored, which offset, and the type of x and y."""
    bits, kind, has_offset, dtype = variant.split("-")
    pairs = HAS_DOT and dtype == "bfloat16"
    codes = Codes(int(bits[0]), not bits.endswith("table"), pairs)
    terms = Terms(kind, has_offset)
    prepare, put = _prepare(dtype, pairs, has_offset), put_rows(_ARGUMENTS, dtype, SUMS)
    direct = dtype == ("bfloat16" if pairs else "float32")
    compute_few = _few_rows(codes, terms, put, direct)
    compute_many = many_rows(codes, terms, put)
    sums_wanted = has_offset != "none"

    @jit
    def work(a):
        rows, item_rows = geti(a + _ARGUMENTS.rows), geti(a + _ARGUMENTS.item_rows)
        many = rows > _FEW
        copies = many or not (direct and rows <= _DIRECT and geti(a + _ARGUMENTS.in_size) % 16 == 0)
        if copies or sums_wanted:
            unit = TALL if many else 1  # rows that one thread writes
            first = take(a + _ARGUMENTS.taken) * unit
            while first < rows:
                for row in range(first, min(first + unit, rows)):
                    prepare(a, row, many, copies)
                take(a + _ARGUMENTS.done)
                first = take(a + _ARGUMENTS.taken) * unit
            while peek(a + _ARGUMENTS.done) * unit < rows:  # wait for the rows of other threads
                pass
        items = (rows + item_rows - 1) // item_rows  # of equal size, as far as blocks allow
        item_rows = ((rows + items - 1) // items + TALL - 1) // TALL * TALL
        items = (rows + item_rows - 1) // item_rows
        thread = take(a + _ARGUMENTS.thread)
        scratch = geti(a + _ARGUMENTS.scratch) + thread * geti(a + _ARGUMENTS.scratch_size)
        panels = geti(a + _ARGUMENTS.panels)
        # Items are claimed in runs, each a part of what is left: the codes of a run's panels lie
        # one after another, so what is requested ahead is of the thread that asks for it.
        left, share = panels * items, 2 * geti(a + _ARGUMENTS.threads)
        begin, turn, claimed = 0, 0, take(a + _ARGUMENTS.counter)
        while left > 0:
            run = max(1, left // share)
            if turn == claimed:
                for index in range(begin, begin + run):
                    panel, first = index % panels, index // panels * item_rows
                    end = min(rows, first + item_rows)
                    if many:
                        compute_many(a, panel, first, end, scratch)
                    else:
                        compute_few(a, panel, first, end, copies)
                claimed = take(a + _ARGUMENTS.counter)
            begin, left, turn = begin + run, left - run, turn + 1

    def kernel(a: int) -> None:
        work(a)

    return kernel


def _few_rows(codes: Codes, terms: Terms, put: Any, direct: bool) -> Any:
    """A function for the rows first..end - 1 of a panel; it reads the codes for some at a time."""
    dots = _chosen([(rows, _dots(codes, terms, rows, "q")) for rows in _ROWS])
    near = [(rows, _dots(codes, terms, rows, "x")) for rows in _ROWS if rows <= _DIRECT and direct]
    dots_of_x = _chosen(near) if near else dots
    spare = stack(_ROWS[-1] * SUMS)

    @jit
    def few(a, panel, first, end, copied):
        sums, r = spare(), first
        while r < end:
            if copied:
                n = min(end - r, dots(end - r, a, sums, panel, r))
            else:
                n = min(end - r, dots_of_x(end - r, a, sums, panel, r))
            put(a, sums, r, n, panel)
            r += n

    return few


def _chosen(counts: list[tuple[int, Any]]) -> Any:
    """A function of the rows that are left, and what the `dots` take. It computes as many rows as
    one of them does, which may be more than are left, and returns how many."""
    (rows, dots), *others = counts
    if not others:

        @jit(returns=types.int64)
        def last(left, a, to, panel, row):
            dots(a, to, panel, row)
            return rows

        return last
    more = _chosen(others)

    @jit(returns=types.int64)
    def some(left, a, to, panel, row):
        if left > rows:
            return more(left, a, to, panel, row)
        dots(a, to, panel, row)
        return rows

    return some
