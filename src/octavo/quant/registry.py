"""Names of weight formats: of whole checkpoints, and of the blocks that single tensors are made of.

A new format is a file beside this one and an entry here, or `register_quantization`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from octavo.errors import CheckpointError, ConfigError, shown
from octavo.quant import gguf
from octavo.quant.awq import Awq
from octavo.quant.base import METHODS, NONE, BlockCodec, CheckpointQuantization, QuantizationFields
from octavo.quant.fp8 import CompressedTensors, Fp8
from octavo.quant.gptq import Gptq

_BUILT_IN: Mapping[str, type[CheckpointQuantization]] = MappingProxyType(
    {kind.METHOD: kind for kind in (Awq, Gptq, Fp8, CompressedTensors)}
)
# The one table that grows at run time: registering is what `register_quantization` is for.
_registered: dict[str, type[CheckpointQuantization]] = {}
# Name of a `checkpoint.base.TensorFormat` without a dtype -> how its blocks are decoded.
BLOCKS: Mapping[str, BlockCodec] = MappingProxyType({**gguf.BLOCKS})


def register_quantization(kind: type[CheckpointQuantization]) -> None:
    """Read checkpoints whose `quant_method` is `kind.METHOD` by `kind`.

    Raises ConfigError for an empty name or a built-in one, or a class that lacks a part of the
    contract (`quant.base.CheckpointQuantization`). A name given again replaces the class.
    """
    if not kind.METHOD or kind.METHOD in _BUILT_IN:
        raise ConfigError(
            f"quantization method {kind.METHOD!r} is taken or empty; choose another than "
            f"{', '.join(map(repr, _BUILT_IN))}"
        )
    members = ("from_config", "computed_as", "explain", "parts", "decode")
    if missing := [member for member in members if not hasattr(kind, member)]:
        raise ConfigError(
            f"quantization method {kind.METHOD!r} lacks {', '.join(missing)}; a format has "
            f"{', '.join(members)}"
        )
    _registered[kind.METHOD] = kind


def methods() -> list[str]:
    """Every known `quant_method`."""
    return [*_BUILT_IN, *_registered]


def describe(config: Any, source: str) -> CheckpointQuantization:
    """What `quantization_config` of `source` says. Raises CheckpointError for what is unknown."""
    if not isinstance(config, dict):
        raise CheckpointError(f"{source}: quantization_config is {shown(config)}, not an object")
    method = config.get("quant_method")
    known = {**_BUILT_IN, **_registered}
    if not isinstance(method, str) or method not in known:
        raise CheckpointError(
            f"{source}: weights quantized with {shown(method)} are not supported (known: "
            f"{', '.join(known)}); use the model's bf16 safetensors or a GGUF"
        )
    return known[method].from_config(QuantizationFields(source, config))


def check_agrees(quantization: str | None, stored: CheckpointQuantization | None) -> None:
    """Raise ConfigError if `quantization` asks for something else than the checkpoint holds."""
    only_stored = set(methods()) - set(METHODS)
    if quantization in only_stored and (stored is None or quantization != stored.METHOD):
        holds = "no quantized weights" if stored is None else f"weights of {stored.METHOD!r}"
        raise ConfigError(
            f"quantization {quantization!r} is for checkpoints that are stored so; this one holds "
            f"{holds}. Name such a model (usually a Hugging Face id that ends in "
            f"-{str(quantization).upper()}), or leave the option out; int4 and int8 quantize any "
            "model while it is loaded"
        )
    if stored is not None and quantization not in (None, NONE, stored.METHOD):
        raise ConfigError(
            f"quantization is {quantization!r}, but the checkpoint's weights are quantized with "
            f"{stored.METHOD!r} already; leave the option out, or dequantize them with 'none'"
        )
