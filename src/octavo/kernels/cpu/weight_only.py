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

Few rows are bound by reading the codes, which become values in registers, for up to 8 rows at a
time. For many rows values are written to a buffer in the cache once, and multiplied with _TALL rows
at a time, whose words lie side by side. Layout of the weight: see `weight_only_layout`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.activations import activated
from octavo.kernels.cpu.simd import (
    F32,
    HAS_DOT,
    I8,
    I32,
    I64,
    LANES,
    VF,
    VI,
    call,
    const,
    fma,
    get32,
    geti,
    jit,
    load,
    loop,
    offset,
    op,
    peek,
    pointer,
    row_memory,
    set32,
    setf,
    splat,
    stack,
    store,
    take,
    vadd,
    vload,
    vmul,
    vsplat,
    vsum,
    zero,
)  # fmt: skip
from octavo.kernels.cpu.weight_only_codes import SUMS, Codes, Panel, Terms, field

_ARGUMENTS = abi.WEIGHT_ONLY.offset
_PARTS = 16 // LANES  # vectors of float32 of half a panel
_VECTORS = 2 * _PARTS  # of a panel
_ROWS = (1, 2, 4, 8) if LANES == 16 else (1, 3)  # rows for which codes are read together
_TALL = abi.WEIGHT_ONLY_TALL[LANES]  # rows that are multiplied together with values in the cache
_MANY = 512  # rows from which that is done: with fewer it is slower (docs/log.md)
_DIRECT = 2 if LANES == 16 else 1  # rows read where they are: no more than one of _ROWS computes
_CHUNK = 16  # blocks of k that become values in the cache at a time: 16 or 32 KB
_FETCHING_ROWS, _FETCHED = 2, 4096  # up to which rows codes are requested ahead, and by how much


def _dot(b: Any, pairs: bool, total: Any, x: Any, value: Any) -> Any:
    if pairs:
        return call(b, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}", VF, total, x, value)
    return fma(b, x, value, total)


def _lines(b: Any, a: Any, name: str, row: Any, rows: int) -> list[Any]:
    """Addresses of `rows` rows of x, q or sums, from `row` on."""
    stride = field(b, a, f"{name}_stride")
    first = b.add(field(b, a, name), b.mul(stride, row))
    return [b.add(first, b.mul(stride, I64(r))) for r in range(rows)]


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
                        sums[at] = _dot(b, codes.pairs, sums[at], x, value)
        return sums

    def dots(b, a, to, panel, row):
        weight = Panel(b, a, codes, terms, panel)
        starts = _lines(b, a, source, row, rows)
        group_sums = _lines(b, a, "sums", row, rows)

        def group(g, *totals):
            first, count = weight.group(b, g)
            here = b.add(weight.codes, b.mul(first, I64(codes.block_bytes)))
            lines = [b.add(start, b.mul(first, I64(16 * size))) for start in starts]

            def body(i, *sums):
                block = b.add(here, b.mul(i, I64(codes.block_bytes)))
                if rows <= _FETCHING_ROWS:
                    for line in range(0, codes.block_bytes, 64):
                        _fetch(b, offset(b, block, _FETCHED + line))
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


def _fetch(b: Any, address: Any) -> None:
    flags = [ir.Constant(I32, value) for value in (0, 3, 1)]
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address, I8), *flags)


def _unpack(codes: Codes, terms: Terms) -> Any:
    """to: the values of `count` blocks of a panel, words of 32 columns: pairs, or float32."""

    def unpack(b, a, to, panel, first, count):
        weight = Panel(b, a, codes, terms, panel)
        here = b.add(weight.codes, b.mul(first, I64(codes.block_bytes)))

        def body(i):
            block = b.add(here, b.mul(i, I64(codes.block_bytes)))
            at = b.add(to, b.mul(i, I64(codes.value_bytes)))
            for p in range(8):
                found = [codes.values(b, weight.table, block, p, half) for half in (0, 1)]
                for h in range(codes.words):
                    vectors = [vector for half in found for vector in half[h]]
                    line = SUMS * (codes.words * p + h)
                    for v, value in enumerate(vectors):
                        store(b, value, offset(b, at, line + 4 * LANES * v))
            return []

        loop(b, count, [], body)

    return op(types.void, *[types.int64] * 5)(unpack)


