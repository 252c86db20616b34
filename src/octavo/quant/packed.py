"""What AWQ and GPTQ share: codes packed into 32-bit words, in groups of inputs.

A weight [N, K] (N outputs, K inputs) is stored, in place of `X.weight`, as

    X.scales  float [groups, N]
    X.qzeros  int32 [groups, N * bits / 32], zero points packed along N
    X.qweight int32, the codes, packed along either dimension

and w = (code - zero) * scale. Packed values begin at the lowest bits.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.quant.base import INT4, INT8, NONE, QuantizationFields


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """bits: of a code; group: how many inputs share a scale, 0: all of them."""

    METHOD: ClassVar[str]

    bits: int
    group: int

    @property
    def not_computed_on(self) -> str | None:
        """What no kernel computes on, in words; None where one does."""
        return f"groups of {self.group}" if self.bits == 4 and self.group % 32 else None

    @property
    def computed_as(self) -> str:
        """See CheckpointQuantization.computed_as."""
        if self.not_computed_on:
            return NONE
        return INT4 if self.bits == 4 else INT8

    def explain(self) -> str:
        """See CheckpointQuantization.explain."""
        name = f"{self.METHOD}, {self.bits} bits"
        if self.not_computed_on:
            return f"{name}, expanded: no kernel computes on {self.not_computed_on}"
        return f"{name}, computed on as {self.computed_as}"

    def num_groups(self, inputs: int) -> int:
        return -(-inputs // (self.group or inputs))

    @property
    def groups_of_inputs(self) -> tuple[int, int] | None:
        """`StoredPart.inputs` of what is [groups, outputs]; one group is the same for all."""
        return (-2, self.group) if self.group else None


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, n, 32 / bits], the lowest bits first; bits: 4 or 8."""
    packed = words.contiguous().view(torch.uint8)  # the lowest byte of a word first
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), -1)
    return packed.view(*words.shape, 32 // bits)


def affine_terms(zeros: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero points and scales [groups, N] -> scale and minimum [N, groups] of `Codes`."""
    scale = scales.float().T.contiguous()
    return scale, (-zeros.float().T * scale).contiguous()


def read_bits(fields: QuantizationFields, allowed: tuple[int, ...]) -> int:
    bits = fields.get("bits")
    if bits not in allowed:
        raise fields.wrong("bits", " or ".join(map(str, allowed)))
    return int(bits)


def read_group(fields: QuantizationFields) -> int:
    """`group_size`, as `PackedGroups.group`."""
    size = fields.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise fields.wrong("group_size", "the inputs of a group, or -1 for all")
    return max(size, 0)
