"""Checkpoints in float8_e4m3fn: "fp8" (DeepSeek, Qwen, Mistral) and "compressed-tensors".

A weight [N, K] (N outputs, K inputs) is stored as

    X.weight            float8_e4m3fn [N, K]
    X.weight_scale      float: [1] or a scalar, [N, 1], or [N / n, K / k] for blocks of n x k
    X.weight_scale_inv  the same by another name (it is no inverse)

and w = weight * scale. Scales of activations (X.input_scale, X.activation_scale) are not used:
products are computed in the model's dtype, whose activations are not rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.errors import CheckpointError, shown
from octavo.quant.base import FP8, Codes, QuantizationFields, StoredPart

_SCALES = ("weight_scale", "weight_scale_inv")
_UNUSED = ("input_scale", "activation_scale")


@dataclass(frozen=True, slots=True)
class Fp8:
    """See CheckpointQuantization. block: outputs and inputs that share a scale; None: a scale per
    output, or one in all."""

    METHOD: ClassVar[str] = "fp8"

    block: tuple[int, int] | None

    @classmethod
    def from_config(cls, fields: QuantizationFields) -> "Fp8":
        if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
            raise fields.wrong("fmt", "'e4m3'")
        if fields.get("activation_scheme") not in (None, "dynamic", "static"):
            raise fields.wrong("activation_scheme", "'dynamic' or 'static'")
        return cls(_block(fields, "weight_block_size", fields.get("weight_block_size")))

    @property
    def computed_as(self) -> str:
        """See CheckpointQuantization.computed_as."""
        return FP8

    def explain(self) -> str:
        """See CheckpointQuantization.explain."""
        if self.block is None:
            return f"{self.METHOD}, e4m3"
        return f"{self.METHOD}, e4m3 in blocks of {self.block[0]} x {self.block[1]}"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, StoredPart]:
        """See CheckpointQuantization.parts."""
        *stack, outputs, inputs = shape
        single = ((*stack, 1), tuple(stack))
        if self.block is None:
            scale = StoredPart(
                (*stack, outputs, 1), torch.float32, (-2, 1), also=single, needed=False
            )
        else:
            rows, columns = self.block
            blocks = (*stack, -(-outputs // rows), -(-inputs // columns))
            scale = StoredPart(blocks, torch.float32, (-2, rows), (-1, columns), needed=False)
        unused = StoredPart(single[0], torch.float32, also=single[1:], needed=False)
        return {
            "weight": StoredPart(shape, torch.float8_e4m3fn, (-2, 1), (-1, 1)),
            **dict.fromkeys(_SCALES, scale),
            **dict.fromkeys(_UNUSED, unused),
        }

    def decode(self, parts: Mapping[str, torch.Tensor]) -> Codes:
        """See CheckpointQuantization.decode."""
        found = [parts[name] for name in _SCALES if name in parts]
        if len(found) != 1:
            there = "both are there" if found else "neither is there"
            raise CheckpointError(f"one of {' and '.join(_SCALES)} is needed; {there}")
        codes, scale = parts["weight"], found[0].float()
        outputs, inputs = codes.shape
        if self.block is None:
            return scaled(codes, scale.reshape(-1, 1).expand(outputs, 1), inputs)
        rows, columns = self.block
        return scaled(codes, scale.repeat_interleave(rows, 0)[:outputs], columns)


@dataclass(frozen=True, slots=True)
class CompressedTensors(Fp8):
    """llm-compressor's checkpoints, of which those in fp8 are read."""

    METHOD: ClassVar[str] = "compressed-tensors"

    @classmethod
    def from_config(cls, fields: QuantizationFields) -> "CompressedTensors":
        if fields.get("format") not in ("float-quantized", "naive-quantized"):
            raise fields.wrong("format", "'float-quantized': weights in fp8")
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            if fields.get(name):
                raise fields.wrong(name, "absent or empty")
        groups = fields.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise fields.wrong("config_groups", "an object of groups")
        blocks = {_block_of(fields, group) for group in groups.values()}
        if len(blocks) > 1:
            raise fields.wrong("config_groups", "groups whose weights have scales of one kind")
        return cls(blocks.pop())


def scaled(codes: torch.Tensor, scale: torch.Tensor, group: int) -> Codes:
    """float8_e4m3fn codes [N, K] and the scale [N, groups] of each `group` inputs as Codes."""
    nothing = scale.new_zeros(1, 1).expand(scale.shape)
    return Codes(codes, scale.contiguous(), nothing, group, 8)


def _block_of(fields: QuantizationFields, group: Any) -> tuple[int, int] | None:
    """Of the weights of one of `config_groups`."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise fields.wrong("config_groups", "groups with 'weights'")
    needed = {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "channel", "block"),
              "dynamic": (False, None), "symmetric": (True, None)}  # fmt: skip
    for name, right in needed.items():
        if weights.get(name) not in right:
            raise fields.wrong(
                "config_groups",
                f"fp8 weights: {name} is {shown(weights.get(name))}, not {shown(right[0])}",
            )
    if weights["strategy"] != "block":
        return None
    return _block(fields, "config_groups", weights.get("block_structure"))


def _block(fields: QuantizationFields, name: str, given: Any) -> tuple[int, int] | None:
    if given is None and name == "weight_block_size":
        return None
    sizes = given if isinstance(given, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.wrong(name, "the outputs and inputs of a block, such as [128, 128]")
    return sizes[0], sizes[1]
