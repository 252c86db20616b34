"""Decoders whose MLPs are mixtures of experts: Mixtral, Qwen 3 MoE.

Attention, norms and all else are those of `models.decoder`. What is read of a config is in
`ModelSpec.extra`, by the names of either family.
"""

import re
from typing import ClassVar

import torch

from octavo.layers.experts import ExpertByExpert, ExpertProducts, ExpertSpec, Mixture, MixtureMLP
from octavo.layers.mlp import GatedMLP, Mlp
from octavo.models.decoder import Decoder
from octavo.models.fields import Fields
from octavo.models.sharding import REPLICATED, Cut, Span, column, row
from octavo.models.spec import ModelSpec
from octavo.quant import base as quant

# What transformers has called the number of experts, and Qwen 3 MoE's where a config is silent.
_COUNTS, _QWEN3_EXPERTS = ("num_experts", "num_local_experts"), 128
_PARTS = ("gate_proj", "up_proj", "down_proj")
# Mixtral's names in files.
_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL = re.compile(r"(.*\.)block_sparse_moe\.(?:gate\.|experts\.(\d+)\.(w[123])\.)(.*)")


def experts_of(spec: ModelSpec) -> ExpertSpec:
    """What the config says of experts. Raises CheckpointError."""
    fields = Fields("config.json", spec.extra)
    named = [name for name in _COUNTS if spec.extra.get(name) is not None]
    counts = [fields.integer(name, most=65536) for name in named] or [_QWEN3_EXPERTS]
    count = counts[0]
    if counts[-1] != count:
        raise fields.wrong(named[-1], counts[-1], f"{count}, as {named[0]} is")
    choices = fields.integer("num_experts_per_tok")
    if choices > count:
        raise fields.wrong("num_experts_per_tok", choices, f"at most {count}, as there are experts")
    inner = fields.optional("moe_intermediate_size") or spec.intermediate_size
    return ExpertSpec(count, choices, inner, fields.flag("norm_topk_prob", True))


def has_experts(spec: ModelSpec) -> list[bool]:
    """Per layer; the others have an MLP."""
    fields = Fields("config.json", spec.extra)
    dense, step = fields.items("mlp_only_layers", int), fields.optional("decoder_sparse_step") or 1
    return [i not in dense and (i + 1) % step == 0 for i in range(spec.num_layers)]


class MoeDecoder(Decoder):
    """See models.decoder.Decoder."""

    ROUTER: ClassVar[str] = "gate.weight"

    @classmethod
    def parameter_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """See Architecture.parameter_shapes."""
        experts, hidden = experts_of(spec), spec.hidden_size
        shapes = super().parameter_shapes(spec)
        for at in _places(spec):
            for part in _PARTS:
                del shapes[f"{at}{part}.weight"]
            shapes[at + cls.ROUTER] = (experts.count, hidden)
            for name in _weights(at, experts, "gate_proj", "up_proj"):
                shapes[name] = (experts.inner, hidden)
            for name in _weights(at, experts, "down_proj"):
                shapes[name] = (hidden, experts.inner)
        return shapes

    @classmethod
    def parameter_cuts(cls, spec: ModelSpec) -> dict[str, Cut]:
        """See Architecture.parameter_cuts: every rank has a part of every expert."""
        experts, cuts = experts_of(spec), super().parameter_cuts(spec)
        inner = Span(experts.inner, experts.inner, "moe_intermediate_size")
        for at in _places(spec):
            cuts[at + cls.ROUTER] = REPLICATED
            cuts |= dict.fromkeys(_weights(at, experts, "gate_proj", "up_proj"), column(inner))
            cuts |= dict.fromkeys(_weights(at, experts, "down_proj"), row(inner))
        return cuts

    @classmethod
    def components(cls, spec: ModelSpec) -> list[str]:
        """See Architecture.components."""
        places = tuple(at.removeprefix("model.") for at in _places(spec))
        return [
            re.sub(r"mlp\.", "mlp.experts.", name) if name.startswith(places) else name
            for name in super().components(spec)
        ]

    @classmethod
    def parameter_name(cls, spec: ModelSpec, stored: str) -> str | None:
        """See Architecture.parameter_name."""
        if found := _MIXTRAL.fullmatch(stored):
            at, number, part, ending = found.groups()
            return f"{at}mlp.experts.{number}.{_NAMES[part]}.{ending}" if number else (
                f"{at}mlp.gate.{ending}"
            )  # fmt: skip
        return super().parameter_name(spec, stored)

    def _mlp(self, number: int, at: str) -> Mlp:
        """The mixture of a layer, or its MLP."""
        if not has_experts(self.spec)[number]:
            return super()._mlp(number, at)
        router = self._products.make(self._parameters.take(at + self.ROUTER))
        combine = self._group.all_reduce if self._group.size > 1 else None
        return MixtureMLP(router, self._mixture(number, at), combine)

    def _mixture(self, number: int, at: str) -> Mixture:
        spec, activation = experts_of(self.spec), self.spec.layers[number].activation
        weights, methods = [], []
        for component, parts in (("gate_up_proj", _PARTS[:2]), ("down_proj", _PARTS[2:])):
            name = f"{at}experts.{component}".removeprefix("model.")
            names = _weights(at, spec, *parts)
            weight = self._parameters.matrix(self._quantization.method(name), *names)
            weights.append(weight)
            methods.append(self._quantization.method_of(name, weight))
        if isinstance(self._products, ExpertProducts):
            return self._products.make_experts(
                weights[0], weights[1], spec.count, spec.choices, spec.renormalize, activation,
                (methods[0], methods[1]),
            )  # fmt: skip
        make, mlps = self._products.make, []
        for expert in range(spec.count):
            products = [
                make(_one_of(weight, expert, spec.count), method=method)
                for weight, method in zip(weights, methods, strict=True)
            ]
            mlps.append(GatedMLP(self._ops, products[0], products[1], activation))
        return ExpertByExpert(mlps, spec)


def _places(spec: ModelSpec) -> list[str]:
    """What the names of parameters of layers with experts begin with."""
    return [f"model.layers.{i}.mlp." for i, has in enumerate(has_experts(spec)) if has]


def _weights(at: str, experts: ExpertSpec, *parts: str) -> list[str]:
    """The weights of all experts, those of one together."""
    return [f"{at}experts.{e}.{part}.weight" for e in range(experts.count) for part in parts]


def _one_of(
    weight: torch.Tensor | quant.Codes, number: int, count: int
) -> torch.Tensor | quant.Codes:
    """The matrix of one of `count` experts that lie one below the other."""
    if isinstance(weight, quant.Codes):
        each = len(weight.codes) // count
        return weight.map(lambda rows: rows[number * each : (number + 1) * each].contiguous())
    each = len(weight) // count
    return weight[number * each : (number + 1) * each].clone()
