"""Weights of 4 to 8 bits in the memory layout of `weight_only`, packed and unpacked by torch.

A panel is 32 columns, two halves of 16; a block is 16 k. Three tensors:

    codes    uint8 [panels, blocks, 512 * bits / 8]  a block of a panel is contiguous
    terms    [panels, groups, num_terms, 32]         of Form.terms_dtype
    factors  float16 [panels, supers, num_terms, 32] of "super" form, else None

A block of codes of 4, 5 or 6 bits is

    low  of half 0 (128 bytes), low of half 1, high of half 0 (0, 32 or 64 bytes), high of half 1
    low   word of 16 bits [unit 0-1][column 0-15][h 0-1]: bits 4s.. of it are the low four bits of
          k = 8 unit + 2s + h, s = 0 to 3; so 32 bits are a column, a vector of them pairs of k
    high  of 5 bits: byte [column][h], of 6 bits: word of 16 bits [column][h]; p = 0 to 7: bit p, or
          bits 2p and 2p + 1, are the further bits of k = 2p + h

and of 8 bits it is 256 bytes for each half, int8 [k 0-15][column 0-15], of value code - 128.

Columns beyond the last and k beyond the last have the code 0; terms of such columns are 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from octavo.kernels.codes import SUPER, Form, GroupedCodes

PANEL, HALF, BLOCK = 32, 16, 16
# (shape, dtype) -> memory for it
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
_LOW = 128  # bytes of a block of a half: its low four bits


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight [out_size, in_size] as `weight_only` reads it."""

    form: Form
    in_size: int
    out_size: int
    codes: torch.Tensor
    terms: torch.Tensor
    factors: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.terms, self.factors)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @staticmethod
    def empty(
        form: Form, out_size: int, in_size: int, allocate: Allocate | None = None
    ) -> "PackedCodes":
        """With memory to be filled, of `allocate` (None: torch's)."""
        codes, terms, factors = shapes(form, out_size, in_size)
        make = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
        return PackedCodes(
            form, in_size, out_size, make(codes, torch.uint8), make(terms, form.terms_dtype),
            make(factors, torch.float16) if factors else None,
        )  # fmt: skip

    def take(self, other: "PackedCodes") -> None:
        """Become another one of the same form and shape, in this one's memory."""
        self.codes.copy_(other.codes)
        self.terms.copy_(other.terms)
        if self.factors is not None and other.factors is not None:
            self.factors.copy_(other.factors)

    def interleaved(self) -> "PackedCodes":
        """Halves of panels alternately from the first half of the columns and from the second:
        a panel is 16 columns of a gate and the same of what it gates."""
        assert self.out_size % PANEL == 0
        low = 2 * _LOW if self.form.bits < 8 else self.codes.shape[2]
        codes = [
            _interleaved(part.reshape(*part.shape[:2], 2, -1)).flatten(2)
            for part in (self.codes[..., :low], self.codes[..., low:])
            if part.shape[2]
        ]
        terms, factors = (
            None if part is None else _interleaved(part.view(*part.shape[:3], 2, HALF)).flatten(3)
            for part in (self.terms, self.factors)
        )
        assert terms is not None
        return replace(self, codes=torch.cat(codes, 2), terms=terms, factors=factors)


def interleaved_columns(columns: torch.Tensor) -> torch.Tensor:
    """What belongs to each of an even number of columns [N], in the order of `interleaved`."""
    return columns.view(2, -1, HALF).transpose(0, 1).reshape(-1)


def _interleaved(halves: torch.Tensor) -> torch.Tensor:
    """[panels, ..., 2, n]: halves of panels alternately from the first half and from the second."""
    moved = halves.movedim(-2, 1).flatten(0, 1)
    return moved.view(2, -1, *moved.shape[1:]).movedim(0, -2).contiguous()


def block_bytes(bits: int) -> int:
    """Of a block of codes of a panel."""
    return 64 * bits


