"""Interfaces of dense products y = x W^T + b, which layers use and a device creates.

The layout of a weight, the choice of a GEMM, and batch invariance are up to the device
(`kernels.cpu.linear`).
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from octavo.kernels.codes import Codes, StoredMatrix

# x [rows, in_features] -> [rows, out_features]
Product = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class GatedProduct(Protocol):
    """Optional interface of a product: fuse the activation of a gated MLP."""

    def gated(self, activation: str) -> Product | None:
        """x -> activation(gate) * up of a weight of gate over up; None if it has no such form.

        activation: "silu" or "gelu_tanh".
        """
        ...


class Products(Protocol):
    """Creates the products of one model on one device."""

    def make(
        self,
        weight: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        max_rows: int | None = None,
        method: str = "none",
        largest: torch.Tensor | None = None,
    ) -> Product:
        """The product with `weight` [N, K] and `bias` [N]; `weight` may be released.

        max_rows: the most rows of a step, if fewer than for the model's other products.
        method: "none", or "int8" or "int4" for a product of quantized weights, if the device
        supports it (`models.loader` checks first). largest: float32 [N], given where `weight` is
        some of the inputs of a whole that is divided among ranks: the largest magnitude of each
        output of the whole, which scales are derived from, so that values are rounded as there.
        """
        ...

    @property
    def unstable(self) -> list[str]:
        """The shapes, as "KxN", that are not batch-invariant."""
        ...

    def explain(self) -> str:
        """The implementation of the products, in words."""
        ...


class Table(Protocol):
    """The rows of token embeddings as they are stored, and products with some of them."""

    def rows(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The rows of `ids` (int64 [T]), dequantized and rounded, in `out` [T, K]."""
        ...

    def product(self, begin: int, end: int) -> Product:
        """x -> x W^T with rows begin .. end - 1; begin is a multiple of 32."""
        ...


@runtime_checkable
class StoredProducts(Protocol):
    """Optional interface of `Products` that compute on rows as a file stores them."""

    def make_stored(
        self, weight: StoredMatrix, bias: torch.Tensor | None = None, gate: str = ""
    ) -> Product:
        """As `Products.make`. gate: of a weight of gate over up, the activation that
        `GatedProduct.gated` will be asked for: the product may have no other form."""
        ...

    def table(self, weight: StoredMatrix) -> Table:
        """Of rows of one block type."""
        ...
