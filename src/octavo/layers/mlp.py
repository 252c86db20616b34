"""The gated MLP: down(activation(gate(x)) * up(x)), gate and up as one product."""

from typing import Literal, Protocol

import torch

from octavo.kernels.dispatch import Ops
from octavo.layers.linear import GatedProduct, Product

Activation = Literal["silu", "gelu_tanh"]


class Mlp(Protocol):
    """What stands behind attention in a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        ...


class GatedMLP:
    """gate_up: H -> 2I, the gate's outputs first; down: I -> H."""

    __slots__ = ("_down", "_gate")

    def __init__(
        self, ops: Ops, gate_up: Product, down: Product, activation: Activation = "silu"
    ) -> None:
        activate = ops.silu_and_mul if activation == "silu" else ops.gelu_and_mul
        fused = gate_up.gated(activation) if isinstance(gate_up, GatedProduct) else None
        self._gate: Product = fused or (lambda x: activate(gate_up(x)))
        self._down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self._down(self._gate(x))
