"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up as one product."""

import torch

from octavo.kernels.dispatch import Ops
from octavo.layers.linear import Product


class GatedMLP:
    """gate_up: H -> 2I, the gate's outputs first; down: I -> H."""

    __slots__ = ("_activate", "_down", "_gate_up")

    def __init__(self, ops: Ops, gate_up: Product, down: Product) -> None:
        self._gate_up = gate_up
        self._activate = ops.silu_and_mul
        self._down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self._down(self._activate(self._gate_up(x)))
