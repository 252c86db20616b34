"""The architectures that can be served: one table of what sets each family apart.

All share `models.decoder`; a family whose block has another shape would name a module of its
own in `decoder`, which is imported only when such a model is loaded.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from octavo.errors import CheckpointError, nearest

# Whether a bias exists: always, never, or as the config's field says (`attention_bias`).
BiasRule = Literal["always", "never", "config"]
# Which layers see a window: none, all, or those that `layer_types` / `max_window_layers` name.
WindowRule = Literal["none", "all", "by layer"]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    name: its `model_type`; architecture: its entry in a config's `architectures`.
    defaults: what transformers assumes for a field that a config leaves out, where it is not
        the same for all families (`models.spec` has the common ones).
    gguf_permuted: GGUF files hold q and k rows in the order of interleaved rotary pairs.
    """

    name: str
    architecture: str
    qkv_bias: BiasRule = "never"
    output_bias: BiasRule = "never"
    mlp_bias: BiasRule = "never"
    qk_norm: bool = False
    window: WindowRule = "none"
    gguf_permuted: bool = False
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    decoder: str = "octavo.models.decoder:Decoder"


FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaForCausalLM",
        qkv_bias="config",
        output_bias="config",
        mlp_bias="config",
        gguf_permuted=True,
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        window="all",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        qkv_bias="always",
        window="by layer",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qkv_bias="config",
        output_bias="config",
        qk_norm=True,
        window="by layer",
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
    ),
)


def by_architecture(name: str) -> Family:
    """The family of an architecture or model type; else CheckpointError lists the known ones."""
    for family in FAMILIES:
        if name in (family.architecture, family.name):
            return family
    known = [family.architecture for family in FAMILIES]
    raise CheckpointError(
        f"architecture {name!r} is not supported{nearest(name, known)}; known: {', '.join(known)}"
    )


def decoder_class(family: Family) -> Any:
    """The class that runs the family's models."""
    module, _, name = family.decoder.partition(":")
    return getattr(importlib.import_module(module), name)
