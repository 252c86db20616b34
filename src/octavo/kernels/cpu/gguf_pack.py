"""GGUF's blocks laid out for `weight_only`, in one pass from the file's bytes.

The torch twins are `quant.gguf` (the codes of a block) and `weight_only_layout.pack`. A work item
is a panel of 32 rows, of which pieces of `PIECE` values are read at a time, so that what is
written (four bytes of a row here and there) stays in the first cache. Rows are given by their
addresses: they may be in any order, and of several tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.panels import each_panel
from octavo.kernels.cpu.simd import (
    I8,
    I16,
    I32,
    I64,
    geti,
    jit,
    load,
    offset,
    op,
    set32,
    stack,
    store,
    zero,
)  # fmt: skip

_CALL = abi.GGUF_PACK.offset
PIECE = 1024  # values of a row
MINUS_128 = -0x7F7F7F80  # four bytes of -128
_BYTES = ir.VectorType(I8, 32)
_HALF_BYTES = ir.VectorType(I8, 16)
_LONGS = ir.VectorType(I64, 4)
_SHORTS = ir.VectorType(I16, 4)
_FIRST_EVEN = [16 * block + 2 * i + h for block in (0, 1) for h in (0, 1) for i in range(8)]


@dataclass(frozen=True)
class _Blocks:
    """A block type. emit(b, raw, put): the code for one block: `put` takes what it holds."""

    values: int
    nbytes: int
    bits: int
    emit: Callable[[Any, Any, "Put"], None]


@dataclass(frozen=True)
class Put:
    """Where the parts of a block go. Addresses are those of this row in the block's first places.

    codes: of the low four bits (8 bits: of a row of bytes); high: of the others.
    """

    b: Any
    bits: int
    at: Any
    high: Any
    terms: Any
    factors: Any
    num_terms: int
    term_bytes: int

    def codes(self, number: int, codes: Any) -> None:
        """The 32 codes, bytes, of a block's piece."""
        b = self.b
        if self.bits == 8:
            store(b, codes, offset(b, self.at, 32 * number))
            return
        block = 64 * self.bits
        at, high = (offset(b, place, 2 * number * block) for place in (self.at, self.high))
        low = b.bitcast(b.and_(codes, _bytes(15)) if self.bits > 4 else codes, _LONGS)
        joined = b.bitcast(b.or_(low, b.lshr(low, _longs(12))), _BYTES)
        order = [8 * unit + i for unit in range(4) for i in (0, 4, 1, 5)]
        words = b.bitcast(shuffled(b, joined, order), ir.VectorType(I32, 4))
        for unit in range(4):
            word = b.extract_element(words, ir.Constant(I32, unit))
            store(b, word, offset(b, at, unit // 2 * block + unit % 2 * 64))
        if self.bits > 4:
            top = shuffled(b, codes, _FIRST_EVEN)
            halves = _fifth_bits(b, top) if self.bits == 5 else _top_pairs(b, top)
            for number, value in enumerate(halves):
                store(b, value, offset(b, high, number * block))

    def term(self, group: int, which: int, value: Any) -> None:
        """An integer of a group, or its float16 as int16."""
        place = 32 * (group * self.num_terms + which) * self.term_bytes
        store(self.b, value, offset(self.b, self.terms, place))

    def factor(self, which: int, value: Any) -> None:
        store(self.b, value, offset(self.b, self.factors, 64 * which))


def _bytes(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * 32)


def _longs(value: int) -> Any:
    return ir.Constant(_LONGS, [value] * 4)


def shuffled(b: Any, vector: Any, order: list[int], other: Any = None) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(order)), order)
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined) if other is None else
                            other, mask)  # fmt: skip


def _fifth_bits(b: Any, codes: Any) -> list[Any]:
    """Of two blocks of 16 codes, the even ones first: a word of bits each."""
    bits = b.bitcast(b.icmp_unsigned(">", codes, _bytes(15)), I32)
    return [b.trunc(bits, I16), b.trunc(b.lshr(bits, ir.Constant(I32, 16)), I16)]


