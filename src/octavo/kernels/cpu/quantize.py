"""Weights quantized for the CPU's products.

"int8" and "int4" are weight-only (`weight_only`): codes in groups, whose values are multiplied by
activations as they are. Codes of a checkpoint are kept, exactly.

"w8a8" and "w4a8" are products of integers (`gemm_int8`), of activations that are rounded, too:
int8 per output column, or 4-bit codes in groups. w8a8: w = scale[n] * q with scale[n] =
max |w[n]| / 127. w4a8: codes of 0 to 15 between the minimum and maximum of each group; both are
multiplied as int8, so the values of a group are rounded to its column's int8 grid: an error of at
most half of 1 / 127 of the column's largest value, a tenth of that of rounding to 4 bits.
"""

import torch

from octavo.kernels.codes import GROUP, Codes, round_to_codes
from octavo.kernels.cpu import gemm_int8_call as gemm
from octavo.kernels.cpu.codes_pack_call import pack_codes, pack_rounded
from octavo.kernels.cpu.gemm_int8_call import PackedWeight
from octavo.kernels.cpu.weight_only_layout import BLOCK, Allocate, PackedCodes

INT8, INT4, W8A8, W4A8, STORED = "int8", "int4", "w8a8", "w4a8", "stored"
WEIGHT_ONLY = (INT8, INT4)
_BYTE_GROUP = 64  # inputs that share a scale where weights are rounded to 8 bits: 8.25 bits each
_LIMIT = 127.0
_ROWS = 4096


def pack_weight_only(
    weight: torch.Tensor | Codes, method: str, allocate: Allocate | None = None
) -> PackedCodes:
    """`weight` [N, K] for `weight_only`, as int8 or int4.

    Codes are kept if they have no more bits than the method and groups that the kernel has.
    """
    if isinstance(weight, Codes):
        if _fits(weight, method):
            return pack_codes(weight, allocate)
        weight = weight.values()
    if method == INT4:
        return pack_rounded(weight, 4, GROUP, allocate)
    return pack_rounded(weight, 8, _BYTE_GROUP, allocate)


def _fits(codes: Codes, method: str) -> bool:
    if codes.are_floats or codes.bits > (4 if method == INT4 else 8):
        return False
    return codes.is_one_group or codes.group % BLOCK == 0


def pack(
    weight: torch.Tensor | Codes, method: str, largest: torch.Tensor | None = None
) -> PackedWeight:
    """`weight` [N, K] for `gemm_int8`, as w8a8 or w4a8. 4-bit codes are kept if it can use them.

    largest: as of `layers.linear.Products.make`.
    """
    if method == W8A8:
        return _int8(weight.values() if isinstance(weight, Codes) else weight, largest)
    if isinstance(weight, Codes):
        codes = weight if keeps_codes(weight) else round_to_codes(weight.values())
        return _int4(codes, largest)
    return _int4(round_to_codes(weight), largest)


def keeps_codes(codes: Codes) -> bool:
    """Whether the kernels can compute on these codes directly."""
    return codes.bits == 4 and codes.group % 32 == 0


def _scale(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, largest / _LIMIT, 1.0)


def _int8(weight: torch.Tensor, largest: torch.Tensor | None) -> PackedWeight:
    scale = _scale(weight.abs().amax(1).float() if largest is None else largest)
    q = torch.empty(weight.shape, dtype=torch.int8)
    for begin in range(0, len(q), _ROWS):  # in slices: a head in float32 is the largest tensor
        rows = slice(begin, begin + _ROWS)
        q[rows] = (weight[rows].float() / scale[rows].unsqueeze(1)).round_()
    return gemm.pack_int8(q, scale)


def _int4(codes: Codes, largest: torch.Tensor | None) -> PackedWeight:
    scale = _scale(codes.values().abs().amax(1) if largest is None else largest)
    m = (codes.scale / scale.unsqueeze(1) * 256).round().int()
    o = (codes.minimum / scale.unsqueeze(1) * 256).round().int() + 128
    return gemm.pack_int4(codes.codes, m, o, scale, codes.group)
