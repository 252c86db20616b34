"""GEMM y = x W^T + b of floating-point weights on vectors, batch-invariant by construction.

    y[r, n] = sum over k of x[r, k] * W[n, k] + b[n]

W keeps the type in which it is stored, and is converted while it is loaded into registers:

    W         x                   multiplied by
    bfloat16  bfloat16            vdpbf16ps, two k at a time (AVX-512 BF16)
    bfloat16  bfloat16, float32   fused multiply-adds of float32; both become float32 by a shift
    float16   float32             the same, converted (F16C, AVX-512)
    float32   float32             the same

Sums are float32, over k in order, two k in a step, whatever the number of rows, threads or columns
computed together; so a row's result depends only on the row.

W is stored as [N / 32][K / 2] of steps: panels of 32 columns, and a step is 2 k of a panel. In
bfloat16 it is 32 words of a pair of k, else 32 values of the first k, then of the second. Where
there are up to _FEW rows the GEMM is bound by reading W, and a work item is one panel. Else it is
two panels x item_rows rows, in tiles of _TALL rows whose sums stay in registers for a chunk of K;
the rows and the chunk of both panels stay in a core's second cache.

With an activation (see `abi.ACTIVATIONS`) panels are [16 of gate | 16 of up], and 16 of
activation(gate) * up are stored.
"""

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.panels import put_rows
from octavo.kernels.cpu.simd import (
    F32,
    HAS_DOT,
    I32,
    I64,
    LANES,
    VF,
    VI,
    call,
    consti,
    fma,
    get16,
    get32,
    geti,
    jit,
    load,
    loop,
    offset,
    op,
    prefetch,
    set16,
    set32,
    splat,
    stack,
    store,
    take,
    zero,
)

_ARGUMENTS, _PACK = abi.GEMM_VECTORS.offset, abi.PACK_VECTORS.offset
_WIDE = 32 // LANES  # vectors of a panel
_TALL = abi.GEMM_VECTORS_TALL
_MOST_ROWS = abi.GEMM_VECTORS_ROWS  # of a work item
_FEW = 4  # rows up to which W is read by one panel
_LOW = (1, 2, 4) if LANES == 16 else (1, 2)  # rows of the tiles of one panel
_CHUNK = 1024  # steps whose sums stay in registers: 256 KB of two panels in bfloat16
_FETCHED = 4096  # bytes by which W is requested ahead
_SUMS = 256  # bytes of a row of sums, of two panels
_WORDS = 16  # of a row that are laid out at a time: a line of memory of pairs
_HALVES = ir.VectorType(ir.HalfType(), LANES)


