"""Dense products y = x W^T + b, as layers use them and as a device makes them.

How a weight is laid out, which GEMM serves it, and what keeps a row's bits independent of the
row count is the device's business (`kernels.cpu.linear`).
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from octavo.kernels.codes import Codes

# x [rows, in_features] -> [rows, out_features]
Product = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class GatedProduct(Protocol):
    """What a product may offer beside its call: the activation of a gated MLP in the same pass."""

    def gated(self, activation: str) -> Product | None:
        """x -> activation(gate) * up of a weight of gate over up; None if it has no such form.

        activation: "silu" or "gelu_tanh".
        """
        ...


class Products(Protocol):
    """Makes the products of one model on one device."""

    def make(
        self,
        weight: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        max_rows: int | None = None,
        method: str = "none",
    ) -> Product:
        """The product with `weight` [N, K] and `bias` [N]; `weight` need not be kept.

        max_rows: the most rows of a step, if fewer than the model's other products see.
        method: "none", or "int8" or "int4" for a product of quantized weights, if the device has
        it (`models.loader` asks first).
        """
        ...

    @property
    def unstable(self) -> list[str]:
        """The shapes, as "KxN", that are not batch-invariant."""
        ...

    def explain(self) -> str:
        """What serves the products, in words."""
        ...