def _tall_dots(codes: Codes, terms: Terms) -> Any:
    """to[_TALL, 32] += the sums of _TALL rows from `row` on over `groups` groups from `first` on.

    unpacked: values of the groups (see `_unpack`).
    """
    width = min(2, _VECTORS)  # vectors at a time: their sums and those of all rows fit registers
    kind = VI if codes.pairs else VF
    line_bytes = 4 * _TALL

    def step(b, row, value, sums):
        """sums plus the products of one word of the rows with one of the values."""
        loaded = [load(b, offset(b, value, 4 * LANES * v), kind) for v in range(width)]
        out = []
        for r in range(_TALL):
            x = splat(b, load(b, offset(b, row, 4 * r), kind.element))
            out += [_dot(b, codes.pairs, sums[r * width + v], x, w) for v, w in enumerate(loaded)]
        return out

    def columns(b, weight, span, to, q, lines, vector):
        unpacked, begin, groups = span
        places = [offset(b, to, r * SUMS + 4 * LANES * (vector + v))
                  for r in range(_TALL) for v in range(width)]  # fmt: skip

        def group(i, *totals):
            g = b.add(begin, i)
            first, count = weight.group(b, g)
            row = b.add(q, b.mul(first, I64(8 * codes.words * line_bytes)))
            here = b.add(unpacked, b.mul(b.mul(i, weight.group_blocks), I64(codes.value_bytes)))
            here = offset(b, here, 4 * LANES * vector)

            def body(k, *sums):
                at = b.add(row, b.mul(k, I64(line_bytes)))
                return step(b, at, b.add(here, b.mul(k, I64(SUMS))), sums)

            words = b.mul(count, I64(8 * codes.words))
            sums = loop(b, words, [const(0.0)] * len(places), body)
            return terms.apply(b, weight, lines, g, sums, list(totals), vector)

        totals = loop(b, groups, [load(b, place, VF) for place in places], group)
        for place, total in zip(places, totals, strict=True):
            store(b, total, place)

    def dots(b, a, to, panel, row, unpacked, first, groups):
        weight = Panel(b, a, codes, terms, panel)
        (q,), lines = _lines(b, a, "q", row, 1), _lines(b, a, "sums", row, _TALL)
        for vector in range(0, _VECTORS, width):
            columns(b, weight, (unpacked, first, groups), to, q, lines, vector)

    return op(types.void, *[types.int64] * 7)(dots)


