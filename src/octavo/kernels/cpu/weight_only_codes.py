"""Codes of a panel of a weight-only product, in registers: their values, scales and offsets.

What a variant of a product's kernel is made of (see `weight_only_layout` for the memory that it
reads); the sums are those of `weight_only` and `weight_only_tiles`.
"""

from typing import Any

from llvmlite import ir

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    call,
    consti,
    fma,
    load,
    offset,
    splat,
)

_ARGUMENTS = abi.WEIGHT_ONLY.offset
_PARTS = 16 // LANES  # vectors of float32 of half a panel
SUMS = 128  # bytes of 32 columns of float32 or of pairs
_WORDS = ir.VectorType(I16, 32)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_TERM_BYTES = {"half": 2, "single": 4, "super": 1}


class Codes:
    """Turns the codes of a block of a panel into values: of a variant's bits, for its kind."""

    def __init__(self, bits: int, is_linear: bool, pairs: bool) -> None:
        self.bits, self.is_linear, self.pairs = bits, is_linear, pairs
        self.block_bytes = 64 * bits
        self.words = 1 if pairs else 2  # of 32 bits for each column and pair of inputs
        self.value_bytes = 8 * SUMS * self.words  # of a block's values

    def table(self, b: Any, address: Any) -> list[Any]:
        """What `values` needs of the table at `address`, in registers."""
        if self.bits == 8:
            return []
        if self.pairs:
            return [load(b, offset(b, address, 64 * i), _WORDS) for i in range(1 + self.bits // 6)]
        if self.bits == 4 and not (LANES == 8 and self.is_linear):
            return [load(b, offset(b, address, 4 * LANES * i), VF) for i in range(_PARTS)]
        return [splat(b, load(b, address, F32))]

    def values(self, b: Any, table: list[Any], block: Any, p: int, half: int) -> list[list[Any]]:
        """Of the pair of inputs 2p and 2p + 1, and 16 columns: one vector of pairs, or for each of
        the two inputs the vectors of their columns."""
        if self.pairs:
            return [[self._pair(b, table, block, p, half)]]
        return [
            [self._floats(b, table, block, p, h, half, part) for part in range(_PARTS)]
            for h in (0, 1)
        ]

    def widened(self, b: Any, table: list[Any], block: Any, p: int, half: int) -> tuple[Any, Any]:
        """The two inputs of `values` in pairs, each as a vector of float32 of their columns."""
        if self.bits == 8:
            first, second = (self._bytes(b, block, 2 * p + h, half, 0) for h in (0, 1))
            return first, second
        pair = self._pair(b, table, block, p, half)
        even, odd = b.shl(pair, consti(16)), b.and_(pair, consti(-65536))
        return b.bitcast(even, VF), b.bitcast(odd, VF)

    def _pair(self, b: Any, table: list[Any], block: Any, p: int, half: int) -> Any:
        if self.bits == 8:
            first, second = (self._bytes(b, block, 2 * p + h, half, 0) for h in (0, 1))
            low, high = (b.bitcast(x, VI) for x in (first, second))
            return b.or_(b.lshr(low, consti(16)), high)
        word = load(b, offset(b, block, 128 * half + 64 * (p // 4)), _WORDS)
        index = _shifted(b, word, 4 * (p % 4))
        if self.bits > 4:
            width = self.bits - 4
            at = offset(b, block, 256 + 32 * width * half)
            if width == 1:
                high = b.zext(load(b, at, ir.VectorType(I8, 32)), _WORDS)
            else:
                high = load(b, at, _WORDS)
            mask = (1 << self.bits) - 16
            high = b.and_(_shifted(b, high, width * p - 4), ir.Constant(_WORDS, [mask] * 32))
            index = b.or_(b.and_(index, ir.Constant(_WORDS, [15] * 32)), high)
        if self.bits == 6:
            name = "llvm.x86.avx512.vpermi2var.hi.512"
            return b.bitcast(call(b, name, _WORDS, table[0], index, table[1]), VI)
        found = call(b, "llvm.x86.avx512.permvar.hi.512", _WORDS, table[0], index)
        return b.bitcast(found, VI)

    def _bytes(self, b: Any, block: Any, k: int, half: int, part: int) -> Any:
        at = offset(b, block, 256 * half + 16 * k + LANES * part)
        return b.sitofp(b.sext(load(b, at, ir.VectorType(I8, LANES)), VI), VF)

    def _floats(
        self, b: Any, table: list[Any], block: Any, p: int, h: int, half: int, part: int
    ) -> Any:
        if self.bits == 8:
            return self._bytes(b, block, 2 * p + h, half, part)
        at = offset(b, block, 128 * half + 64 * (p // 4) + 4 * LANES * part)
        word = load(b, at, VI)
        index = b.lshr(word, consti(16 * h + 4 * (p % 4)))
        if self.bits == 4 and not (LANES == 8 and self.is_linear):
            return _looked_up(b, table, index)
        index = b.and_(index, consti(15))
        if self.bits > 4:
            width = self.bits - 4
            at = offset(b, block, 256 + 32 * width * half + 2 * width * LANES * part)
            high = load(b, at, ir.VectorType(I16 if width == 1 else I32, LANES))
            high = b.zext(high, VI) if width == 1 else high
            shift = 8 * width * h + width * p - 4
            high = b.lshr(high, consti(shift)) if shift >= 0 else b.shl(high, consti(-shift))
            index = b.or_(index, b.and_(high, consti((1 << self.bits) - 16)))
        return b.fadd(b.sitofp(index, VF), table[0])


def _shifted(b: Any, words: Any, right: int) -> Any:
    """Words of 16 bits moved to the right, or to the left."""
    if right == 0:
        return words
    by = ir.Constant(words.type, [abs(right)] * words.type.count)
    return b.lshr(words, by) if right > 0 else b.shl(words, by)


def _looked_up(b: Any, table: list[Any], index: Any) -> Any:
    """table[index & 15] of float32."""
    if LANES == 16:
        return call(b, "llvm.x86.avx512.permvar.sf.512", VF, table[0], index)
    if "avx2" in FEATURES:
        low, high = (call(b, "llvm.x86.avx2.permps", VF, part, index) for part in table)
        return b.select(
            b.trunc(b.lshr(index, consti(3)), ir.VectorType(ir.IntType(1), 8)), high, low
        )
    value = ir.Constant(VF, ir.Undefined)
    both = b.shuffle_vector(*table, ir.Constant(ir.VectorType(I32, 16), list(range(16))))
    for lane in range(LANES):
        at = b.and_(b.extract_element(index, I32(lane)), I32(15))
        value = b.insert_element(value, b.extract_element(both, at), I32(lane))
    return value


class Terms:
    """Applies the scales and offsets of a group to its sums."""

    def __init__(self, kind: str, has_offset: str) -> None:
        self.kind, self.has_offset = kind, has_offset
        self.count = 1 if has_offset == "none" else 2
        self.group_bytes = 32 * self.count * _TERM_BYTES[kind]
        self.factor_bytes = 64 * self.count if kind == "super" else 0

    def apply(
        self, b: Any, panel: "Panel", lines: list[Any], g: Any, sums: list[Any],
        totals: list[Any], first: int = 0,
    ) -> list[Any]:  # fmt: skip
        """totals[rows, vectors] plus the scaled sums of group g, of the vectors from `first` on.

        lines: where the sums of the groups of each row are.
        """
        at, factors = self.place(b, panel, g)
        rows = len(lines)
        vectors = len(sums) // rows
        xs = [splat(b, load(b, b.add(line, b.mul(g, I64(4))), F32))
              for line in lines if self.count == 2]  # fmt: skip
        out = list(totals)
        for v in range(vectors):
            scale = self.load(b, at, factors, 0, first + v)
            added = self.load(b, at, factors, 1, first + v) if self.count == 2 else None
            for r in range(rows):
                i = r * vectors + v
                total = sums[i]
                if self.has_offset == "zero":
                    total = fma(b, added, xs[r], total)
                out[i] = fma(b, scale, total, out[i])
                if self.has_offset == "minimum":
                    out[i] = fma(b, added, xs[r], out[i])
        return out

    def place(self, b: Any, panel: "Panel", g: Any) -> tuple[Any, Any]:
        """Where the terms of group g and their factors are."""
        factors = panel.factors
        if self.factor_bytes:
            shared = b.udiv(g, panel.super_groups)
            factors = b.add(factors, b.mul(shared, I64(self.factor_bytes)))
        return b.add(panel.terms, b.mul(g, I64(self.group_bytes))), factors

    def load(self, b: Any, address: Any, factors: Any, index: int, vector: int) -> Any:
        """LANES scales (index 0) or offsets (1), as float32."""
        column = 32 * index + LANES * vector
        at = offset(b, address, _TERM_BYTES[self.kind] * column)
        if self.kind == "single":
            return load(b, at, VF)
        if self.kind == "half":
            return b.fpext(load(b, at, _HALVES), VF)
        wide = b.sitofp(b.sext(load(b, at, ir.VectorType(I8, LANES)), VI), VF)
        return b.fmul(wide, b.fpext(load(b, offset(b, factors, 2 * column), _HALVES), VF))


class Panel:
    """A panel's codes and terms: where they are, how many, and the table of values. All of it is
    read from the arguments at `a`."""

    def __init__(self, b: Any, a: Any, codes: Codes, terms: Terms, panel: Any) -> None:
        self.blocks, self.group_blocks = field(b, a, "blocks"), field(b, a, "group_blocks")
        self.super_groups = field(b, a, "super_groups")
        more = b.sub(b.add(self.blocks, self.group_blocks), I64(1))
        self.groups = b.udiv(more, self.group_blocks)
        supers = b.udiv(b.add(self.blocks, I64(15)), I64(16))
        self.codes, self.terms, self.factors = (
            b.add(field(b, a, name), b.mul(panel, b.mul(count, I64(size))))
            for name, count, size in (
                ("codes", self.blocks, codes.block_bytes),
                ("terms", self.groups, terms.group_bytes),
                ("factors", supers, terms.factor_bytes),
            )
        )
        self.table = codes.table(b, field(b, a, "table"))

    def group(self, b: Any, g: Any) -> tuple[Any, Any]:
        """(first block of group g, its blocks): the last group may be shorter."""
        first = b.mul(g, self.group_blocks)
        left = b.sub(self.blocks, first)
        fewer = b.icmp_signed("<", left, self.group_blocks)
        return first, b.select(fewer, left, self.group_blocks)


def field(b: Any, a: Any, name: str) -> Any:
    return load(b, offset(b, a, getattr(_ARGUMENTS, name)), I64)


def dot(b: Any, pairs: bool, total: Any, x: Any, value: Any) -> Any:
    if pairs:
        return call(b, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}", VF, total, x, value)
    return fma(b, x, value, total)


def lines_of(b: Any, a: Any, name: str, row: Any, rows: int) -> list[Any]:
    """Addresses of `rows` rows of x, q or sums, from `row` on."""
    stride = field(b, a, f"{name}_stride")
    first = b.add(field(b, a, name), b.mul(stride, row))
    return [b.add(first, b.mul(stride, I64(r))) for r in range(rows)]
