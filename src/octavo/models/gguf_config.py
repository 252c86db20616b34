"""The description of a model in a GGUF file: metadata, and which tensors are there.

What llama.cpp's converters leave out is implied by the architecture, as llama.cpp implies it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from octavo.attention.base import AttentionSpec
from octavo.checkpoint.base import StoredTensor
from octavo.errors import CheckpointError, shown
from octavo.layers.norm import NormSpec
from octavo.layers.rope import QueryTemperature, RopeKind, RopeSpec, attention_scale
from octavo.models import gguf_keys
from octavo.models.fields import MOST_LAYERS, Fields
from octavo.models.registry import Family, by_gguf_name
from octavo.models.spec import LayerSpec, ModelSpec
from octavo.quant.tensors import read_into

# Tensors that belong to the description, not parameters.
METADATA_TENSORS = (
    "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight",
)  # fmt: skip


def read(path: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """The spec in a GGUF file's metadata; its keys begin with the architecture's name."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{path} names no general.architecture (it is {shown(name)})")
    try:
        family = by_gguf_name(name, f"{name}.attention.sliding_window" in metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    own = {k.removeprefix(f"{name}."): v for k, v in metadata.items() if k.startswith(f"{name}.")}
    gguf_keys.check(path, family, own)
    general = Fields(path, metadata)
    fields = Fields(path, own, {"vocab_size": len(general.items("tokenizer.ggml.tokens", str))})
    hidden, max_position = fields.integer("embedding_length"), fields.integer("context_length")
    eps = "rms_epsilon" if family.norm == "rms" else "epsilon"
    norm = NormSpec(
        fields.number(f"attention.layer_norm_{eps}"),
        family.norm,
        family.norm_offset,
        family.norm_bias,
        family.norm_cast_first,
    )
    qkv = "attn_qkv" if family.fused else "attn_q"
    return ModelSpec(
        family=family,
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        max_position=max_position,
        layers=_layers(family, fields, tensors, norm),
        final_norm=norm,
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=f"blk.0.{qkv}.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        embedding_scale=(
            fields.number("embedding_scale", 1.0)
            if family.multipliers
            else family.fixed_embedding_scale(hidden)
        ),
        logit_divisor=fields.number("logit_scale", 1.0) if family.multipliers else 1.0,
        logit_soft_cap=(
            fields.maybe_number("final_logit_softcapping") if family.soft_caps else None
        ),
        eos_token_ids=tuple(
            dict.fromkeys(
                general.ids("tokenizer.ggml.eos_token_id")
                + general.ids("tokenizer.ggml.eot_token_id")
            )
        ),
        bos_token_id=general.optional("tokenizer.ggml.bos_token_id", 0),
    )


def _layers(
    family: Family, fields: Fields, tensors: Mapping[str, StoredTensor], norm: NormSpec
) -> tuple[LayerSpec, ...]:
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    kv_heads = fields.optional("attention.head_count_kv") or heads
    head_dim = fields.optional("attention.key_length") or hidden // heads
    if not head_dim:
        raise fields.wrong("attention.head_count", heads, f"at most embedding_length, {hidden}")
    if heads % kv_heads:
        raise fields.wrong("attention.head_count_kv", kv_heads, f"a divisor of {heads} heads")
    if fields.get("attention.value_length") not in (None, head_dim):
        value = fields.get("attention.value_length")
        raise fields.wrong("attention.value_length", value, f"the head size, {head_dim}")
    # A layer has tensors, so that their number bounds what is made here.
    count = fields.integer("block_count", most=min(MOST_LAYERS, max(len(tensors), 1)))
    rope = _rope(family, fields, tensors, head_dim)
    temperature = _temperature(fields, rope) if family.temperature else None
    soft_cap = fields.maybe_number("attn_logit_softcapping") if family.soft_caps else None
    return tuple(
        LayerSpec(
            AttentionSpec(
                heads, kv_heads, head_dim, _scale(family, fields, head_dim), window, soft_cap
            ),
            _layer_rope(family, fields, rope, layer, window),
            norm,
            placement=family.placement,
            qk_norm=family.qk_norm,
            activation="gelu_tanh" if family.activation == "hidden_activation" else "silu",
            query_temperature=temperature,
            residual_scale=fields.number("residual_scale", 1.0) if family.multipliers else 1.0,
        )
        for layer, window in enumerate(_windows(family, fields, count))
    )


def _temperature(fields: Fields, rope: RopeSpec) -> QueryTemperature | None:
    beta = fields.maybe_number("attention.temperature_scale")
    if beta is None:
        return None
    length = fields.optional("attention.temperature_length") or rope.original_max_position
    return QueryTemperature(beta, length)


def _scale(family: Family, fields: Fields, head_dim: int) -> float:
    given = fields.maybe_number("attention.scale")
    if given is not None:
        return given
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    if family.gguf_wide_scale == fields.integer("block_count"):
        return float((hidden / heads) ** -0.5)
    return float(head_dim**-0.5)


def _windows(family: Family, fields: Fields, count: int) -> list[int | None]:
    """Per layer, its window; 0 (Phi-4) means none."""
    window = fields.optional("attention.sliding_window", 0)
    window = (_implied_window(family, fields, count) if window is None else window) or None
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != count or not all(isinstance(item, bool) for item in pattern):
            raise fields.wrong(
                "attention.sliding_window_pattern", pattern, f"{count} of true and false"
            )
        return [window if has_window else None for has_window in pattern]
    period = fields.optional("attention.sliding_window_pattern") or family.window_period
    if not period:
        return [window] * count
    return [window if (layer + 1) % period else None for layer in range(count)]


