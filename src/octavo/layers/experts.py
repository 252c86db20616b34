"""A mixture of experts in place of an MLP: a router's logits choose which experts a token passes.

Devices may compute all experts of a layer together (`ExpertProducts`); otherwise each expert is an
MLP of its own, which computes the rows that chose it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from octavo.kernels import reference
from octavo.kernels.codes import Codes
from octavo.layers.linear import Product
from octavo.layers.mlp import GatedMLP

# (x [T, H], router logits [T, experts]) -> [T, H]
Mixture = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """count: experts of a layer; choices: of a token; inner: size of an expert's inner rows;
    renormalize: whether the weights of a token's choices are made to add up to 1."""

    count: int
    choices: int
    inner: int
    renormalize: bool


@runtime_checkable
class ExpertProducts(Protocol):
    """Optional interface of `layers.linear.Products`: all experts of a layer as one."""

    def make_experts(
        self,
        gate_up: torch.Tensor | Codes,
        down: torch.Tensor | Codes,
        experts: int,
        choices: int,
        renormalize: bool,
        activation: str,
        methods: tuple[str, str],
    ) -> Mixture:
        """gate_up [experts * 2 inner, H], gates first in each expert; down [experts * H, inner].

        choices, renormalize: see `ExpertSpec`. methods: of the two weights, as in `Products.make`.
        Raises ConfigError for one that there is not for experts.
        """
        ...


class MixtureMLP:
    """router: H -> experts; combine: what the ranks of a model do with their parts of the sums."""

    __slots__ = ("_combine", "_mixture", "_router")

    def __init__(self, router: Product, mixture: Mixture, combine: Product | None = None) -> None:
        self._router, self._mixture, self._combine = router, mixture, combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        found = self._mixture(x, self._router(x))
        return found if self._combine is None else self._combine(found)


class ExpertByExpert:
    """A `Mixture` of MLPs, one after the other; a token's results are added in the order of its
    choices."""

    __slots__ = ("_experts", "_spec")

    def __init__(self, experts: Sequence[GatedMLP], spec: ExpertSpec) -> None:
        self._experts, self._spec = tuple(expert.forward for expert in experts), spec

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """See Mixture."""
        choices = self._spec.choices
        chosen, weights = reference.route(logits, choices, self._spec.renormalize)
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=self._spec.count).tolist()
        pairs = torch.split_with_sizes(torch.argsort(flat, stable=True), counts)
        each = x.new_empty((len(flat), x.shape[1]))
        for expert, of_expert in zip(self._experts, pairs, strict=True):
            if len(of_expert):
                each[of_expert] = expert(x[of_expert // choices])
        total = torch.zeros(x.shape, device=x.device)
        for choice, results in enumerate(each.view(len(x), choices, -1).unbind(1)):
            total += results.float() * weights[:, choice, None]
        return total.to(x.dtype)
