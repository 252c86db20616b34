"""The metadata keys that a GGUF file may have below its architecture's own name, family by family.

A key is read (by `models.gguf_config`), or known to change nothing that is computed here, or known
to change the arithmetic in a way that the family does not have: then only the value that means
"nothing" passes. Every other key is refused by name, since llama.cpp puts what a model computes
there, and a key that is passed over gives wrong answers without a word. Keys of `general.`,
`tokenizer.` and `split.` are not the model's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import CheckpointError, nearest, shown
from octavo.models.registry import Family

_READ = frozenset({
    "vocab_size", "context_length", "embedding_length", "feed_forward_length", "block_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.sliding_window", "attention.sliding_window_pattern",
    "attention.scale", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_attn_factor",
})  # fmt: skip
# finetuned: a remark. tensor_data_layout: "Meta AI original pth", in files of 2023, says what the
# row order of a family already implies. pooling_type: how an embedding model makes vectors of
# what is computed. The others only count beside keys that are refused unless they are neutral.
_INERT = frozenset({
    "rope.scaling.finetuned", "tensor_data_layout", "pooling_type", "attention.temperature_length",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm",
    "expert_weights_scale", "expert_gating_func", "interleave_moe_layer_step",
})  # fmt: skip
_NO = (0, None)
# Key -> the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": _NO,
    "attention.clamp_kqv": _NO,
    "attention.shared_kv_layers": _NO,
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": _NO,
    "attn_logit_softcapping": _NO,
    "final_logit_softcapping": _NO,
    "router_logit_softcapping": _NO,
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "expert_count": _NO,
    "expert_used_count": _NO,
    "expert_shared_count": _NO,
    "leading_dense_block_count": _NO,
    "nextn_predict_layers": _NO,
    "rope.scaling.alpha": _NO,
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.dimension_sections": ([0, 0, 0, 0], [0, 0, 0]),
}
# Key -> the key whose value it must repeat.
_REPEATED: Mapping[str, str] = {
    "rope.freq_base_swa": "rope.freq_base",
    "rope.dimension_count_swa": "rope.dimension_count",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "embedding_length_out": "embedding_length",
}
# What a family must declare for a key to be read.
_DECLARED: Mapping[str, Callable[[Family], bool]] = {
    "attn_logit_softcapping": lambda family: family.soft_caps,
    "final_logit_softcapping": lambda family: family.soft_caps,
    "logit_scale": lambda family: family.multipliers,
    "embedding_scale": lambda family: family.multipliers,
    "residual_scale": lambda family: family.multipliers,
    "attention.temperature_scale": lambda family: family.temperature,
    "rope.freq_base_swa": lambda family: family.rope == "by window",
    "attention.layer_norm_epsilon": lambda family: family.norm == "layer",
    "attention.layer_norm_rms_epsilon": lambda family: family.norm == "rms",
}


def check(source: str, family: Family, own: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the key, for one of `own` (the keys without the
    architecture's name) that is unknown, or that asks for what the family does not compute."""
    for key, value in own.items():
        if key in _READ or key in _INERT or (key in _DECLARED and _DECLARED[key](family)):
            continue
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                right = " or ".join(str(item) for item in _NEUTRAL[key] if item is not None)
                raise CheckpointError(
                    f"{source}: {key} is {shown(value)}, which is not supported for "
                    f"{family.name!r}; only {right} is"
                )
        elif key in _REPEATED:
            if value != own.get(_REPEATED[key]):
                raise CheckpointError(
                    f"{source}: {key} is {shown(value)}, which is not supported for "
                    f"{family.name!r} unless {_REPEATED[key]} is the same "
                    f"({shown(own.get(_REPEATED[key]))})"
                )
        elif key not in _DECLARED:  # epsilon of the other kind of norm is never used
            known = [*_READ, *_NEUTRAL, *_DECLARED]
            raise CheckpointError(
                f"{source}: the key {shown(key)} of {family.gguf or family.name!r} is not known"
                f"{nearest(key, known)}; it may change what the model computes, so the file is "
                "refused"
            )
