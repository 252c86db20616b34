"""Weights as 4- or 8-bit codes in groups: read from checkpoints, consumed by a device's GEMMs.

`quant` knows which weight formats use codes; a device's kernels define their memory layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """Each group's values [N, K] as 16 levels from its least to its largest."""
    n, k = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -k % group), mode="replicate")
    grouped = wide.view(n, -1, group)
    minimum, maximum = grouped.amin(2), grouped.amax(2)
    scale = (maximum - minimum) / 15
    codes = (grouped - minimum.unsqueeze(2)) / scale.clamp(min=1e-30).unsqueeze(2)
    return Codes(codes.round().to(torch.uint8).view(n, -1)[:, :k], scale, minimum, group, 4)
