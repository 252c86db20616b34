"""Weights as int8 per output column, and as 4-bit codes in groups that stand for such an int8.

int8: w = scale[n] * q with scale[n] = max |w[n]| / 127. int4: codes of 0 to 15 between the least
and the largest value of each group. `kernels.cpu.gemm_int8` multiplies both as int8, so the values
of a group lie on the grid of its column: they are off by at most half a step of 1 / 127 of the
column's largest value, which is a tenth of what rounding to 4 bits moves them.
"""

import torch

from octavo.kernels.cpu import gemm_int8_call as cpu_quant_ops
from octavo.kernels.cpu.gemm_int8_call import PackedWeight
from octavo.quant.base import INT8, Codes

GROUP = 32  # k that share a step when weights are rounded to 4 bits here
_LIMIT = 127.0
_ROWS = 4096


def pack(weight: torch.Tensor | Codes, method: str) -> PackedWeight:
    """`weight` as int8 or int4. Codes of 4 bits are kept as they are where that is possible."""
    if method == INT8:
        return _int8(weight.values() if isinstance(weight, Codes) else weight)
    if isinstance(weight, Codes):
        return _int4(weight if keeps_codes(weight) else round_to_codes(weight.values()))
    return _int4(round_to_codes(weight))


def keeps_codes(codes: Codes) -> bool:
    """Whether the kernels can compute on these codes without widening them."""
    return codes.bits == 4 and codes.group % 32 == 0


def round_to_codes(weight: torch.Tensor, group: int = GROUP) -> Codes:
    """Each group's values as 16 levels from its least to its largest."""
    n, k = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -k % group), mode="replicate")
    grouped = wide.view(n, -1, group)
    low, high = grouped.amin(2), grouped.amax(2)
    step = (high - low) / 15
    codes = (grouped - low.unsqueeze(2)) / step.clamp(min=1e-30).unsqueeze(2)
    return Codes(codes.round().to(torch.uint8).view(n, -1)[:, :k], step, low, group, 4)


def _scale(most: torch.Tensor) -> torch.Tensor:
    return torch.where(most > 0, most / _LIMIT, 1.0)


def _int8(weight: torch.Tensor) -> PackedWeight:
    scale = _scale(weight.abs().amax(1).float())
    q = torch.empty(weight.shape, dtype=torch.int8)
    for begin in range(0, len(q), _ROWS):  # in pieces: a head in float32 is the largest tensor
        rows = slice(begin, begin + _ROWS)
        q[rows] = (weight[rows].float() / scale[rows].unsqueeze(1)).round_()
    return cpu_quant_ops.pack_int8(q, scale)


def _int4(codes: Codes) -> PackedWeight:
    scale = _scale(codes.values().abs().amax(1))
    m = (codes.step / scale.unsqueeze(1) * 256).round().int()
    o = (codes.low / scale.unsqueeze(1) * 256).round().int() + 128
    return cpu_quant_ops.pack_int4(codes.codes, m, o, scale, codes.group)
