"""Weights rounded to codes, or codes, in the layout of `weight_only`. Free of Numba.

Compiled (`codes_pack`) where rows are whole groups of multiples of 32 values; else by torch.
"""

import torch

from octavo.kernels.codes import (
    Codes,
    GroupedCodes,
    as_grouped,
    bytes_between,
    levels_between,
    round_to_bytes,
    round_to_codes,
)
from octavo.kernels.cpu import abi, openmp, weight_only_layout
from octavo.kernels.cpu.kernel import FLOAT_NAMES, address, kernel
from octavo.kernels.cpu.weight_only_layout import Allocate, PackedCodes, pack_terms

_STEP = 32  # values that the kernels read at a time
_extents, _pack = abi.EXTENTS.packer(), abi.CODES_PACK.packer()


def pack_rounded(
    weight: torch.Tensor, bits: int, group: int, allocate: Allocate | None = None
) -> PackedCodes:
    """The values [N, K], of 4 or 8 bits, as `round_to_codes` or `round_to_bytes` rounds them."""
    name = FLOAT_NAMES.get(weight.dtype)
    if name is None or group % _STEP or weight.shape[1] % group or weight.stride(1) != 1:
        rounded = (round_to_codes if bits == 4 else round_to_bytes)(weight, group)
        return weight_only_layout.pack(as_grouped(rounded))
    rows, columns = weight.shape
    low, high = (torch.empty((rows, columns // group)) for _ in range(2))
    arguments = _extents(
        rows=rows, columns=columns, group=group, raw=address(weight), stride=_stride(weight),
        minimum=address(low), maximum=address(high),
    )  # fmt: skip
    kernel(abi.EXTENTS, name).run(arguments, openmp.threads())
    if bits == 4:
        scale, minimum = levels_between(low, high)
        return _packed(weight, Codes(_no_codes(weight), scale, minimum, group, 4), name, allocate)
    scale = bytes_between(low, high)
    codes = Codes(_no_codes(weight), scale, -128 * scale, group, 8)
    return _packed(weight, codes, name, allocate, torch.zeros_like(scale))


def pack_codes(codes: Codes, allocate: Allocate | None = None) -> PackedCodes:
    """Codes of a file, exactly; their groups are multiples of 16, or one."""
    values = codes.codes
    if values.shape[1] % _STEP or values.stride(1) != 1:
        return weight_only_layout.pack(as_grouped(codes))
    return _packed(values, codes, "codes", allocate)


def _packed(
    source: torch.Tensor,
    codes: Codes,
    name: str,
    allocate: Allocate | None,
    minimum: torch.Tensor | None = None,
) -> PackedCodes:
    """source: what the kernel makes codes of; minimum: what it subtracts, if not that of codes."""
    grouped = as_grouped(codes)
    rows, columns = source.shape
    packed = PackedCodes.empty(grouped.form, rows, columns, allocate)
    _fill_terms(packed, grouped)
    minimum = codes.minimum if minimum is None else minimum
    arguments = _pack(
        rows=rows, columns=columns, group=codes.group, raw=address(source),
        stride=_stride(source), scale=address(codes.scale), minimum=address(minimum),
        codes=address(packed.codes),
    )  # fmt: skip
    kernel(abi.CODES_PACK, f"{codes.bits}-{name}").run(arguments, openmp.threads())
    return packed


def _fill_terms(packed: PackedCodes, grouped: GroupedCodes) -> None:
    packed.terms.copy_(pack_terms(grouped.terms))
    if packed.factors is not None and grouped.factors is not None:
        packed.factors.copy_(pack_terms(grouped.factors))


def _no_codes(weight: torch.Tensor) -> torch.Tensor:
    """Of the shape of a weight, without memory: for what looks at the terms alone."""
    return torch.zeros((1, 1), dtype=torch.uint8).expand(weight.shape)


def _stride(weight: torch.Tensor) -> int:
    return weight.stride(0) * weight.element_size()
