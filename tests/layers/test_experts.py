"""A mixture of experts, expert by expert, against the reference."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import reference
from octavo.kernels.dispatch import reference_ops
from octavo.layers.experts import ExpertByExpert, ExpertSpec, MixtureMLP
from octavo.layers.mlp import GatedMLP


@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_one_after_the_other(renormalize: bool) -> None:
    torch.manual_seed(0)
    spec = ExpertSpec(count=5, choices=2, inner=12, renormalize=renormalize)
    gate_up, down = torch.randn(5, 24, 8), torch.randn(5, 8, 12)
    router, x = torch.randn(5, 8), torch.randn(9, 8)
    ops = reference_ops("a test")

    def product(weight: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda rows: F.linear(rows, weight)

    mlps = [
        GatedMLP(ops, product(one), product(other), "silu")
        for one, other in zip(gate_up, down, strict=True)
    ]
    mlp = MixtureMLP(product(router), ExpertByExpert(mlps, spec))
    routed = reference.route(x @ router.T, 2, renormalize)
    expected = reference.experts(x, *routed, gate_up, down, "silu")
    torch.testing.assert_close(mlp.forward(x), expected)
    torch.testing.assert_close(mlp.forward(x[3:4]), expected[3:4])


def test_ranks_add_their_parts() -> None:
    mlp = MixtureMLP(lambda x: x, lambda x, logits: x + logits, lambda x: 2 * x)
    assert torch.equal(mlp.forward(torch.ones(2, 3)), torch.full((2, 3), 4.0))