def _top_pairs(b: Any, codes: Any) -> list[Any]:
    """The same of bits 4 and 5: 32 bits each."""
    pairs = b.bitcast(b.lshr(codes, _bytes(4)), _LONGS)
    fours = b.or_(pairs, b.lshr(pairs, _longs(6)))
    eights = b.or_(fours, b.lshr(fours, _longs(12)))
    low = b.and_(eights, _longs(0xFF))
    high = b.and_(b.lshr(eights, _longs(24)), _longs(0xFF00))
    words = b.bitcast(b.trunc(b.or_(low, high), _SHORTS), ir.VectorType(I32, 2))
    return [b.extract_element(words, ir.Constant(I32, block)) for block in (0, 1)]


# -- what a block holds ---------------------------------------------------------------------------


def _nibbles(b: Any, raw: Any, at: int) -> Any:
    """16 bytes: all low halves, then all high halves."""
    packed = load(b, offset(b, raw, at), _HALF_BYTES)
    low = b.and_(packed, ir.Constant(_HALF_BYTES, [15] * 16))
    high = b.lshr(packed, ir.Constant(_HALF_BYTES, [4] * 16))
    return shuffled(b, low, list(range(32)), high)


def _fields(b: Any, raw: Any, at: int, shift: int, mask: int) -> Any:
    """(byte >> shift) & mask of 32 bytes."""
    packed = load(b, offset(b, raw, at), _BYTES)
    if shift:
        packed = b.lshr(packed, _bytes(shift))
    return packed if mask == 255 >> shift else b.and_(packed, _bytes(mask))


def _added(b: Any, codes: Any, bits: Any, shift: int) -> Any:
    return b.or_(codes, b.shl(bits, _bytes(shift)))


def _mask_bits(b: Any, raw: Any, at: int) -> Any:
    """A mask of 32 bits as bytes of 0 or 16."""
    bits = b.bitcast(load(b, offset(b, raw, at), I32), ir.VectorType(ir.IntType(1), 32))
    return b.select(bits, _bytes(16), _bytes(0))


def _half(b: Any, raw: Any, at: int) -> Any:
    return load(b, offset(b, raw, at), I16)


def _int(b: Any, raw: Any, at: int) -> Any:
    return load(b, offset(b, raw, at), I8)


def _of_32(size: int, bits: int, at: int, count: int, mask: int | None = None) -> _Blocks:
    """`count` float16 at the start, nibbles at `at`, fifth bits at `mask`."""

    def emit(b: Any, raw: Any, put: Put) -> None:
        codes = _nibbles(b, raw, at)
        if mask is not None:
            codes = b.or_(codes, _mask_bits(b, raw, mask))
        put.codes(0, codes)
        for which in range(count):
            put.term(0, which, _half(b, raw, 2 * which))

    return _Blocks(32, size, bits, emit)


def _q8_0(b: Any, raw: Any, put: Put) -> None:
    put.codes(0, load(b, offset(b, raw, 2), _BYTES))  # int8, as the layout has it
    put.term(0, 0, _half(b, raw, 0))


