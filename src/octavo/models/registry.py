"""The architectures that can be served: one table of what sets each family apart.

All of these share `models.decoder`. A family whose block has another shape names a class of its
own in `decoder` (see `models.architecture`), which is imported only when such a model is loaded.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from octavo.errors import CheckpointError, nearest, shown
from octavo.layers.norm import NormKind

# Whether a bias exists: always, never, or as the config's field says (`attention_bias`).
BiasRule = Literal["always", "never", "config"]
# Which layers have a window: none; all; all if `use_sliding_window` says so; those named by
# `layer_types`, or else by `max_window_layers`; all but every `window_period`th, unless
# `layer_types` says otherwise; those named by `layer_types`, or else the ones without rotary
# embedding.
WindowRule = Literal["none", "all", "if used", "from layer", "period", "no rope"]
# Rotary embedding: one for all layers; one for layers with a window and one for the others;
# none in the layers that `no_rope_layers` or `no_rope_layer_interval` name.
RopeRule = Literal["one", "by window", "interval"]
# Norms before attention and MLP (Llama), after them, or both. What they return is added to the
# residual, so "post" leaves the residual itself without a norm.
Placement = Literal["pre", "post", "sandwich"]
# Norms of queries and keys: of each head, or of the whole projected row.
QKNorm = Literal["none", "head", "row"]
# Factor of attention scores: head_dim^-0.5, or from a field of the config.
ScaleRule = Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier"]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    name: its `model_type`; architecture: its entry in a config's `architectures`; gguf: its
        `general.architecture` ("" if llama.cpp has none of its own).
    norm: its kind; norm_bias: whether it has a bias; norm_eps: the config's field of epsilon.
    norm_offset: added to norm weights; GGUF files hold the sum. norm_cast_first: normed rows are
        rounded before the multiply by the weight, too (no row says so: once is more exact).
    fused: safetensors hold q, k and v as one matrix, gate and up as one; GGUF files as well.
    scale: of attention scores. gguf_wide_scale: in a GGUF file, which does not hold it, the
        number of layers of the size whose scale is (hidden_size / heads)^-0.5.
    gguf_whole_factor: `rope.scaling.attn_factor` of a GGUF file is the factor that the config
        gives, not one that yarn's own is multiplied by.
    multipliers: `embedding_multiplier`, `residual_multiplier`, `logits_scaling` count (Granite).
    sqrt_embedding: embeddings are multiplied by sqrt(hidden_size) (Gemma).
    soft_caps: `attn_logit_softcapping` and `final_logit_softcapping` count.
    activation: the config's field that names it. longrope: `su` and `yarn` mean longrope.
    partial_rotary: `partial_rotary_factor` counts.
    temperature: `llama_4_scaling_beta` counts, a temperature of queries by position.
    extra_fields: further fields of the config, for a class of its own: `ModelSpec.extra`.
    defaults: what transformers assumes for a field that a config leaves out, where it is not
        the same for all families (`models.config` has the common ones).
    gguf_permuted: GGUF files hold q and k rows in the order of interleaved rotary pairs.
    """

    name: str
    architecture: str
    gguf: str = ""
    qkv_bias: BiasRule = "never"
    output_bias: BiasRule = "never"
    mlp_bias: BiasRule = "never"
    placement: Placement = "pre"
    norm: NormKind = "rms"
    norm_bias: bool = False
    norm_eps: str = "rms_norm_eps"
    norm_offset: float = 0.0
    norm_cast_first: bool = False
    qk_norm: QKNorm = "none"
    window: WindowRule = "none"
    window_period: int = 0
    rope: RopeRule = "one"
    longrope: bool = False
    partial_rotary: bool = False
    temperature: bool = False
    fused: bool = False
    scale: ScaleRule = "head_dim"
    gguf_wide_scale: int = 0
    gguf_whole_factor: bool = False
    multipliers: bool = False
    sqrt_embedding: bool = False
    soft_caps: bool = False
    activation: str = "hidden_act"
    gguf_permuted: bool = False
    extra_fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    decoder: str = "octavo.models.decoder:Decoder"

    def fixed_embedding_scale(self, hidden_size: int) -> float:
        """The factor of token embeddings where no field of the config gives one."""
        return hidden_size**0.5 if self.sqrt_embedding else 1.0


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of several parts, of which the text part (`text_config`) is served.

    prefixes: what the names of its tensors begin with in safetensors, and what they stand for.
    ignored: prefixes of the other parts' tensors.
    """

    name: str
    architecture: str
    prefixes: Mapping[str, str]
    ignored: tuple[str, ...]


_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip

_EXPERT_FIELDS = (
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaForCausalLM",
        "llama",
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
        "ministral3",
        "Ministral3ForCausalLM",
        "mistral3",
        window="all",
        temperature=True,
        gguf_permuted=True,
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "qwen2",
        qkv_bias="always",
        window="from layer",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        qkv_bias="config",
        output_bias="config",
        qk_norm="head",
        window="from layer",
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma2",
        qkv_bias="config",
        output_bias="config",
        placement="sandwich",
        norm_offset=1.0,
        window="period",
        window_period=2,
        scale="query_pre_attn_scalar",
        gguf_wide_scale=46,
        sqrt_embedding=True,
        soft_caps=True,
        activation="hidden_activation",
        defaults={
            **_GEMMA,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        "gemma3",
        qkv_bias="config",
        output_bias="config",
        placement="sandwich",
        norm_offset=1.0,
        qk_norm="head",
        window="period",
        window_period=6,
        rope="by window",
        scale="query_pre_attn_scalar",
        gguf_wide_scale=62,
        sqrt_embedding=True,
        soft_caps=True,
        activation="hidden_activation",
        defaults={
            **_GEMMA,
            "vocab_size": 262208,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        "phi3",
        window="all",
        longrope=True,
        partial_rotary=True,
        fused=True,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        "olmo2",
        qkv_bias="config",
        output_bias="config",
        placement="post",
        qk_norm="row",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        "olmo2",
        qkv_bias="config",
        output_bias="config",
        placement="post",
        qk_norm="row",
        window="period",
        window_period=4,
        rope="by window",
        gguf_whole_factor=True,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "sliding_window": 4096,
            "rope_theta": 5e5,
        },
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        "granite",
        qkv_bias="config",
        output_bias="config",
        mlp_bias="config",
        scale="attention_multiplier",
        multipliers=True,
        gguf_permuted=True,
        defaults={
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        "smollm3",
        qkv_bias="config",
        output_bias="config",
        mlp_bias="config",
        window="no rope",
        rope="interval",
        gguf_permuted=True,
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        window="all",
        extra_fields=_EXPERT_FIELDS[:1] + _EXPERT_FIELDS[2:3],
        decoder="octavo.models.moe:MoeDecoder",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qkv_bias="config",
        output_bias="config",
        qk_norm="head",
        window="if used",
        extra_fields=_EXPERT_FIELDS,
        decoder="octavo.models.moe:MoeDecoder",
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
)

_TEXT_PART = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_VISION = ("vision_tower.", "multi_modal_projector.")

WRAPPERS: tuple[Wrapper, ...] = tuple(
    Wrapper(name, architecture, _TEXT_PART, (*_VISION, *(f"model.{part}" for part in _VISION)))
    for name, architecture in (
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral3", "Mistral3ForConditionalGeneration"),
    )
)


def by_architecture(name: str) -> Family:
    """The family of an architecture or model type; else CheckpointError lists the known ones."""
    for family in FAMILIES:
        if name in (family.architecture, family.name):
            return family
    known = [f.architecture for f in FAMILIES] + [w.architecture for w in WRAPPERS]
    raise CheckpointError(
        f"architecture {shown(name)} is not supported{nearest(name, known)}; "
        f"known: {', '.join(known)}"
    )


def by_gguf_name(name: str, has_window: bool = False) -> Family:
    """The family of a GGUF's `general.architecture`; else CheckpointError lists the known ones.

    has_window: whether the file names a window, which tells apart families of one name.
    """
    found = [family for family in FAMILIES if name and name == family.gguf]
    for family in found:
        if (family.window != "none") == has_window:
            return family
    if found:
        return found[0]
    known = list(dict.fromkeys(family.gguf for family in FAMILIES if family.gguf))
    raise CheckpointError(
        f"GGUF architecture {shown(name)} is not supported{nearest(name, known)}; "
        f"known: {', '.join(known)}"
    )


def wrapper_of(name: str) -> Wrapper | None:
    """The wrapper of that architecture or model type, if it is one."""
    return next((w for w in WRAPPERS if name in (w.architecture, w.name)), None)


def decoder_class(family: Family) -> Any:
    """The class that runs the family's models."""
    module, _, name = family.decoder.partition(":")
    return getattr(importlib.import_module(module), name)