def _prepare(dtype: str, pairs: bool, has_offset: str) -> Any:
    """A function that writes row r to q, and the sums of its groups.

    Rows below `tall` are written in words [deep][_TALL rows], others one by one. Sums are negative
    where they are to be subtracted.
    """
    size, read, _ = row_memory(dtype == "bfloat16")
    _, _, write = row_memory(pairs)
    wide = 2 if pairs else 4
    words = LANES * wide // 4
    sign = np.float32(-1.0 if has_offset == "zero" else 1.0)
    sums_wanted = has_offset != "none"
    spare = stack(64)

    @jit
    def put(to, step, i, value):
        """LANES values from i on, to words that are `step` bytes apart."""
        if step == 4:
            write(to + i * wide, value, LANES)
        else:
            near = spare()
            write(near, value, LANES)
            for j in range(words):
                set32(to + (i * wide // 4 + j) * step, get32(near + 4 * j))

    @jit
    def prepare(a, r, tall, copies):
        x = geti(a + _ARGUMENTS.x) + r * geti(a + _ARGUMENTS.x_stride)
        q, q_stride = geti(a + _ARGUMENTS.q), geti(a + _ARGUMENTS.q_stride)
        if r < tall:
            to, step = q + r // _TALL * _TALL * q_stride + r % _TALL * 4, 4 * _TALL
        else:
            to, step = q + r * q_stride, 4
        n, deep = geti(a + _ARGUMENTS.in_size), geti(a + _ARGUMENTS.blocks) * 16
        sums = geti(a + _ARGUMENTS.sums) + r * geti(a + _ARGUMENTS.sums_stride)
        group, nothing = geti(a + _ARGUMENTS.group_blocks) * 16, vsplat(np.float32(0.0))
        for first in range(0, n, group):
            total = nothing
            for i in range(first, min(first + group, n), LANES):
                value = read(x + i * size, n - i)
                if copies:
                    put(to, step, i, value)
                total = vadd(total, value)
            if sums_wanted:
                setf(sums + first // group * 4, vsum(total) * sign)
        if copies:
            for i in range((n + LANES - 1) // LANES * LANES, deep, LANES):
                put(to, step, i, nothing)

    return prepare


def put_rows(dtype: str) -> Any:
    """A function that stores y of sums[n, 32] of a panel, of rows r... ."""
    size, _, write = row_memory(dtype == "bfloat16")
    silu, gelu = (activated(name) for name in abi.ACTIVATIONS)

    @jit
    def put(a, sums, r, n, panel):
        columns, bias = geti(a + _ARGUMENTS.out_size), geti(a + _ARGUMENTS.bias)
        kind = geti(a + _ARGUMENTS.activation)
        column = panel * 32 if kind == 0 else panel * 16
        stride = geti(a + _ARGUMENTS.out_stride)
        out = geti(a + _ARGUMENTS.out) + r * stride + column * size
        for i in range(n):
            here = sums + i * SUMS
            for c in range(0, min(32 if kind == 0 else 16, columns - column), LANES):
                value = vload(here + c * 4)
                if bias != 0:
                    value = vadd(value, vload(bias + (panel * 32 + c) * 4))
                if kind != 0:
                    up = vload(here + 64 + c * 4)
                    if bias != 0:
                        up = vadd(up, vload(bias + (panel * 32 + 16 + c) * 4))
                    value = vmul(silu(value) if kind == 1 else gelu(value), up)
                write(out + i * stride + c * size, value, columns - column - c)

    return put


def product(variant: str) -> Any:
    """`variant` is "4-half-none-bfloat16", "6-super-none-float32", "4table-half-none-float32" and
    so on: bits, how terms are stored, which offset, and the type of x and y."""
    bits, kind, has_offset, dtype = variant.split("-")
    pairs = HAS_DOT and dtype == "bfloat16"
    codes = Codes(int(bits[0]), not bits.endswith("table"), pairs)
    terms = Terms(kind, has_offset)
    prepare, put = _prepare(dtype, pairs, has_offset), put_rows(dtype)
    direct = dtype == ("bfloat16" if pairs else "float32")
    few, many = _few_rows(codes, terms, put, direct), _many_rows(codes, terms, put)
    sums_wanted = has_offset != "none"

    @jit
    def work(a):
        rows, item_rows = geti(a + _ARGUMENTS.rows), geti(a + _ARGUMENTS.item_rows)
        tall = rows // _TALL * _TALL if rows >= _MANY else 0
        copies = True
        if direct and rows <= _DIRECT and geti(a + _ARGUMENTS.in_size) % 16 == 0:
            copies = False
        if copies or sums_wanted:
            row = take(a + _ARGUMENTS.taken)
            while row < rows:
                prepare(a, row, tall, copies)
                take(a + _ARGUMENTS.done)
                row = take(a + _ARGUMENTS.taken)
            while peek(a + _ARGUMENTS.done) < rows:  # wait for the rows of other threads
                pass
        thread = take(a + _ARGUMENTS.thread)
        scratch = geti(a + _ARGUMENTS.scratch) + thread * geti(a + _ARGUMENTS.scratch_size)
        panels = geti(a + _ARGUMENTS.panels)
        count = panels * ((rows + item_rows - 1) // item_rows)
        index = take(a + _ARGUMENTS.counter)
        while index < count:
            panel, first = index % panels, index // panels * item_rows
            end = min(rows, first + item_rows)
            if first < tall:
                many(a, panel, first, min(end, tall), scratch)
            few(a, panel, max(first, tall), end, copies)
            index = take(a + _ARGUMENTS.counter)

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


def _many_rows(codes: Codes, terms: Terms, put: Any) -> Any:
    """A function for the rows first..end - 1 of a panel, whole blocks of _TALL: a chunk of its
    codes is turned into values in the cache, for all of the rows."""
    unpack, dots = _unpack(codes, terms), _tall_dots(codes, terms)

    @jit
    def many(a, panel, first, end, scratch):
        blocks, group_blocks = geti(a + _ARGUMENTS.blocks), geti(a + _ARGUMENTS.group_blocks)
        groups = (blocks + group_blocks - 1) // group_blocks
        chunk = max(1, _CHUNK // group_blocks)
        unpacked = scratch + geti(a + _ARGUMENTS.item_rows) * SUMS
        zero(scratch, (end - first) * SUMS)
        for g in range(0, groups, chunk):
            some, begin = min(chunk, groups - g), g * group_blocks
            unpack(a, unpacked, panel, begin, min(some * group_blocks, blocks - begin))
            for r in range(first, end, _TALL):
                dots(a, scratch + (r - first) * SUMS, panel, r, unpacked, g, some)
        put(a, scratch, first, end - first, panel)

    return many


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
