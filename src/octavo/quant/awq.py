"""AWQ checkpoints (AutoAWQ's "gemm" layout): 4 bits, packed along the outputs.

The tensors are those of `quant.packed`, with qweight int32 [K, N / 8]; eight columns lie in a word
in the order 0 2 4 6 1 3 5 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.quant.base import Codes, QuantizationFields, StoredPart
from octavo.quant.packed import PackedGroups, affine_terms, read_bits, read_group, unpack_words

_COLUMN_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq(PackedGroups):
    """See CheckpointQuantization."""

    METHOD: ClassVar[str] = "awq"

    @classmethod
    def from_config(cls, fields: QuantizationFields) -> "Awq":
        bits, group = read_bits(fields, (4,)), read_group(fields)
        if fields.get("version") not in (None, "gemm"):
            raise fields.wrong("version", "'gemm'")
        return cls(bits, group)

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, StoredPart]:
        *stack, outputs, inputs = shape
        groups, words = self.num_groups(inputs), outputs // 8
        return {
            "qweight": StoredPart((*stack, inputs, words), torch.int32, (-1, 8), (-2, 1)),
            "qzeros": StoredPart(
                (*stack, groups, words), torch.int32, (-1, 8), self.groups_of_inputs
            ),
            "scales": StoredPart(
                (*stack, groups, outputs), torch.float32, (-1, 1), self.groups_of_inputs
            ),
        }

    def decode(self, parts: Mapping[str, torch.Tensor]) -> Codes:
        codes, zeros = _unpack(parts["qweight"]).T, _unpack(parts["qzeros"])
        terms = affine_terms(zeros, parts["scales"])
        return Codes(codes.contiguous(), *terms, self.group or codes.shape[1], self.bits)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n], in the order of columns."""
    return unpack_words(words, 4)[..., torch.tensor(_COLUMN_ORDER).argsort()].flatten(1)