def shapes(
    form: Form, out_size: int, in_size: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Of codes, terms and factors."""
    panels, blocks = -(-out_size // PANEL), -(-in_size // BLOCK)
    terms = (panels, -(-in_size // form.group), form.num_terms, PANEL)
    factors = (panels, -(-in_size // SUPER), form.num_terms, PANEL)
    codes = (panels, blocks, block_bytes(form.bits))
    return codes, terms, factors if form.terms == "super" else None


def pack(weight: GroupedCodes) -> PackedCodes:
    """Lay out a weight."""
    form, (n, k) = weight.form, weight.codes.shape
    padded = F.pad(weight.codes, (0, -k % BLOCK, 0, -n % PANEL))
    # panel, half, column, block, k
    halves = padded.view(-1, 2, HALF, padded.shape[1] // BLOCK, BLOCK)
    codes = (_bytes if form.bits == 8 else _planes)(halves, form.bits)
    factors = None if weight.factors is None else pack_terms(weight.factors)
    return PackedCodes(form, k, n, codes, pack_terms(weight.terms), factors)


def unpack(packed: PackedCodes) -> GroupedCodes:
    """The inverse of `pack`."""
    form, n, k = packed.form, packed.out_size, packed.in_size
    halves = (_from_bytes if form.bits == 8 else _from_planes)(packed.codes, form.bits)
    panels, blocks = packed.codes.shape[:2]
    codes = halves.reshape(panels * PANEL, blocks * BLOCK)[:n, :k].contiguous()
    factors = None if packed.factors is None else _unpack_terms(packed.factors, n)
    return GroupedCodes(form, codes, _unpack_terms(packed.terms, n), factors)


def pack_terms(terms: torch.Tensor) -> torch.Tensor:
    """[N, groups, terms] -> [panels, groups, terms, 32]."""
    padded = F.pad(terms, (0, 0, 0, 0, 0, -len(terms) % PANEL))
    return padded.view(-1, PANEL, *terms.shape[1:]).permute(0, 2, 3, 1).contiguous()


def _unpack_terms(terms: torch.Tensor, n: int) -> torch.Tensor:
    _, groups, each, _ = terms.shape
    return terms.permute(0, 3, 1, 2).reshape(-1, groups, each)[:n].contiguous()


def _bytes(halves: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [panel, half, column, block, k] of 8 bits -> [panel, block, bytes]."""
    laid = (halves ^ 128).permute(0, 3, 1, 4, 2)
    return laid.reshape(*laid.shape[:2], block_bytes(bits)).contiguous()


def _from_bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """-> [panel, half, column, block, k]."""
    halves = codes.view(*codes.shape[:2], 2, BLOCK, HALF) ^ 128
    return halves.permute(0, 2, 4, 1, 3)


def _planes(halves: torch.Tensor, bits: int) -> torch.Tensor:
    """The same as `_bytes` of 4 to 6 bits."""
    panels, _, _, blocks, _ = halves.shape
    # panel, half, column, block, unit, byte of a word, nibble, h
    low = (halves & 15).view(panels, 2, HALF, blocks, 2, 2, 2, 2)
    joined = low[..., 0, :] | (low[..., 1, :] << 4)  # panel, half, column, block, unit, byte, h
    parts = [joined.permute(0, 3, 1, 4, 2, 6, 5).reshape(panels, blocks, 2 * _LOW)]
    if bits > 4:
        width = bits - 4
        # panel, half, column, block, byte of a word, field of a byte, h
        high = (halves >> 4).view(panels, 2, HALF, blocks, width, 8 // width, 2)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
        joined = (high << shifts).sum(5, dtype=torch.uint8)
        laid = joined.permute(0, 3, 1, 2, 5, 4)  # panel, block, half, column, h, byte
        parts.append(laid.reshape(panels, blocks, 64 * width))
    return torch.cat(parts, 2)


def _from_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    panels, blocks, _ = codes.shape
    low = codes[..., : 2 * _LOW].reshape(panels, blocks, 2, 2, HALF, 2, 2)
    nibbles = torch.stack((low & 15, low >> 4), 7)  # panel, block, half, unit, column, h, byte, nib
    halves = nibbles.permute(0, 2, 4, 1, 3, 6, 7, 5).reshape(panels, 2, HALF, blocks, BLOCK)
    if bits > 4:
        width = bits - 4
        high = codes[..., 2 * _LOW :].reshape(panels, blocks, 2, HALF, 2, width, 1)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        fields = (high >> shifts) & (2**width - 1)  # panel, block, half, column, h, byte, field
        laid = fields.permute(0, 2, 3, 1, 5, 6, 4).reshape(panels, 2, HALF, blocks, BLOCK)
        halves = halves | (laid << 4)
    return halves
