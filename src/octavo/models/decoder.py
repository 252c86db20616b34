"""The decoder that every family shares: embed, layers of attention and MLP, norm, head.

Nothing here is a `torch.nn.Module`: a step of one token passes 30 layers, and each call that
is not a product costs as much as a small one. What a layer needs is bound when it is built.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from octavo.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from octavo.dist.base import SINGLE, Group
from octavo.kernels.codes import StoredMatrix, round_to_codes
from octavo.kernels.dispatch import Ops
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding, StoredEmbedding
from octavo.layers.linear import Product, Products, StoredProducts, Table
from octavo.layers.mlp import GatedMLP, Mlp
from octavo.layers.norm import DividedRowNorms, HeadNorm, LayerNorm, NormSpec, RMSNorm, RowNorm
from octavo.layers.rope import QueryTemperature, RopeSpec, cos_sin_table, query_cos_sin_table
from octavo.log import get_logger
from octavo.models.architecture import GgufTensor, Parameters
from octavo.models.registry import Placement
from octavo.models.sharding import (
    FIRST,
    REPLICATED,
    Cut,
    Shard,
    Span,
    column,
    local_attention,
    row,
    vocabulary,
)
from octavo.models.spec import LayerSpec, ModelSpec
from octavo.quant import base as quant

logger = get_logger(__name__)

Norm = RMSNorm | LayerNorm

_FINAL_NORM = "model.norm.weight"
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# The norms of a layer in the order of use, by GGUF name.
_NORMS: Mapping[Placement, dict[str, str]] = {
    "pre": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "post": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "sandwich": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GGUF_APART = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
_GGUF_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GGUF_OTHERS = {"attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
# Derived values that old checkpoints carry; computed by `layers.rope`.
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")


class _Layer(Protocol):
    """x and residual [T, H] -> the same of the next layer; their sum is the hidden state.

    residual: None before the first layer, whose x is the hidden state; updated in place.
    """

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama."""

    __slots__ = ("_attention", "_input_norm", "_mlp", "_post_norm")

    def __init__(self, norms: Sequence[Norm], attention: Attention, mlp: Mlp) -> None:
        self._input_norm, self._post_norm = (norm.forward for norm in norms)
        self._attention, self._mlp = attention.forward, mlp.forward

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See _Layer."""
        x, residual = self._input_norm(x, residual)
        x, residual = self._post_norm(self._attention(x, meta, cache), residual)
        return self._mlp(x), residual


class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): Gemma 2 and 3."""

    __slots__ = ("_attention", "_mlp", "_norms")

    def __init__(self, norms: Sequence[Norm], attention: Attention, mlp: Mlp) -> None:
        self._norms = tuple(norm.forward for norm in norms)
        self._attention, self._mlp = attention.forward, mlp.forward

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See _Layer."""
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        x, residual = before_attention(x, residual)
        x = after_attention(self._attention(x, meta, cache), None)[0]
        x, residual = before_mlp(x, residual)
        return after_mlp(self._mlp(x), None)[0], residual


class PostNormLayer:
    """x + norm(attention(x)), then x + norm(mlp(x)): OLMo 2 and 3."""

    __slots__ = ("_add", "_after_attention", "_after_mlp", "_attention", "_mlp", "_scale")

    def __init__(
        self,
        norms: Sequence[Norm],
        attention: Attention,
        mlp: Mlp,
        add: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        scale: float,
    ) -> None:
        self._after_attention, self._after_mlp = (norm.forward for norm in norms)
        self._attention, self._mlp = attention.forward, mlp.forward
        self._add, self._scale = add, scale

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See _Layer."""
        hidden = x if residual is None else self._add(x, residual, self._scale)
        x = self._after_attention(self._attention(hidden, meta, cache), None)[0]
        hidden = self._add(x, hidden, self._scale)
        return self._after_mlp(self._mlp(hidden), None)[0], hidden


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
        shapes: dict[str, tuple[int, ...]] = {cls.EMBEDDING: (spec.vocab_size, hidden)}
        shapes |= _norm_shapes(spec.final_norm, {_FINAL_NORM.removesuffix(".weight"): hidden})
        if not spec.tie_embeddings:
            shapes[cls.HEAD] = (spec.vocab_size, hidden)
        for number, layer in enumerate(spec.layers):
            at = f"model.layers.{number}."
            shapes |= {at + name: shape for name, shape in _layer_shapes(spec, layer).items()}
        return shapes

    @classmethod
    def parameter_cuts(cls, spec: ModelSpec) -> dict[str, Cut]:
        """See Architecture.parameter_cuts. The embedding is replicated, also where it is the
        head: a rank then uses its share of the rows as head."""
        cuts = dict.fromkeys(cls.parameter_shapes(spec), REPLICATED)
        if not spec.tie_embeddings:
            cuts[cls.HEAD] = vocabulary(spec.num_ids, spec.vocab_size)
        for number, layer in enumerate(spec.layers):
            at = f"model.layers.{number}."
            cuts |= {at + name: cut for name, cut in _layer_cuts(spec, layer).items()}
        names = cls.parameter_shapes(spec).keys()
        return {name: cut for name, cut in cuts.items() if name in names}

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
        return [layer.attention for layer in spec.layers]

    @classmethod
    def parameter_name(cls, spec: ModelSpec, stored: str) -> str | None:
        """See Architecture.parameter_name."""
        if _DERIVED.fullmatch(stored):
            return None
        if spec.wrapper is None:
            return stored
        if stored.startswith(spec.wrapper.ignored):
            return None
        for prefix, name in spec.wrapper.prefixes.items():
            if stored.startswith(prefix):
                return name + stored.removeprefix(prefix)
        return stored

    @classmethod
    def gguf_tensors(cls, spec: ModelSpec) -> Mapping[str, GgufTensor]:
        """See Architecture.gguf_tensors."""
        table = {
            "token_embd.weight": GgufTensor(cls.EMBEDDING),
            "output_norm.weight": GgufTensor(_FINAL_NORM, shift=-spec.final_norm.offset),
            "output.weight": GgufTensor(cls.HEAD),
        }
        for number, layer in enumerate(spec.layers):
            at, name = f"blk.{number}.", f"model.layers.{number}."
            products = _GGUF_OTHERS | (_GGUF_FUSED if spec.family.fused else _GGUF_APART)
            heads = {"attn_q": layer.attention.num_heads, "attn_k": layer.attention.num_kv_heads}
            for stored, part in products.items():
                order = heads.get(stored, 0) if spec.family.gguf_permuted else 0
                for kind in ("weight", "bias"):
                    table[f"{at}{stored}.{kind}"] = GgufTensor(f"{name}{part}.{kind}", order)
            for stored, part in (_NORMS[layer.placement] | _QK_NORMS).items():
                for kind, shift in (("weight", -layer.norm.offset), ("bias", 0.0)):
                    table[f"{at}{stored}.{kind}"] = GgufTensor(f"{name}{part}.{kind}", shift=shift)
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
        quantization: quant.QuantConfig,
        group: Group = SINGLE,
    ) -> None:
        """Build from `parameters`, one module at a time.

        window: the longest sequence; head_rows: the most rows that one step draws from;
        quantization: which products are computed on integers; group: the ranks that compute the
        model together, of which `parameters` gives this one's part.
        """
        self.spec = spec
        self.backend = backend
        self._ops, self._products, self._parameters = ops, products, parameters
        self._quantization = quantization
        self._group = group
        self._cuts = self.parameter_cuts(spec) if group.size > 1 else {}
        embed = self._make_embedding()
        self._tables: dict[tuple[RopeSpec | None, QueryTemperature | None], torch.Tensor] = {}
        self._window = window
        self._device = embed.device if isinstance(embed, torch.Tensor) else torch.device("cpu")
        self.attention_specs = local_attention(self.describe_attention(spec), group.size)
        self._layers = [self._layer(number).forward for number in range(spec.num_layers)]
        last = spec.layers[-1].residual_scale
        self._norm = self._make_norm(_FINAL_NORM, spec.final_norm, last).forward
        self._head = self._make_head(embed, head_rows)
        del self._parameters

    def forward(
        self,
        token_ids: torch.Tensor,
        metas: Sequence[AttentionMetadata],
        caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """int64 [T] -> hidden states [T, H] after the final norm.

        metas, caches: one per layer; layers of one KV group have the same metadata.
        """
        return self.layers(self.embed(token_ids), metas, caches)

    def layers(
        self, x: torch.Tensor, metas: Sequence[AttentionMetadata], caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """From embedded tokens [T, H], which are overwritten, to what `forward` gives."""
        residual = None
        for layer, meta, cache in zip(self._layers, metas, caches, strict=True):
            x, residual = layer(x, residual, meta, cache)
        return self._norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, spec.num_ids], in the model's dtype."""
        logits, cap = self._head(hidden), self.spec.logit_soft_cap
        if self.spec.logit_divisor != 1.0:
            logits = logits.div_(self.spec.logit_divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def explain(self) -> dict[str, str]:
        """For each op, what serves it and why."""
        return {"linear": self._products.explain(), **self._ops.explain()}

    def _make_embedding(self) -> torch.Tensor | Table:
        """The table that `embed` looks up in: values, or rows as they are stored."""
        spec, quantization = self.spec, self._quantization
        method = quantization.method(quant.HEAD) if spec.tie_embeddings else quantization.default
        rows = self._stored(method, self.EMBEDDING)
        if rows is None:
            weight = self._parameters.matrix(quant.NONE, self.EMBEDDING)
            assert isinstance(weight, torch.Tensor), "an embedding has no quantized parts"
            self.embed = Embedding(weight, spec.embedding_scale, self._parameters.dtype).forward
            return weight
        table, dtype = self._on_stored.table(rows), self._parameters.dtype
        self.embed = StoredEmbedding(table, spec.hidden_size, dtype, spec.embedding_scale).forward
        return table

    def _stored(self, method: str, *names: str) -> StoredMatrix | None:
        """Rows as they are stored, if `method` computes on them."""
        return self._parameters.stored(*names) if method == quant.STORED else None

    @property
    def _on_stored(self) -> StoredProducts:
        products = self._products
        assert isinstance(products, StoredProducts), "the device says that it computes on blocks"
        return products

    def _make_head(self, embed: torch.Tensor | Table, most_rows: int) -> Product:
        """From hidden states [R, H] to logits [R, num_ids].

        embed: the head of a tied model. most_rows: of one step.
        """
        spec, method = self.spec, self._quantization.method(quant.HEAD)
        if not spec.tie_embeddings:
            if (rows := self._stored(method, self.HEAD)) is not None:
                return self._stored_head(rows)
            head = self._parameters.matrix(method, self.HEAD)
        elif isinstance(embed, torch.Tensor):
            head = embed
        else:
            return self._head_of_table(embed)
        method = self._quantization.method_of(quant.HEAD, head)
        if self._group.size > 1:
            return self._divided_head(head, most_rows, method)
        if spec.num_ids < spec.vocab_size:
            head = _rows_of(head, lambda rows: rows[: spec.num_ids])
        return self._products.make(head, None, most_rows, method)

    def _stored_head(self, head: StoredMatrix) -> Product:
        """Of rows as they are stored: all, of which those of ids are used, or this rank's share."""
        spec, group = self.spec, self._group
        if group.size == 1:
            return self._on_stored.make_stored(head.rows(0, spec.num_ids))
        share = vocabulary(spec.num_ids, spec.vocab_size).share(group.size)
        return self._gathered(self._on_stored.make_stored(head), share - head.shape[0])

    def _head_of_table(self, table: Table) -> Product:
        """The head that is tied to stored rows: of all ids, or this rank's share of them."""
        ids, group = self.spec.num_ids, self._group
        if group.size == 1:
            return table.product(0, ids)
        cut = vocabulary(ids, self.spec.vocab_size)
        begin, end = cut.parts(Shard.of(group))[0]
        return self._gathered(table.product(begin, end), cut.share(group.size) - (end - begin))

    def _gathered(self, product: Product, padding: int = 0) -> Product:
        """All logits, of each rank's share of them and so many columns of padding."""
        ids, group = self.spec.num_ids, self._group

        def share(hidden: torch.Tensor) -> torch.Tensor:
            logits = product(hidden)
            return F.pad(logits, (0, padding)) if padding else logits

        return lambda hidden: group.all_gather(share(hidden))[:, :ids].contiguous()

    def _divided_head(
        self, head: torch.Tensor | quant.Codes, most_rows: int, method: str
    ) -> Product:
        """Each rank computes an equal share of the logits, of which the last may be padding.

        head: this rank's rows; all of them of a tied model.
        """
        ids, group = self.spec.num_ids, self._group
        cut = vocabulary(ids, self.spec.vocab_size)
        begin, end = cut.parts(Shard.of(group))[0]
        if self.spec.tie_embeddings:
            head = _rows_of(head, lambda rows: rows[begin:end])
        padding = (0, 0, 0, cut.share(group.size) - (end - begin))
        head = _rows_of(head, lambda rows: F.pad(rows, padding))
        return self._gathered(self._products.make(head, None, most_rows, method))

    def _make_norm(self, name: str, spec: NormSpec, scale: float = 1.0) -> Norm:
        """scale: of what the norm adds to the residual."""
        weight = self._norm_weight(name, spec)
        if spec.kind == "rms":
            return RMSNorm(self._ops, weight, spec, scale)
        take = self._parameters.take
        bias = take(name.removesuffix("weight") + "bias") if spec.bias else None
        return LayerNorm(self._ops, weight, bias, spec.eps, scale)

    def _norm_weight(self, name: str, spec: NormSpec) -> torch.Tensor:
        if not spec.offset:
            return self._parameters.take(name)
        return self._parameters.take(name, dtype=torch.float32).add_(spec.offset)

    def _layer(self, number: int) -> _Layer:
        layer, at = self.spec.layers[number], f"model.layers.{number}."
        norms = [
            self._make_norm(f"{at}{name}.weight", layer.norm, layer.residual_scale)
            for name in _NORMS[layer.placement].values()
        ]
        attention = self._attention(number, f"{at}self_attn.")
        mlp = self._mlp(number, f"{at}mlp.")
        if layer.placement == "post":
            return PostNormLayer(norms, attention, mlp, self._ops.add, layer.residual_scale)
        if layer.placement == "sandwich":
            return SandwichLayer(norms, attention, mlp)
        return PreNormLayer(norms, attention, mlp)

    def _mlp(self, number: int, at: str) -> Mlp:
        """Of a layer; a class of a family with another one has its own."""
        activation = self.spec.layers[number].activation
        return GatedMLP(
            self._ops,
            self._product(at, "gate_up_proj", self.spec.mlp_bias, activation),
            self._product(at, "down_proj", self.spec.mlp_bias),
            activation,
        )

    def _attention(self, number: int, at: str) -> Attention:
        layer = self.spec.layers[number]
        q_norm, k_norm, row_norms = self._qk_norms(layer, at)
        temperature = layer.query_temperature
        return Attention(
            self._ops,
            self.backend,
            self.attention_specs[number],
            self._product(at, "qkv_proj", self.spec.qkv_bias),
            self._product(at, "o_proj", self.spec.output_bias),
            None if layer.rope is None else self._table(layer, None),
            q_norm,
            k_norm,
            None if temperature is None else self._table(layer, temperature),
            row_norms=row_norms,
        )

    def _qk_norms(
        self, layer: LayerSpec, at: str
    ) -> tuple[HeadNorm | RowNorm | None, HeadNorm | RowNorm | None, DividedRowNorms | None]:
        """Of queries, of keys, or of both."""
        if layer.qk_norm == "none":
            return None, None, None
        query, key = (
            self._norm_weight(f"{at}{name}.weight", layer.norm) for name in ("q_norm", "k_norm")
        )
        if layer.qk_norm == "row" and self._group.size > 1:
            return None, None, DividedRowNorms(self._ops, self._group, query, key, layer.norm)
        kind = HeadNorm if layer.qk_norm == "head" else RowNorm
        return kind(self._ops, query, layer.norm), kind(self._ops, key, layer.norm), None

    def _table(self, layer: LayerSpec, temperature: QueryTemperature | None) -> torch.Tensor:
        """The rotary table of a layer, shared by all layers whose rotary embedding is the same."""
        rope, key = layer.rope, (layer.rope, temperature)
        if key not in self._tables:
            size = layer.attention.head_dim
            if temperature is not None:
                table = query_cos_sin_table(rope, temperature, size, self._window)
            else:
                assert rope is not None
                _log_departure(rope, self._window)
                table = cos_sin_table(rope, size, self._window)
            self._tables[key] = table.to(self._device)
        return self._tables[key]

    def _product(self, at: str, name: str, has_bias: bool, gate: str = "") -> Product:
        """The product `name` of a part of a layer; the weights that it joins are stacked.

        gate: the activation of a gate, which is the first half of its outputs.
        """
        parts = (name,) if self.spec.family.fused else _JOINED.get(name, (name,))
        names = [f"{at}{part}.weight" for part in parts]
        component = f"{at}{name}".removeprefix("model.")
        method, group = self._quantization.method(component), self._group
        rows = self._stored(method, *names)
        weight = self._parameters.matrix(method, *names) if rows is None else None
        bias = None
        is_sum = group.size > 1 and self._cuts[names[0]].kind == "row"
        if has_bias and not (is_sum and group.rank > 0):
            bias = self._parameters.take(*(f"{at}{part}.bias" for part in parts))
        if weight is None:
            assert rows is not None
            product = self._on_stored.make_stored(rows, bias, "" if is_sum else gate)
            return self._summed(product) if is_sum else product
        method = self._quantization.method_of(component, weight)
        if is_sum:
            return self._sum_of_products(weight, bias, method)
        return self._products.make(weight, bias, method=method)

    def _sum_of_products(
        self, weight: torch.Tensor | quant.Codes, bias: torch.Tensor | None, method: str
    ) -> Product:
        """The product with a weight of which this rank has some of the inputs."""
        group = self._group
        if method == quant.NONE:
            product = self._products.make(weight, bias)
        else:
            if method in (quant.INT4, quant.W4A8) and isinstance(weight, torch.Tensor):
                weight = round_to_codes(weight)
            own = weight.values() if isinstance(weight, quant.Codes) else weight
            largest = group.all_gather(own.abs().amax(1, keepdim=True).float()).amax(1)
            del own
            product = self._products.make(weight, bias, method=method, largest=largest)
        return self._summed(product)

    def _summed(self, product: Product) -> Product:
        """The sum over all ranks, each of which has some of the inputs."""
        group = self._group
        return lambda x: group.all_reduce(product(x))


def _log_departure(rope: RopeSpec, longest: int) -> None:
    """Say what all positions have, since transformers chooses by sequence."""
    if rope.kind == "dynamic" and longest > rope.original_max_position:
        logger.warning(
            "dynamic rope: all positions are scaled for max_model_len=%d, also in sequences within "
            "the trained length of %d, whose answers differ from the model's own; leave "
            "max_model_len at %d unless longer sequences are needed",
            longest, rope.original_max_position, rope.original_max_position,
        )  # fmt: skip
    if rope.kind == "longrope":
        logger.info(
            "LongRoPE: %s factors at all positions, as sequences may have %d tokens and the "
            "original length is %d; max_model_len chooses",
            "long" if longest > rope.original_max_position else "short",
            longest,
            rope.original_max_position,
        )


def _layer_shapes(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer, without its prefix."""
    hidden, inner, attention = spec.hidden_size, spec.intermediate_size, layer.attention
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    apart = (
        ("self_attn.q_proj", queries, hidden, spec.qkv_bias),
        ("self_attn.k_proj", keys, hidden, spec.qkv_bias),
        ("self_attn.v_proj", keys, hidden, spec.qkv_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
    )
    fused = (
        ("self_attn.qkv_proj", queries + 2 * keys, hidden, spec.qkv_bias),
        ("mlp.gate_up_proj", 2 * inner, hidden, spec.mlp_bias),
    )
    others = (
        ("self_attn.o_proj", hidden, queries, spec.output_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
    shapes = _norm_shapes(layer.norm, dict.fromkeys(_NORMS[layer.placement].values(), hidden))
    if layer.qk_norm != "none":
        head, row = layer.qk_norm == "head", (queries, keys)
        for name, size in zip(_QK_NORMS.values(), row, strict=True):
            shapes[f"{name}.weight"] = (attention.head_dim if head else size,)
    for name, rows, columns, has_bias in (*(fused if spec.family.fused else apart), *others):
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _layer_cuts(spec: ModelSpec, layer: LayerSpec) -> dict[str, Cut]:
    """How the parameters of one layer are divided, without its prefix; more than it may have."""
    attention = layer.attention
    size, kv_heads = attention.head_dim, attention.num_kv_heads
    queries = Span(attention.num_heads * size, attention.num_heads, "num_attention_heads")
    keys = Span(kv_heads * size, kv_heads, "num_key_value_heads", shared=True)
    inner = Span(spec.intermediate_size, spec.intermediate_size, "intermediate_size")
    cuts = {
        f"{name}.{kind}": column(*spans)
        for name, spans in (
            ("self_attn.q_proj", (queries,)),
            ("self_attn.k_proj", (keys,)),
            ("self_attn.v_proj", (keys,)),
            ("self_attn.qkv_proj", (queries, keys, keys)),
            ("mlp.gate_proj", (inner,)),
            ("mlp.up_proj", (inner,)),
            ("mlp.gate_up_proj", (inner, inner)),
        )
        for kind in ("weight", "bias")
    }
    cuts |= {"self_attn.o_proj.weight": row(queries), "self_attn.o_proj.bias": FIRST}
    cuts |= {"mlp.down_proj.weight": row(inner), "mlp.down_proj.bias": FIRST}
    if layer.qk_norm == "row":
        cuts |= {"self_attn.q_norm.weight": column(queries)}
        cuts |= {"self_attn.k_norm.weight": column(keys)}
    return cuts


def _rows_of(
    weight: torch.Tensor | quant.Codes, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | quant.Codes:
    return weight.map(change) if isinstance(weight, quant.Codes) else change(weight)


def _norm_shapes(norm: NormSpec, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if norm.bias else ("weight",)
    return {f"{name}.{kind}": (size,) for name, size in sizes.items() for kind in kinds}