def _q2_k(b: Any, raw: Any, put: Put) -> None:
    for piece in range(8):
        put.codes(piece, _fields(b, raw, 16 + piece // 4 * 32, piece % 4 * 2, 3))
    for group in range(16):
        both = _int(b, raw, group)
        put.term(group, 0, b.and_(both, I8(15)))
        put.term(group, 1, b.neg(b.lshr(both, I8(4))))
    for which in range(2):
        put.factor(which, _half(b, raw, 80 + 2 * which))


def _q3_k(b: Any, raw: Any, put: Put) -> None:
    for piece in range(8):
        codes = _fields(b, raw, 32 + piece // 4 * 32, piece % 4 * 2, 3)
        put.codes(piece, _added(b, codes, _fields(b, raw, 0, piece, 1), 2))
    for group in range(16):
        low = b.lshr(_int(b, raw, 96 + group % 8), I8(group // 8 * 4))
        high = b.and_(b.lshr(_int(b, raw, 104 + group % 4), I8(group // 4 * 2)), I8(3))
        scale = b.or_(b.and_(low, I8(15)), b.shl(high, I8(4)))
        put.term(group, 0, b.sub(scale, I8(32)))
    put.factor(0, _half(b, raw, 108))


def _both_terms(b: Any, raw: Any, put: Put) -> None:
    """The head of a Q4_K or Q5_K block (see quant.gguf)."""
    first, second, third = (load(b, offset(b, raw, at), I32) for at in (4, 8, 12))
    six, four, two = (I32(value) for value in (0x3F3F3F3F, 0x0F0F0F0F, 0x30303030))
    fields = (
        (b.and_(first, six), b.or_(b.and_(third, four), b.and_(b.lshr(first, I32(2)), two))),
        (b.and_(second, six), b.or_(b.and_(b.lshr(third, I32(4)), four),
                                    b.and_(b.lshr(second, I32(2)), two))),
    )  # fmt: skip
    for which, words in enumerate(fields):
        for group in range(8):
            shift = group % 4 * 8
            value = b.trunc(b.lshr(words[group // 4], I32(shift)), I8)
            put.term(group, which, b.neg(value) if which else value)
        put.factor(which, _half(b, raw, 2 * which))


def _q4_k(b: Any, raw: Any, put: Put) -> None:
    for piece in range(8):
        put.codes(piece, _fields(b, raw, 16 + piece // 2 * 32, piece % 2 * 4, 15))
    _both_terms(b, raw, put)


def _q5_k(b: Any, raw: Any, put: Put) -> None:
    for piece in range(8):
        codes = _fields(b, raw, 48 + piece // 2 * 32, piece % 2 * 4, 15)
        put.codes(piece, _added(b, codes, _fields(b, raw, 16, piece, 1), 4))
    _both_terms(b, raw, put)


def _q6_k(b: Any, raw: Any, put: Put) -> None:
    for piece in range(8):
        part, quarter = piece // 4, piece % 4
        codes = _fields(b, raw, part * 64 + quarter % 2 * 32, quarter // 2 * 4, 15)
        put.codes(piece, _added(b, codes, _fields(b, raw, 128 + part * 32, quarter * 2, 3), 4))
    for group in range(16):
        put.term(group, 0, _int(b, raw, 192 + group))
    put.factor(0, _half(b, raw, 208))


def _iq4_xs(b: Any, raw: Any, put: Put) -> None:
    for group in range(8):
        put.codes(group, _nibbles(b, raw, 8 + 16 * group))
        low = b.and_(b.lshr(_int(b, raw, 4 + group // 2), I8(group % 2 * 4)), I8(15))
        high = b.and_(b.lshr(_int(b, raw, 2 + group // 4), I8(group % 4 * 2)), I8(3))
        put.term(group, 0, b.sub(b.or_(low, b.shl(high, I8(4))), I8(32)))
    put.factor(0, _half(b, raw, 0))


_BLOCKS = {
    "Q4_0": _of_32(18, 4, 2, 1),
    "Q4_1": _of_32(20, 4, 4, 2),
    "Q5_0": _of_32(22, 5, 6, 1, 2),
    "Q5_1": _of_32(24, 5, 8, 2, 4),
    "IQ4_NL": _of_32(18, 4, 2, 1),
    "Q8_0": _Blocks(32, 34, 8, _q8_0),
    "Q2_K": _Blocks(256, 84, 4, _q2_k),
    "Q3_K": _Blocks(256, 110, 4, _q3_k),
    "Q4_K": _Blocks(256, 144, 4, _q4_k),
    "Q5_K": _Blocks(256, 176, 5, _q5_k),
    "Q6_K": _Blocks(256, 210, 6, _q6_k),
    "IQ4_XS": _Blocks(256, 136, 4, _iq4_xs),
}
_TERMS = {"Q4_1": 2, "Q5_1": 2, "Q2_K": 2, "Q4_K": 2, "Q5_K": 2}  # of a group, if not one
_GROUPS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}  # values of a group, if not 32


@op(types.void, *[types.int64] * 3)
def transpose(b, source, target, stride):
    """16 rows of 16 bytes, `stride` apart, as 16 columns."""
    rows = [load(b, b.add(source, b.mul(stride, I64(i))), _HALF_BYTES) for i in range(16)]
    low = [i // 2 + 16 * (i % 2) for i in range(16)]
    high = [i + 8 for i in low]
    for _ in range(4):
        rows = [shuffled(b, rows[i], order, rows[i + 8]) for i in range(8) for order in (low, high)]
    for i, row in enumerate(rows):
        store(b, row, offset(b, target, 16 * i))


def pack(variant: str) -> Any:
    """`variant` is the name of a block type."""
    kind, num_terms = _BLOCKS[variant], _TERMS.get(variant, 1)
    is_super, group = kind.values == 256, _GROUPS.get(variant, 32)
    term_bytes = 1 if is_super else 2
    bits, values = kind.bits, kind.values
    # Bytes of a block's values, in a panel's codes, terms and factors.
    steps = 4 * bits * values, 32 * num_terms * term_bytes * (values // group), 64 * num_terms
    block = op(types.void, *[types.int64] * 5)(
        lambda b, raw, at, high, terms, factors: kind.emit(
            b, raw, Put(b, bits, at, high, terms, factors, num_terms, term_bytes)
        )
    )
    row = _bytes_of_rows(steps, kind, block) if bits == 8 else _planes(steps, kind, block)

    @jit
    def panel(a, number):
        rows, columns = geti(a + _CALL.rows), geti(a + _CALL.columns)
        blocks = columns // values
        codes = geti(a + _CALL.codes) + number * blocks * steps[0]
        terms = geti(a + _CALL.terms) + number * blocks * steps[1]
        factors = geti(a + _CALL.factors) + number * blocks * steps[2]
        many = min(32, rows - number * 32)
        if many < 32:
            zero(codes, blocks * steps[0])
            zero(terms, blocks * steps[1])
            if is_super:
                zero(factors, blocks * steps[2])
        for first in range(0, blocks, PIECE // values):
            end = min(blocks, first + PIECE // values)
            row(a, number * 32, many, first, end, codes, terms, factors)

    return each_panel(_CALL, panel)


def _planes(steps: tuple[int, int, int], kind: _Blocks, block: Any) -> Any:
    """A function for blocks first .. end - 1 of `many` rows from `begin` on, of 4 to 6 bits."""
    size, nbytes, width = steps, kind.nbytes, kind.bits - 4
    term_bytes = 1 if kind.values == 256 else 2

    @jit
    def rows(a, begin, many, first, end, codes, terms, factors):
        for i in range(many):
            raw = geti(geti(a + _CALL.raw) + (begin + i) * 8) + first * nbytes
            half, column = i // 16, i % 16
            at = codes + first * size[0] + half * 128 + column * 4
            high = codes + first * size[0] + 256 + half * 32 * width + column * 2 * width
            term = terms + first * size[1] + i * term_bytes
            factor = factors + first * size[2] + i * 2
            for _ in range(first, end):
                block(raw, at, high, term, factor)
                raw, at, high = raw + nbytes, at + size[0], high + size[0]
                term, factor = term + size[1], factor + size[2]

    return rows


def _bytes_of_rows(steps: tuple[int, int, int], kind: _Blocks, block: Any) -> Any:
    """The same of 8 bits, in blocks of 32: rows of bytes first, which are then transposed."""
    size, nbytes, scratch = steps, kind.nbytes, stack(32 * PIECE)

    @jit
    def rows(a, begin, many, first, end, codes, terms, factors):
        spare = scratch()
        if many < 32:  # the code 0 of rows that there are not
            for place in range(0, 32 * PIECE, 4):
                set32(spare + place, MINUS_128)
        for i in range(many):
            raw = geti(geti(a + _CALL.raw) + (begin + i) * 8) + first * nbytes
            at, term = spare + i * PIECE, terms + first * size[1] + i * 2
            for _ in range(first, end):
                block(raw, at, at, term, term)
                raw, at, term = raw + nbytes, at + 32, term + size[1]
        for j in range(2 * (end - first)):
            for half in range(2):
                source = spare + half * 16 * PIECE + j * 16
                transpose(source, codes + first * size[0] + j * 512 + half * 256, PIECE)

    return rows
