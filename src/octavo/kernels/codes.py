"""Weights as 4- or 8-bit codes in groups: read from checkpoints, consumed by a device's GEMMs.

`quant` knows which weight formats use codes; a device's kernels define their memory layout.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

GROUP = 32  # inputs per scale where weights are rounded to 4 bits here
_FIELDS = ("codes", "scale", "minimum")


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes: w[n, k] = codes[n, k] * scale[n, g] + minimum[n, g].

    codes: unsigned, uint8 [N, K], or float8_e4m3fn, whose minimum is 0; scale, minimum: float32
    [N, groups]; group: how many inputs k share them, the last group may be shorter; bits: 4 or 8,
    what a code needs.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    group: int
    bits: int

    @property
    def are_floats(self) -> bool:
        """Whether the codes are float8_e4m3fn."""
        return self.codes.is_floating_point()

    @property
    def is_one_group(self) -> bool:
        """Whether all inputs of an output share a scale."""
        return self.scale.shape[1] == 1

    def values(self) -> torch.Tensor:
        """Dequantized: float32 [N, K]."""
        size = self.codes.shape[1]
        scale, minimum = (
            terms.repeat_interleave(self.group, 1)[:, :size] for terms in (self.scale, self.minimum)
        )
        return self.codes.float().mul_(scale).add_(minimum)

    def in_groups(self, group: int) -> "Codes":
        """The same codes of one group, with its scale and minimum repeated for groups of a size."""
        count = -(-self.codes.shape[1] // group)
        scale, minimum = (terms.expand(-1, count) for terms in (self.scale, self.minimum))
        return Codes(self.codes, scale, minimum, group, self.bits)

    def map(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> "Codes":
        """The same with `rows` applied to the rows of all three tensors."""
        return Codes(rows(self.codes), rows(self.scale), rows(self.minimum), self.group, self.bits)

    def rows(self, begin: int, end: int) -> "Codes":
        """Of outputs begin .. end - 1 alone."""
        return self.map(lambda rows: rows[begin:end])

    def columns(self, begin: int, end: int) -> "Codes":
        """Of inputs begin .. end - 1 alone; groups are not torn."""
        if (begin, end) == (0, self.codes.shape[1]):
            return self
        assert begin % self.group == 0
        assert end % self.group == 0 or end == self.codes.shape[1]
        first, last = begin // self.group, -(-end // self.group)
        scale, minimum = (t[:, first:last].contiguous() for t in (self.scale, self.minimum))
        return Codes(self.codes[:, begin:end].contiguous(), scale, minimum, self.group, self.bits)

    @staticmethod
    def stacked(parts: Sequence["Codes"]) -> "Codes":
        """Codes with equal group sizes, stacked along the rows."""
        codes, scale, minimum = (torch.cat([getattr(c, f) for c in parts]) for f in _FIELDS)
        return Codes(codes, scale, minimum, parts[0].group, parts[0].bits)


def round_to_codes(weight: torch.Tensor, group: int = GROUP) -> Codes:
    """Each group's values [N, K] as 16 levels from its least to its largest, which are float16
    where those are close enough."""
    n, k = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -k % group), mode="replicate")
    grouped = wide.view(n, -1, group)
    scale, minimum = levels_between(grouped.amin(2), grouped.amax(2))
    codes = (grouped - minimum.unsqueeze(2)) / scale.clamp(min=1e-30).unsqueeze(2)
    codes = codes.round_().clamp_(0, 15).to(torch.uint8).view(n, -1)[:, :k]
    return Codes(codes, scale, minimum, group, 4)


def round_to_bytes(weight: torch.Tensor, group: int = GROUP) -> Codes:
    """Each group's values [N, K] as -127 to 127 steps; their size is float16 where that is close
    enough."""
    n, k = weight.shape
    grouped = torch.nn.functional.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    scale = bytes_between(grouped.amin(2), grouped.amax(2))
    codes = grouped.div_(scale.clamp(min=1e-30).unsqueeze(2)).round_().clamp_(-127, 127).add_(128)
    return Codes(codes.to(torch.uint8).view(n, -1)[:, :k], scale, -128 * scale, group, 8)


def levels_between(
    minimum: torch.Tensor, maximum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the minimum of 16 levels for values of these ranges."""
    minimum = _shortened(minimum, maximum - minimum)
    return _shortened((maximum - minimum) / 15, torch.zeros(())), minimum


