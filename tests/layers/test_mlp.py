"""The gated MLP: fused where the product offers it, else by the ops of the device."""

import pytest
import torch

from octavo.kernels.dispatch import reference_ops
from octavo.layers.mlp import GatedMLP


class Fused:
    """A product with the gated form of one activation, which it marks by its result."""

    def __init__(self, offered: str) -> None:
        self.offered = offered

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 2)

    def gated(self, activation: str) -> "object | None":
        return (lambda x: x * 1000) if activation == self.offered else None


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_product_is_asked_for_the_activation_of_the_model(activation: str) -> None:
    x, ops = torch.tensor([[0.5, -2.0]]), reference_ops("test")
    for offered in ("silu", "gelu_tanh"):
        found = GatedMLP(ops, Fused(offered), identity, activation).forward(x)  # type: ignore[arg-type]
        op = ops.silu_and_mul if activation == "silu" else ops.gelu_and_mul
        expected = x * 1000 if offered == activation else op(x.repeat(1, 2))
        assert torch.equal(found, expected)
