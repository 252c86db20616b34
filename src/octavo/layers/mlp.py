"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up as one product."""

import torch

from octavo.kernels.dispatch import Ops
from octavo.layers.linear import GatedProduct, Product


class GatedMLP:
    """gate_up: H -> 2I, the gate's outputs first; down: I -> H."""

    __slots__ = ("_down", "_gate")

    def __init__(self, ops: Ops, gate_up: Product, down: Product) -> None:
        fused = gate_up.gated() if isinstance(gate_up, GatedProduct) else None
        self._gate: Product = fused or (lambda x: ops.silu_and_mul(gate_up(x)))
        self._down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self._down(self._gate(x))
