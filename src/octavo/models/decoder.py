"""The decoder that every family shares: embed, layers of attention and MLP, norm, head.

Nothing here is a `torch.nn.Module`: a step of one token passes 30 layers, and each call that
is not a product costs as much as a small one. What a layer needs is bound when it is built.
"""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from octavo.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from octavo.kernels.dispatch import Ops
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Product, Products
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import HeadNorm, RMSNorm
from octavo.layers.rope import cos_sin_table
from octavo.models.architecture import GgufTensor, Parameters
from octavo.models.spec import ModelSpec
from octavo.quant import base as quant

_FINAL_NORM = "model.norm.weight"
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_GGUF_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Derived values that old checkpoints carry; computed by `layers.rope`.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums live in `residual`."""

    __slots__ = ("_attention", "_input_norm", "_mlp", "_post_norm")

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP
    ) -> None:
        self._input_norm, self._attention = input_norm.forward, attention.forward
        self._post_norm, self._mlp = post_norm.forward, mlp.forward

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._input_norm(x, residual)
        x, residual = self._post_norm(self._attention(x, meta, cache), residual)
        return self._mlp(x), residual


class Decoder:
    """A loaded model; its class methods are `models.architecture.Architecture`.

    attention_specs: one per layer; `backend` owns the caches' layout.
    """

    EMBEDDING: ClassVar[str] = "model.embed_tokens.weight"
    HEAD: ClassVar[str] = "lm_head.weight"

    @classmethod
    def parameter_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """See Architecture.parameter_shapes."""
        hidden = spec.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            cls.EMBEDDING: (spec.vocab_size, hidden),
            _FINAL_NORM: (hidden,),
        }
        if not spec.tie_embeddings:
            shapes[cls.HEAD] = (spec.vocab_size, hidden)
        for layer in range(spec.num_layers):
            at = f"model.layers.{layer}."
            shapes |= {at + name: shape for name, shape in _layer_shapes(spec).items()}
        return shapes

    @classmethod
    def product_weights(cls, spec: ModelSpec) -> frozenset[str]:
        """See Architecture.product_weights."""
        shapes = cls.parameter_shapes(spec).items()
        return frozenset(n for n, shape in shapes if len(shape) == 2 and n != cls.EMBEDDING)

    @classmethod
    def components(cls, spec: ModelSpec) -> list[str]:
        """See Architecture.components."""
        parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        layers = [f"layers.{number}.{part}" for number in range(spec.num_layers) for part in parts]
        return [*layers, quant.HEAD]

    @classmethod
    def describe_attention(cls, spec: ModelSpec) -> list[AttentionSpec]:
        """See Architecture.describe_attention."""
        heads, scale = (spec.num_heads, spec.num_kv_heads, spec.head_dim), spec.head_dim**-0.5
        return [AttentionSpec(*heads, scale, window) for window in spec.windows]

    @classmethod
    def parameter_name(cls, spec: ModelSpec, stored: str) -> str | None:
        """See Architecture.parameter_name."""
        return None if _DERIVED.fullmatch(stored) else stored

    @classmethod
    def gguf_tensors(cls, spec: ModelSpec) -> Mapping[str, GgufTensor]:
        """See Architecture.gguf_tensors."""
        table = {
            "token_embd.weight": GgufTensor(cls.EMBEDDING),
            "output_norm.weight": GgufTensor(_FINAL_NORM),
            "output.weight": GgufTensor(cls.HEAD),
        }
        permuted = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
        heads = permuted if spec.family.gguf_permuted else {}
        for layer in range(spec.num_layers):
            for stored, name in _GGUF_INNER.items():
                for kind in ("weight", "bias"):
                    table[f"blk.{layer}.{stored}.{kind}"] = GgufTensor(
                        f"model.layers.{layer}.{name}.{kind}", heads.get(stored, 0)
                    )
        return table

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        *,
        ops: Ops,
        products: Products,
        backend: AttentionBackend,
        window: int,
        head_rows: int,
        recipe: quant.Recipe,
    ) -> None:
        """Build from `parameters`, one module at a time.

        window: the longest sequence; head_rows: the most rows that one step draws from; recipe:
        which products are made of integers.
        """
        self.spec = spec
        self.backend = backend
        self._ops, self._products, self._parameters = ops, products, parameters
        self._recipe = recipe
        embed = parameters.take(self.EMBEDDING)
        self.embed = Embedding(embed).forward
        self._cos_sin = cos_sin_table(spec.rope, spec.head_dim, window).to(embed.device)
        self.attention_specs = self.describe_attention(spec)
        self._layers = [self._layer(number).forward for number in range(spec.num_layers)]
        self._norm = self._rms_norm(_FINAL_NORM).forward
        method = recipe.method(quant.HEAD)
        head = embed if spec.tie_embeddings else parameters.matrix(method, self.HEAD)
        self._head = products.make(head, None, head_rows, method)
        del self._parameters

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """int64 [T] -> hidden states [T, H] after the final norm; caches: one per layer."""
        return self.layers(self.embed(token_ids), meta, caches)

    def layers(
        self, x: torch.Tensor, meta: AttentionMetadata, caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """From embedded tokens [T, H], which are overwritten, to what `forward` gives."""
        residual = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, meta, cache)
        return self._norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, vocabulary], in the model's dtype."""
        return self._head(hidden)

    def explain(self) -> dict[str, str]:
        """For each op, what serves it and why."""
        return {"linear": self._products.explain(), **self._ops.explain()}

    def _rms_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._ops, self._parameters.take(name), self.spec.rms_eps)

    def _layer(self, number: int) -> DecoderLayer:
        spec, at, take = self.spec, f"model.layers.{number}.", self._parameters.take
        norms: list[HeadNorm | None] = [None, None]
        if spec.qk_norm:
            names = (f"{at}self_attn.q_norm.weight", f"{at}self_attn.k_norm.weight")
            norms = [HeadNorm(self._ops, take(name), spec.rms_eps) for name in names]
        attention = Attention(
            self._ops,
            self.backend,
            self.attention_specs[number],
            self._product(at + "self_attn.", "qkv_proj", spec.qkv_bias),
            self._product(at + "self_attn.", "o_proj", spec.output_bias),
            self._cos_sin,
            *norms,
        )
        mlp = GatedMLP(
            self._ops,
            self._product(at + "mlp.", "gate_up_proj", spec.mlp_bias),
            self._product(at + "mlp.", "down_proj", spec.mlp_bias),
        )
        return DecoderLayer(
            self._rms_norm(at + "input_layernorm.weight"),
            attention,
            self._rms_norm(at + "post_attention_layernorm.weight"),
            mlp,
        )

    def _product(self, at: str, name: str, has_bias: bool) -> Product:
        """The product `name` of a part of a layer; the weights that it joins are stacked."""
        names = _JOINED.get(name, (name,))
        method = self._recipe.method(f"{at}{name}".removeprefix("model."))
        weight = self._parameters.matrix(method, *(f"{at}{part}.weight" for part in names))
        bias = None
        if has_bias:
            bias = self._parameters.take(*(f"{at}{part}.bias" for part in names))
        return self._products.make(weight, bias, method=method)


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer, without its prefix."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    products = (
        ("self_attn.q_proj", queries, hidden, spec.qkv_bias),
        ("self_attn.k_proj", keys, hidden, spec.qkv_bias),
        ("self_attn.v_proj", keys, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, queries, spec.output_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if spec.qk_norm:
        norms += [("self_attn.q_norm", spec.head_dim), ("self_attn.k_norm", spec.head_dim)]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms}
    for name, rows, columns, has_bias in products:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
