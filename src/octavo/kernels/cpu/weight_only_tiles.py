"""GEMM on AMX of weights in groups of codes, which become bfloat16 weights on the way.

    y[r, n] = sum over k of x[r, k] * W[n, k] + bias[n],    W = bfloat16(scale * v(code) + minimum)

The answer is that of the decoded weight, to the bit: a weight is rounded once, as a decoder does,
and the sums are those of `gemm_bf16`, over k in steps of 32, in order, at any number of rows.

Weights of a panel are written to memory as a block of `gemm_bf16` (2 KB for a step of k):

    up to 32 rows   some groups at a time, which stay in the first cache; the sums stay in tile
                    registers. Bound by reading the codes, or by making weights of them
    more rows       whole panels, in the second cache, each once for up to `item_rows` rows

Making weights takes about 10 vector instructions for 32 of them (docs/decisions/0067). Layout of
codes: see `weight_only_layout`. Integers in tiles, scaled outside, would need the sums in memory
after each 32 k: more than the product itself.
"""

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi, amx
from octavo.kernels.cpu.panels import put_rows
from octavo.kernels.cpu.simd import (
    I16,
    I64,
    call,
    copy,
    fma,
    geti,
    jit,
    loop,
    offset,
    op,
    peek,
    prefetch,
    stack,
    store,
    take,
    zero,
)
from octavo.kernels.cpu.weight_only_codes import SUMS, Codes, Panel, Terms

