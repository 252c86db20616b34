"""The frozen description of a model: its sizes and, layer by layer, what is computed.

`models.config` makes it of a Hugging Face config, `models.gguf_config` of a GGUF file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.attention.base import AttentionSpec
from octavo.layers.mlp import Activation
from octavo.layers.norm import NormSpec
from octavo.layers.rope import QueryTemperature, RopeSpec
from octavo.models.registry import Family, Placement, QKNorm, Wrapper
from octavo.quant.base import CheckpointQuantization


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer computes.

    rope: None: no rotary embedding. placement: where norms stand around attention and MLP.
    residual_scale: factor of what attention and MLP add to the residual.
    """

    attention: AttentionSpec
    rope: RopeSpec | None
    norm: NormSpec
    placement: Placement = "pre"
    qk_norm: QKNorm = "none"
    activation: Activation = "silu"
    query_temperature: QueryTemperature | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model is. Sizes in values, lengths in tokens.

    vocab_size: rows of the token table; num_tokens: ids below this are what tokens stand for, the
    rows beyond them (padding) are never drawn; None: all.
    max_position: the model's window. final_norm: the one before the head. embedding_scale: factor
    of token embeddings. logit_divisor, logit_soft_cap: logits are divided by the first, then
    c tanh(logits / c). eos_token_ids: every id that ends a text. generation_defaults: sampling
    fields of `SamplingParams` that the checkpoint recommends.
    """

    family: Family
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # `Family.extra_fields`, unchecked
    wrapper: Wrapper | None = None  # where the model is the text part of another
    quantization: CheckpointQuantization | None = None  # how the checkpoint stores products
    num_tokens: int | None = None

    @property
    def num_ids(self) -> int:
        """The ids that exist, and columns of the logits."""
        return self.vocab_size if self.num_tokens is None else self.num_tokens

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest(self) -> int:
        """The most tokens that `max_model_len` may ask for: scaling reaches past the window."""
        scaled = [
            int(min(layer.rope.original_max_position * layer.rope.factor, 2**53))
            for layer in self.layers
            if layer.rope is not None and layer.rope.kind in ("dynamic", "yarn", "linear")
        ]
        return max([self.max_position, *scaled])
