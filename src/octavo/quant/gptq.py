"""GPTQ checkpoints: 4 or 8 bits, packed along the inputs.

The tensors are those of `quant.packed`, with qweight int32 [K * bits / 32, N], and

    X.g_idx   int32 [K], the group of each input

The first format stores zero points less one; `checkpoint_format` "gptq_v2" stores them as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.errors import CheckpointError
from octavo.quant.base import Codes, QuantizationFields, StoredPart
from octavo.quant.packed import PackedGroups, affine_terms, read_bits, read_group, unpack_words


@dataclass(frozen=True, slots=True)
class Gptq(PackedGroups):
    """See CheckpointQuantization. any_order: groups need not be runs of inputs (desc_act)."""

    METHOD: ClassVar[str] = "gptq"

    zeros_less_one: bool = True
    any_order: bool = False

    @classmethod
    def from_config(cls, fields: QuantizationFields) -> "Gptq":
        bits, group = read_bits(fields, (4, 8)), read_group(fields)
        if fields.get("checkpoint_format") not in (None, "gptq", "gptq_v2"):
            raise fields.wrong("checkpoint_format", "'gptq' or 'gptq_v2'")
        if fields.get("desc_act") not in (None, True, False):
            raise fields.wrong("desc_act", "true or false")
        for name in ("is_marlin_format", "dynamic"):  # another order of codes; bits by part
            if fields.get(name):
                raise fields.wrong(name, "absent or empty")
        if fields.get("pack_dtype") not in (None, "int32"):
            raise fields.wrong("pack_dtype", "'int32'")
        less_one = fields.get("checkpoint_format") != "gptq_v2"
        return cls(bits, group, less_one, bool(fields.get("desc_act")))

    @property
    def not_computed_on(self) -> str | None:
        if self.any_order:
            return "groups in any order (desc_act)"
        return super(Gptq, self).not_computed_on

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, StoredPart]:
        *stack, outputs, inputs = shape
        groups, each = self.num_groups(inputs), 32 // self.bits
        together = 1 if self.any_order else self.group or 1
        return {
            "qweight": StoredPart(
                (*stack, inputs // each, outputs), torch.int32, (-1, 1), (-2, each)
            ),
            # Every input may use any group (g_idx), so a part of the inputs needs all groups.
            "qzeros": StoredPart((*stack, groups, outputs // each), torch.int32, (-1, each)),
            "scales": StoredPart(
                (*stack, groups, outputs), torch.float32, (-1, 1), together=together
            ),
            "g_idx": StoredPart((*stack, inputs), torch.int32, None, (-1, 1)),
        }

    def decode(self, parts: Mapping[str, torch.Tensor]) -> Codes | torch.Tensor:
        """See CheckpointQuantization.decode; values where the groups are no runs of inputs.

        Of a part of the inputs, too: g_idx then begins at a later group.
        """
        codes = unpack_words(parts["qweight"].T, self.bits).flatten(1)
        zeros = unpack_words(parts["qzeros"], self.bits).flatten(1).float() + self.zeros_less_one
        scale, minimum = affine_terms(zeros, parts["scales"])
        inputs = codes.shape[1]
        group = self.group or inputs
        index = parts["g_idx"].long()
        if not bool(((index >= 0) & (index < scale.shape[1])).all()):
            raise CheckpointError(
                f"g_idx names groups {int(index.min())} to {int(index.max())}; there are "
                f"{scale.shape[1]}"
            )
        first = int(index[0])
        if not torch.equal(index, first + torch.arange(inputs) // group):
            return codes.float() * scale[:, index] + minimum[:, index]
        used = slice(first, first + self.num_groups(inputs))
        scale, minimum = scale[:, used].contiguous(), minimum[:, used].contiguous()
        return Codes(codes.contiguous(), scale, minimum, group, self.bits)