_ARGUMENTS = abi.WEIGHT_ONLY_TILES.offset
_TILE, _STEP = 1024, 2048  # bytes of a tile of weights, and of the two of a panel for a step of k
_HALF_STEP = 512  # of a tile: the half of a block of 16 k
_AHEAD = 4096  # bytes of codes between what becomes weights and what is requested from memory
_WORDS = ir.VectorType(I16, 32)
_IN_TURN = [i // 2 + i % 2 * 16 for i in range(32)]  # a word of the lower half, one of the upper


def _rounded_pairs(b: Any, even: Any, odd: Any) -> Any:
    """Words of 16 columns: the bfloat16 of `even`, and of `odd` behind it."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    rounded = call(b, name, _WORDS, odd, even)  # the second operand is the lower half
    order = ir.Constant(ir.VectorType(ir.IntType(32), 32), _IN_TURN)
    return b.shuffle_vector(rounded, ir.Constant(_WORDS, ir.Undefined), order)


class _Decoder:
    """Weights of values and a group's terms, rounded in float32 as `GroupedCodes.dequantized`."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        # A product with a float32 is rounded, so a zero point has to be subtracted before.
        self._subtracts = terms.has_offset == "zero" and terms.kind == "single"

    def terms_of(self, b: Any, panel: Panel, g: Any) -> list[tuple[Any, Any]]:
        """Of group g, for each half of the panel: scale, and what `weight` adds or subtracts."""
        at, factors = self._terms.place(b, panel, g)
        found = []
        for half in (0, 1):
            scale = self._terms.load(b, at, factors, 0, half)
            added = self._terms.load(b, at, factors, 1, half) if self._terms.count == 2 else None
            if self._terms.has_offset == "zero" and not self._subtracts:
                added = b.fneg(b.fmul(added, scale))
            found.append((scale, added))
        return found

    def weight(self, b: Any, value: Any, scale: Any, added: Any) -> Any:
        if added is not None and not self._subtracts:
            return fma(b, value, scale, added)
        return b.fmul(value if added is None else b.fsub(value, added), scale)


def _unpack(codes: Codes, terms: Terms) -> Any:
    """to: weights of a panel, of `groups` groups from `begin` on."""
    decoder = _Decoder(terms)

    def weights(b: Any, panel: Panel, block: Any, to: Any, terms: Any) -> None:
        """Those of a block, at `to` and a tile behind it."""
        for half, (scale, added) in enumerate(terms):
            for p in range(8):
                even, odd = (
                    decoder.weight(b, value, scale, added)
                    for value in codes.widened(b, panel.table, block, p, half)
                )
                store(b, _rounded_pairs(b, even, odd), offset(b, to, _TILE * half + 64 * p))

    def unpack(b, a, to, number, begin, groups):
        panel = Panel(b, a, codes, terms, number)
        start = b.mul(begin, panel.group_blocks)

        def group(i):
            g = b.add(begin, i)
            first, count = panel.group(b, g)
            terms_of_group = decoder.terms_of(b, panel, g)

            def body(j):
                number = b.add(first, j)
                block = b.add(panel.codes, b.mul(number, I64(codes.block_bytes)))
                for line in range(0, codes.block_bytes, 64):
                    prefetch(b, offset(b, block, _AHEAD + line), 3)
                place = b.sub(number, start)
                at = b.add(to, b.mul(b.lshr(place, I64(1)), I64(_STEP)))
                at = b.add(at, b.mul(b.and_(place, I64(1)), I64(_HALF_STEP)))
                weights(b, panel, block, at, terms_of_group)
                return []

            loop(b, count, [], body)
            return []

        loop(b, groups, [], group)

    return op(types.void, *[types.int64] * 5)(unpack)


def _whole_steps(unpack: Any) -> Any:
    """A function that unpacks groups begin..end - 1, and returns of how many steps of k: what is
    beyond the last block is zero."""

    @jit(returns=types.int64)
    def steps(a, to, panel, begin, end):
        unpack(a, to, panel, begin, end - begin)
        group_blocks = geti(a + _ARGUMENTS.group_blocks)
        count = min(end * group_blocks, geti(a + _ARGUMENTS.blocks)) - begin * group_blocks
        if count % 2 != 0:
            beyond = to + count // 2 * _STEP + _HALF_STEP
            zero(beyond, _TILE - _HALF_STEP)
            zero(beyond + _TILE, _TILE - _HALF_STEP)
        return (count + 1) // 2

    return steps


@op(types.void)
def _clear(b):
    amx.clear_tiles(b, 2, 2)


def _add(height: int) -> Any:
    """Sums of 16 * height rows and a panel += the products of `steps` of k."""

    def add(b, x, x_stride, weights, steps):
        def right(i):
            step = b.add(weights, b.mul(i, I64(_STEP)))
            return lambda j: (offset(b, step, _TILE * j), I64(64))

        amx.add_tiles(b, height, 2, steps, x, x_stride, right)

    return op(types.void, *[types.int64] * 4)(add)


def _store(height: int) -> Any:
    def put(b, to):
        amx.store_tiles(b, height, 2, to, I64(SUMS))

    return op(types.void, types.int64)(put)


_add_16, _add_32, _store_16, _store_32 = _add(1), _add(2), _store(1), _store(2)


@jit
def _configure(config, rows):
    """For up to 32 rows."""
    if rows <= 16:
        amx.configure(config, rows, rows)
    else:
        amx.configure(config, 16, rows - 16)


@jit
def _add_rows(rows, x, stride, weights, steps):
    if rows <= 16:
        _add_16(x, stride, weights, steps)
    else:
        _add_32(x, stride, weights, steps)


@jit
def _store_rows(rows, sums):
    if rows <= 16:
        _store_16(sums)
    else:
        _store_32(sums)


def _few_rows(unpack: Any, put: Any) -> Any:
    """A function for all rows, up to 32, of a panel. The tiles are configured."""

    @jit
    def few(a, x, stride, panel, weights, sums):
        rows, chunk = geti(a + _ARGUMENTS.rows), geti(a + _ARGUMENTS.chunk_groups)
        blocks, group_blocks = geti(a + _ARGUMENTS.blocks), geti(a + _ARGUMENTS.group_blocks)
        groups = (blocks + group_blocks - 1) // group_blocks
        _clear()
        for begin in range(0, groups, chunk):
            steps = unpack(a, weights, panel, begin, min(begin + chunk, groups))
            _add_rows(rows, x + begin * group_blocks * 32, stride, weights, steps)
        _store_rows(rows, sums)
        put(a, sums, 0, rows, panel)

    return few


def _many_rows(unpack: Any, put: Any) -> Any:
    """A function for the rows first..last - 1 of the panels begin..end - 1, 32 x 32 at a time."""

    @jit
    def many(a, x, stride, rows, panels, weights, memory):
        (first, last), (begin, end), (sums, config) = rows, panels, memory
        blocks, group_blocks = geti(a + _ARGUMENTS.blocks), geti(a + _ARGUMENTS.group_blocks)
        groups = (blocks + group_blocks - 1) // group_blocks
        size = (blocks + 1) // 2 * _STEP
        for panel in range(begin, end):
            unpack(a, weights + (panel - begin) * size, panel, 0, groups)
        for row in range(first, last, 32):
            count = min(32, last - row)
            if count < 32:
                _configure(config, count)
            for panel in range(begin, end):
                _clear()
                here = weights + (panel - begin) * size
                _add_rows(count, x + row * stride, stride, here, (blocks + 1) // 2)
                _store_rows(count, sums)
                put(a, sums, row, count, panel)
            if count < 32:
                _configure(config, 32)

    return many


@jit
def _pad(a):
    """Write all rows to q, with zeros up to a whole step of k; by all threads, until all are."""
    rows, size = geti(a + _ARGUMENTS.rows), 2 * geti(a + _ARGUMENTS.in_size)
    stride = geti(a + _ARGUMENTS.q_stride)
    row = take(a + _ARGUMENTS.taken)
    while row < rows:
        to = geti(a + _ARGUMENTS.q) + row * stride
        copy(to, geti(a + _ARGUMENTS.x) + row * geti(a + _ARGUMENTS.x_stride), size)
        zero(to + size, stride - size)
        take(a + _ARGUMENTS.done)
        row = take(a + _ARGUMENTS.taken)
    while peek(a + _ARGUMENTS.done) < rows:
        pass


def product(variant: str) -> Any:
    """`variant`: see `weight_only.product`; x and y are bfloat16."""
    bits, kind, has_offset, dtype = variant.split("-")
    assert dtype == "bfloat16"
    codes = Codes(int(bits[0]), not bits.endswith("table"), pairs=True)
    unpack = _whole_steps(_unpack(codes, Terms(kind, has_offset)))
    put = put_rows(_ARGUMENTS, dtype, SUMS)
    few, many = _few_rows(unpack, put), _many_rows(unpack, put)
    memory = stack(64 + 32 * SUMS)  # the tile configuration, then the sums

    @jit
    def work(a):
        config = memory()
        sums = config + 64
        x, stride = geti(a + _ARGUMENTS.x), geti(a + _ARGUMENTS.x_stride)
        if geti(a + _ARGUMENTS.in_size) % 32 != 0:
            _pad(a)
            x, stride = geti(a + _ARGUMENTS.q), geti(a + _ARGUMENTS.q_stride)
        thread = take(a + _ARGUMENTS.thread)
        weights = geti(a + _ARGUMENTS.scratch) + thread * geti(a + _ARGUMENTS.scratch_size)
        rows, panels = geti(a + _ARGUMENTS.rows), geti(a + _ARGUMENTS.panels)
        item_rows, item_panels = geti(a + _ARGUMENTS.item_rows), geti(a + _ARGUMENTS.item_panels)
        if rows <= 32:
            item_panels = 1
        across = (panels + item_panels - 1) // item_panels
        count = (rows + item_rows - 1) // item_rows * across
        _configure(config, min(rows, 32))
        index = take(a + _ARGUMENTS.counter)
        while index < count:
            row, panel = index // across * item_rows, index % across * item_panels
            if rows <= 32:
                few(a, x, stride, panel, weights, sums)
            else:
                ends = min(row + item_rows, rows), min(panel + item_panels, panels)
                many(a, x, stride, (row, ends[0]), (panel, ends[1]), weights, (sums, config))
            index = take(a + _ARGUMENTS.counter)
        amx.release()

    def kernel(a: int) -> None:
        work(a)

    return kernel