def bytes_between(minimum: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """The scale of -127 to 127 steps for values of these ranges."""
    return _shortened(torch.maximum(minimum.abs(), maximum.abs()) / 127, torch.zeros(()))


def _shortened(values: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, unless that moves one of them by more than a thousandth of itself and of
    `beside`, as for weights that are all tiny."""
    short = values.half().float()
    near = (short - values).abs() <= (values.abs() + beside.abs()) / 1024
    return short if bool(near.all()) else values


# -- codes with terms as they are stored -----------------------------------------------------------

# What the 16 codes of IQ4_NL and IQ4_XS stand for, before they are scaled.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SUPER = 256  # inputs that share the factors of 8-bit terms
_TERMS = {"half": torch.float16, "single": torch.float32, "super": torch.int8}


@dataclass(frozen=True, slots=True)
class Form:
    """How the weights of one product are written as codes; everything about it is exact.

    bits: of a code: 4, 5, 6 or 8; fewer bits are written with 4.
    group: how many inputs share their terms, a multiple of 16; the last group may be shorter.
    terms: how a group's scale and offset are stored: "half" (float16), "single" (float32), or
        "super": int8, to be multiplied by a float16 that `SUPER` inputs share.
    offset: "none", "minimum": w = v * scale + minimum, or "zero": w = (v - zero) * scale.
    values: the value v of each of the 2 ** bits codes, integers of at most 256 in magnitude, which
        are exact in bfloat16. Those of 8 bits are always -128 to 127, code 0 being -128; those of 5
        and 6 bits are consecutive.
    """

    bits: int
    group: int
    terms: str = "half"
    offset: str = "none"
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.bits in (4, 5, 6, 8)
        assert self.group > 0
        assert self.group % 16 == 0
        assert self.terms in _TERMS
        assert self.offset in ("none", "minimum", "zero")
        assert self.terms != "super" or SUPER % self.group == 0
        assert len(self.values) == 2**self.bits
        assert max(map(abs, self.values)) <= 256
        assert self.bits == 4 or self.is_linear
        assert self.bits != 8 or self.values[0] == -128

    @property
    def is_linear(self) -> bool:
        """Whether the value is the code plus a constant."""
        return self.values == tuple(range(self.values[0], self.values[0] + len(self.values)))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Of a weight [rows, columns], without padding."""
        terms = -(-columns // self.group) * self.terms_dtype.itemsize
        factors = 2 * -(-columns // SUPER) if self.terms == "super" else 0
        return rows * (columns * self.bits // 8 + self.num_terms * (terms + factors))

    @property
    def terms_dtype(self) -> torch.dtype:
        return _TERMS[self.terms]

    @property
    def num_terms(self) -> int:
        """Of a group and column: the scale, and an offset if there is one."""
        return 1 if self.offset == "none" else 2


def linear(bits: int, first: int) -> tuple[int, ...]:
    """`Form.values` of codes whose value is the code plus `first`."""
    return tuple(range(first, first + 2**bits))


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A weight [N, K] in a `Form`.

    codes: uint8 [N, K]; terms: [N, groups, Form.num_terms], of Form.terms_dtype: the scale, then
    the offset; factors: float16 [N, supers, Form.num_terms], what "super" terms are multiplied by,
    else None.
    """

    form: Form
    codes: torch.Tensor
    terms: torch.Tensor
    factors: torch.Tensor | None = None

    def wide_terms(self) -> torch.Tensor:
        """The terms as float32 [N, groups, Form.num_terms]; those of "super" form are exact."""
        wide = self.terms.float()
        if self.factors is None:
            return wide
        each = SUPER // self.form.group
        return wide * self.factors.float().repeat_interleave(each, 1)[:, : wide.shape[1]]

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K]: a product and a sum are each rounded once."""
        form, size = self.form, self.codes.shape[1]
        terms = self.wide_terms().repeat_interleave(form.group, 1)[:, :size]
        value = torch.tensor(form.values, dtype=torch.float32)[self.codes.long()]
        if form.offset == "zero":
            value = value - terms[..., 1]
        value = value * terms[..., 0]
        return value + terms[..., 1] if form.offset == "minimum" else value


def as_grouped(codes: Codes) -> GroupedCodes:
    """Integer `codes`, whose groups are multiples of 16, or one, in the shortest form that holds
    them exactly."""
    first = 0 if codes.bits == 4 else -128
    if codes.is_one_group and codes.codes.shape[1] > SUPER:
        codes = codes.in_groups(SUPER)
    group = SUPER if codes.is_one_group else codes.group
    scale, minimum = codes.scale, codes.minimum
    zero = (-minimum / torch.where(scale == 0, 1.0, scale)).round()
    if not bool(((minimum == -zero * scale) & (zero.abs() <= SUPER)).all()):
        minimum = minimum - first * scale
        kept = all(_is_half(terms) for terms in (scale, minimum))
        form = Form(codes.bits, group, "half" if kept else "single", "minimum",
                    linear(codes.bits, first))  # fmt: skip
        terms = torch.stack((scale, minimum), 2)
        return GroupedCodes(form, codes.codes, terms.to(form.terms_dtype))
    kind = "half" if _is_half(scale) else "single"
    middle = zero.flatten()[0]
    if bool(((zero == middle) | (scale == 0)).all()) and codes.bits == 4:
        form = Form(4, group, kind, "none", linear(4, -int(middle)))
        return GroupedCodes(form, codes.codes, scale.unsqueeze(2).to(form.terms_dtype))
    if bool(((zero == -first) | (scale == 0)).all()):
        form = Form(codes.bits, group, kind, "none", linear(codes.bits, first))
        return GroupedCodes(form, codes.codes, scale.unsqueeze(2).to(form.terms_dtype))
    form = Form(codes.bits, group, kind, "zero", linear(codes.bits, first))
    terms = torch.stack((scale, zero + first), 2)
    return GroupedCodes(form, codes.codes, terms.to(form.terms_dtype))


def _is_half(values: torch.Tensor) -> bool:
    return bool((values.half().float() == values).all())


# -- codes where a file has them -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a weight in blocks of a file that is mapped into memory; nothing is read yet.

    name: of the block type (ggml's). form: of what its blocks hold. raw: uint8 [N, bytes of whole
    blocks], in any order (a view). columns: values of a row. order: int64, which row of `raw` each
    output is; None: each its own. decode: fills a contiguous float tensor [N, columns]. release:
    gives back the memory of the pages that were read.
    """

    name: str
    form: Form
    raw: torch.Tensor
    columns: int
    order: torch.Tensor | None
    decode: Callable[[torch.Tensor], None]
    release: Callable[[], None]

    @property
    def num_rows(self) -> int:
        return len(self.raw) if self.order is None else len(self.order)

    def rows(self, begin: int, end: int) -> "StoredRows":
        """Of outputs begin .. end - 1 alone."""
        order = torch.arange(len(self.raw)) if self.order is None else self.order

        def decode(out: torch.Tensor) -> None:
            whole = torch.empty((self.num_rows, self.columns), dtype=out.dtype)
            self.decode(whole)
            out.copy_(whole[begin:end])

        return replace(self, order=order[begin:end].contiguous(), decode=decode)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight [N, K] of rows of one or several tensors, one after the other."""

    parts: tuple[StoredRows, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_rows for part in self.parts), self.parts[0].columns

    @property
    def runs(self) -> list[tuple[StoredRows, ...]]:
        """Neighbouring parts of one block type, which make one product."""
        grouped = itertools.groupby(self.parts, lambda part: part.name)
        return [tuple(parts) for _, parts in grouped]

    def rows(self, begin: int, end: int) -> "StoredMatrix":
        """Of outputs begin .. end - 1 alone, of a matrix of one tensor."""
        (part,) = self.parts
        return StoredMatrix((part.rows(begin, end),))

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized, rounded to `dtype`."""
        out, begin = torch.empty(self.shape, dtype=dtype), 0
        for part in self.parts:
            part.decode(out[begin : begin + part.num_rows])
            begin += part.num_rows
        return out