def _implied_window(family: Family, fields: Fields, count: int) -> int:
    """The window of a file that names none, 0 for none: converters did not write it at first."""
    if family.name == "gemma2":
        return int(family.defaults["sliding_window"])
    if family.name == "gemma3_text":
        right = "there: layers of this architecture have windows"
        raise fields.wrong("attention.sliding_window", None, right)
    if family.name == "phi3" and count in (32, 40) and fields.get("context_length") == 4096:
        return 2047
    return 0


def _layer_rope(
    family: Family, fields: Fields, rope: RopeSpec, layer: int, window: int | None
) -> RopeSpec | None:
    if family.rope == "interval":
        interval = family.defaults["no_rope_layer_interval"]
        return rope if (layer + 1) % interval else None
    if family.rope == "by window" and window is not None:
        local = family.defaults.get("rope_local_base_freq", rope.theta)
        return RopeSpec(fields.number("rope.freq_base_swa", local))
    return rope


def _rope(
    family: Family, fields: Fields, tensors: Mapping[str, StoredTensor], head_dim: int
) -> RopeSpec:
    """Scaling from metadata, or from a tensor of frequency divisors (Llama 3, longrope)."""
    dims = fields.optional("rope.dimension_count") or head_dim
    if dims > head_dim or dims % 2 or (dims != head_dim and not family.partial_rotary):
        right = (
            f"even and at most {head_dim}"
            if family.partial_rotary
            else f"the head size, {head_dim}"
        )
        raise fields.wrong("rope.dimension_count", dims, right)
    theta = fields.number("rope.freq_base", 10000.0)
    plain = RopeSpec(theta, fraction=dims / head_dim)
    factor, factor_key = _factor(fields)
    # Without a type, a factor means linear scaling.
    kind = fields.get("rope.scaling.type") or ("none" if factor == 1 else "linear")
    if family.longrope and "rope_factors_long.weight" in tensors:
        kind = "longrope"
    if kind in ("linear", "yarn"):
        fields.number(factor_key)
    if kind in ("none", "longrope") and factor != 1:
        raise fields.wrong(factor_key, factor, f"1 with rope.scaling.type {kind!r}")
    if kind == "longrope" and family.longrope:
        return _longrope(fields, plain, tensors, dims // 2)
    if kind not in ("none", "linear", "yarn"):
        raise fields.wrong("rope.scaling.type", kind, "none, linear or yarn")
    if kind != "none" and not fields.get(factor_key):
        raise fields.wrong(factor_key, fields.get(factor_key), "a number above 0")
    factors: tuple[float, ...] = ()
    if "rope_freqs.weight" in tensors:
        factors = _divisors(fields, tensors, "rope_freqs.weight", dims // 2)
    if kind == "none":
        return replace(plain, freq_factors=factors)
    log_multiplier = fields.maybe_number("rope.scaling.yarn_log_multiplier")
    spec = RopeSpec(
        theta,
        cast(RopeKind, kind),
        factor,
        fields.optional("rope.scaling.original_context_length") or fields.integer("context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        mscale=None if log_multiplier is None else 1.0,
        mscale_all_dim=log_multiplier,
        freq_factors=factors,
    )
    own = fields.maybe_number("rope.scaling.yarn_attn_factor")
    if (
        kind == "yarn"
        and own is not None
        and not math.isclose(own, attention_scale(spec), rel_tol=1e-4)
    ):
        right = f"the factor that yarn gives by itself, {attention_scale(spec):.5f}, or absent"
        raise fields.wrong("rope.scaling.yarn_attn_factor", own, right)
    extra = fields.number("rope.scaling.attn_factor", 1.0)
    if extra == 1:
        return spec
    # ggml multiplies yarn's own factor by this one, but some converters store the whole factor.
    whole = 1.0 if family.gguf_whole_factor else attention_scale(spec)
    return replace(spec, attention_factor=extra * whole)


def _factor(fields: Fields) -> tuple[float, str]:
    """The factor of scaled positions, 1 (or 0) for none, and its key: files of autumn 2023 have
    only `rope.scale_linear`."""
    keys = [key for key in ("rope.scaling.factor", "rope.scale_linear") if fields.get(key)]
    values = {key: fields.number(key) for key in keys}
    if len(set(values.values())) > 1:
        both = " and ".join(f"{key} = {value}" for key, value in values.items())
        raise CheckpointError(f"{fields.source}: {both} contradict each other")
    return (values[keys[0]], keys[0]) if keys else (1.0, "rope.scaling.factor")


def _longrope(
    fields: Fields, plain: RopeSpec, tensors: Mapping[str, StoredTensor], pairs: int
) -> RopeSpec:
    original = fields.integer("rope.scaling.original_context_length")
    return replace(
        plain,
        kind="longrope",
        factor=fields.integer("context_length") / original,
        original_max_position=original,
        attention_factor=fields.maybe_number("rope.scaling.attn_factor"),
        long_factors=_divisors(fields, tensors, "rope_factors_long.weight", pairs),
        short_factors=_divisors(fields, tensors, "rope_factors_short.weight", pairs),
    )


def _divisors(
    fields: Fields, tensors: Mapping[str, StoredTensor], name: str, pairs: int
) -> tuple[float, ...]:
    """A tensor of frequency divisors, one for each rotated pair."""
    if name not in tensors:
        raise CheckpointError(f"{fields.source} lacks the tensor {name!r}")
    if tensors[name].shape != (pairs,):
        raise fields.wrong(name, tensors[name].shape, f"of shape ({pairs},)")
    values = torch.empty(pairs)
    read_into(tensors[name], values)
    return tuple(values.tolist())