class _Types:
    """How a step of W and of rows of x become operands."""

    def __init__(self, weight: str, x: str) -> None:
        self.weight, self.x = weight, x
        self.dot = HAS_DOT and weight == x == "bfloat16"
        self.x_bytes = 2 if x == "bfloat16" else 4
        self.step_bytes = 256 if weight == "float32" else 128
        self.products = 1 if self.dot else 2  # of an element of W's vector and one of x, in a step

    def at(self, v: int, h: int) -> int:
        """Where vector v of the panel is in a step, of the step's k number h."""
        if self.weight == "float32":
            return 128 * h + 4 * LANES * v
        return 64 * h + 2 * LANES * v if self.weight == "float16" else 4 * LANES * v

    def vector(self, b: Any, step: Any, v: int, h: int) -> Any:
        """That vector: of pairs, or of float32."""
        address = offset(b, step, self.at(v, h))
        if self.weight == "float32":
            return load(b, address, VF)
        if self.weight == "float16":
            return b.fpext(load(b, address, _HALVES), VF)
        words = load(b, address, VI)
        return words if self.dot else _half(b, words, h)

    def scalar(self, b: Any, address: Any, h: int) -> Any:
        """The same of a row of x, in every lane."""
        if self.x == "float32":
            return splat(b, load(b, offset(b, address, 4 * h), F32))
        words = splat(b, load(b, address, I32))
        return words if self.dot else _half(b, words, h)

    def multiply(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        if self.dot:
            return call(b, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}", VF, total, x, w)
        return fma(b, x, w, total)


def _half(b: Any, words: Any, h: int) -> Any:
    """bfloat16 number h of words, as float32."""
    bits = b.and_(words, consti(-65536)) if h else b.shl(words, consti(16))
    return b.bitcast(bits, VF)


def _tile(kinds: _Types, rows: int, vectors: int, panels: int) -> Any:
    """sums [rows, 32 * panels] += those of `steps` steps of k; x, w: the first of them.

    As many vectors are computed at a time as `vectors` says; panel_bytes: from w to the next panel.
    """
    places = [(panel, v) for panel in range(panels) for v in range(_WIDE)]

    def some(b, chosen, sums, lines, w, panel_bytes, steps):
        fetching = chosen[0] == places[0]  # lines that the other vectors will need, too
        starts = [w, b.add(w, panel_bytes)][:panels]
        at = [
            offset(b, sums, _SUMS * r + 128 * panel + 4 * LANES * v)
            for r in range(rows)
            for panel, v in chosen
        ]

        def step(i, *totals):
            found = list(totals)
            deep = b.mul(i, I64(kinds.step_bytes))
            here = [b.add(start, deep) for start in starts]
            for start in here if fetching else ():
                for line in range(0, kinds.step_bytes, 64):
                    prefetch(b, offset(b, start, _FETCHED + line), 3)
            along = b.mul(i, I64(2 * kinds.x_bytes))
            for h in range(kinds.products):
                values = [kinds.vector(b, here[panel], v, h) for panel, v in chosen]
                for r, line in enumerate(lines):
                    x = kinds.scalar(b, b.add(line, along), h)
                    for j, value in enumerate(values):
                        index = r * len(chosen) + j
                        found[index] = kinds.multiply(b, found[index], x, value)
            return found

        totals = loop(b, steps, [load(b, place, VF) for place in at], step)
        for place, total in zip(at, totals, strict=True):
            store(b, total, place)

    def tile(b, sums, x, x_stride, last, w, panel_bytes, steps):
        # Rows beyond the last one that exists are this one again, and not used.
        lines = []
        for r in range(rows):
            beyond = b.icmp_signed(">", I64(r), last)
            lines.append(b.add(x, b.mul(x_stride, b.select(beyond, last, I64(r)))))
        for first in range(0, len(places), vectors):
            some(b, places[first : first + vectors], sums, lines, w, panel_bytes, steps)

    return op(types.void, *[types.int64] * 7)(tile)


def _low_tiles(kinds: _Types) -> Any:
    """A function like that of a tile of one panel, for up to _LOW[-1] rows: last + 1 of them."""
    tiles = [_tile(kinds, rows, _WIDE, 1) for rows in _LOW]
    t1, t2, t4 = tiles[0], tiles[1], tiles[-1]

    @jit
    def low(sums, x, x_stride, last, w, panel_bytes, steps):
        if last == 0:
            t1(sums, x, x_stride, last, w, panel_bytes, steps)
        elif last == 1:
            t2(sums, x, x_stride, last, w, panel_bytes, steps)
        else:
            t4(sums, x, x_stride, last, w, panel_bytes, steps)

    return low


def linear(variant: str) -> Any:
    """`variant` is "bfloat16-float32" and so on: the types of W, and of x and y."""
    weight, dtype = variant.split("-")
    kinds = _Types(weight, dtype)
    low, put = _low_tiles(kinds), put_rows(_ARGUMENTS, dtype, _SUMS)
    tall = _tile(kinds, _TALL, 4 if LANES == 16 else 2, 2)
    step_bytes, x_step = kinds.step_bytes, 2 * kinds.x_bytes
    memory, most = stack(_MOST_ROWS * _SUMS), _LOW[-1]

    @jit
    def some(a, sums, first, n, panel, panels):
        """Rows first... of one panel, or two."""
        steps, stride = geti(a + _ARGUMENTS.steps), geti(a + _ARGUMENTS.x_stride)
        panel_bytes = steps * step_bytes
        zero(sums, n * _SUMS)
        for k in range(0, steps, _CHUNK):
            deep = min(_CHUNK, steps - k)
            x = geti(a + _ARGUMENTS.x) + first * stride + k * x_step
            w = geti(a + _ARGUMENTS.weights) + panel * panel_bytes + k * step_bytes
            r = 0
            if panels == 2:
                while n - r > _FEW:
                    tall(sums + r * _SUMS, x + r * stride, stride, n - r - 1, w, panel_bytes, deep)
                    r += _TALL
            while r < n:
                last = min(most, n - r) - 1
                here = sums + r * _SUMS
                low(here, x + r * stride, stride, last, w, panel_bytes, deep)
                if panels == 2:
                    next_w = w + panel_bytes
                    low(here + 128, x + r * stride, stride, last, next_w, panel_bytes, deep)
                r += most
        for i in range(panels):
            put(a, sums + 128 * i, first, n, panel + i)

    @jit
    def work(a):
        rows, panels = geti(a + _ARGUMENTS.rows), geti(a + _ARGUMENTS.panels)
        item_rows = geti(a + _ARGUMENTS.item_rows)
        wide = 1 if rows <= _FEW else 2
        across = (panels + wide - 1) // wide
        if rows <= item_rows and rows > 2 * _TALL and across < 16:
            item_rows = (rows // 2 + _TALL - 1) // _TALL * _TALL  # so that threads end together
        count = across * ((rows + item_rows - 1) // item_rows)
        sums = memory()
        index = take(a + _ARGUMENTS.counter)
        while index < count:
            panel, first = index % across * wide, index // across * item_rows
            n = min(item_rows, rows - first)
            some(a, sums, first, n, panel, min(wide, panels - panel))
            index = take(a + _ARGUMENTS.counter)

    def kernel(a: int) -> None:
        work(a)

    return kernel


def pack(weight: str) -> Any:
    """The kernel that lays out rows of W, of one type, in panels; arguments: `abi.PACK_VECTORS`."""
    pairs, size = weight == "bfloat16", 4 if weight == "float32" else 2
    step_bytes = 256 if weight == "float32" else 128
    put, get = (set32, get32) if size == 4 or pairs else (set16, get16)
    word = 4 if pairs else size  # what is moved at once: a pair, or a value

    @jit
    def panel_of(a, panel):
        raw, depth = geti(a + _PACK.raw) + panel * 256, geti(a + _PACK.depth)
        steps = (depth + 1) // 2
        to = geti(a + _PACK.out) + panel * steps * step_bytes
        words = depth * size // word  # whole ones
        for first in range(0, words, _WORDS):
            for column in range(32):
                row = geti(raw + 8 * column)
                for i in range(first, min(first + _WORDS, words)):
                    value = 0
                    if row != 0:
                        value = get(row + word * i)
                    put(to + (32 * i + column) * word, value)
        if depth % 2 != 0:  # the second k of the last step is zero
            end = to + (steps - 1) * step_bytes
            for column in range(32):
                row = geti(raw + 8 * column)
                if pairs:
                    value = 0
                    if row != 0:
                        value = get16(row + 2 * (depth - 1)) & 0xFFFF
                    set32(end + 4 * column, value)
                else:
                    put(end + (32 + column) * size, 0)

    @jit
    def work(a):
        panels = geti(a + _PACK.panels)
        panel = take(a + _PACK.counter)
        while panel < panels:
            panel_of(a, panel)
            panel = take(a + _PACK.counter)

    def kernel(a: int) -> None:
        work(a)

    return kernel
