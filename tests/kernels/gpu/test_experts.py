"""A mixture of experts in Triton against the reference."""

from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import reference
from octavo.kernels.codes import Codes
from octavo.kernels.gpu import experts, experts_call
from octavo.kernels.gpu.experts_call import GpuModelProducts, GroupedExperts
from octavo.kernels.gpu.linear import as_codes
from paging import assert_close

FLOATS = (torch.float32, torch.float16)


def _case(
    tokens: int, count: int, choices: int, hidden: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden + 8).to(dtype)[:, :hidden]
    logits = torch.randn(tokens, count)
    logits[:, 1] = -9  # nobody's choice
    chosen, weights = reference.route(logits, choices, False)
    gate_up = (torch.randn(count, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, inner) / inner**0.5).to(dtype)
    return x, chosen, weights, gate_up, down


def _grouped(gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> GroupedExperts:
    return GroupedExperts(gate_up.flatten(0, 1), down.flatten(0, 1), len(down), activation)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("tokens", "count", "choices", "hidden", "inner", "activation"),
    [(1, 8, 2, 72, 40, "silu"), (37, 5, 3, 40, 72, "gelu_tanh")],
)
def test_equals_the_reference(
    tokens: int, count: int, choices: int, hidden: int, inner: int, activation: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    x, chosen, weights, gate_up, down = _case(tokens, count, choices, hidden, inner, dtype)
    got = _grouped(gate_up, down, activation)(x, chosen, weights)
    expected = reference.experts(x.float(), chosen, weights, gate_up, down, activation)
    _assert_close(got, expected)


def _assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Of two products and what lies between, which are each rounded."""
    if got.dtype == torch.float16:
        got, expected = got.float().bfloat16(), expected.bfloat16()
    assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [16, 90, 300])
def test_tiles_of_each_size(tokens: int, dtype: torch.dtype) -> None:
    x, chosen, weights, gate_up, down = _case(tokens, 4, 2, 130, 70, dtype)
    got = _grouped(gate_up, down, "silu")(x, chosen, weights)
    _assert_close(got, reference.experts(x.float(), chosen, weights, gate_up, down, "silu"))


@pytest.mark.parametrize("native", [False, True])
def test_fp8(native: bool) -> None:
    """In groups for the first product, with a scale per output for the second."""
    x, chosen, weights, gate_up, down = _case(9, 4, 2, 128, 72, torch.float32)
    one, other = _in_groups(gate_up.flatten(0, 1)), as_codes(down.flatten(0, 1), "fp8")
    got = GroupedExperts(one, other, 4, "silu", native)(x, chosen, weights)
    values = one.values().view(gate_up.shape), other.values().view(down.shape)
    _assert_close(got, reference.experts(x, chosen, weights, *values, "silu"))


def _in_groups(weight: torch.Tensor) -> Codes:
    scale = torch.rand(len(weight), 2) * 0.01 + 0.001
    codes = (weight / scale.repeat_interleave(64, 1)).to(torch.float8_e4m3fn)
    return Codes(codes, scale, torch.zeros_like(scale), 64, 8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_step(dtype: torch.dtype) -> None:
    x, chosen, weights, gate_up, down = _case(11, 4, 2, 72, 40, dtype)
    grouped = _grouped(gate_up, down, "silu")
    together = grouped(x, chosen, weights)
    for row in (0, 4, 10):
        one = slice(row, row + 1)
        assert torch.equal(grouped(x[one], chosen[one], weights[one])[0], together[row])


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(renormalize: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 12)
    logits[3, 2:7] = 1.5  # the first of equal ones
    chosen, weights = experts_call.route(logits, 3, renormalize)
    wanted, shares = reference.route(logits, 3, renormalize)
    assert torch.equal(chosen, wanted)
    assert_close(weights, shares)


@pytest.mark.parametrize("rows", [16, 128])
def test_work_lists_hold_each_pair_once_and_tiles_one_expert(rows: int) -> None:
    """Also where one expert has all, and where most have none."""
    torch.manual_seed(0)
    cases: list[Any] = [torch.randint(0, 7, (1500,)), torch.full((40,), 6), torch.tensor([3, 0])]
    for chosen in cases:
        order = torch.full((len(chosen),), -1, dtype=torch.int32)
        items = torch.full((len(chosen) // rows + 7, experts.ITEM_FIELDS), -1, dtype=torch.int32)
        experts.sort_pairs[(7,)](
            order, items, chosen.int(), len(chosen), EXPERTS=7, ROWS=rows, BLOCK=1024,
            FIELDS=experts.ITEM_FIELDS,
        )  # fmt: skip
        assert torch.equal(order.long(), torch.argsort(chosen, stable=True))
        seen: list[int] = []
        for expert, first, count, _ in items.tolist():
            assert 0 <= count <= rows
            of = chosen[order[first : first + count].long()]
            assert (of == expert).all()
            seen += range(first, first + count)
        assert sorted(seen) == list(range(len(chosen)))


def test_what_experts_are_computed_in() -> None:
    x, *_, gate_up, down = _case(5, 4, 2, 72, 40, torch.float32)
    matrices = gate_up.flatten(0, 1), down.flatten(0, 1)
    products = GpuModelProducts(torch.float32, False)
    with pytest.raises(ConfigError, match="no int8 products of experts on a GPU; use fp8"):
        products.make_experts(*matrices, 4, 2, True, "silu", ("int8", "none"))
    logits = torch.randn(5, 4)
    plain = products.make_experts(*matrices, 4, 2, True, "silu", ("none", "none"))(x, logits)
    routed = reference.route(logits, 2, True)
    assert_close(plain, reference.experts(x, *routed, gate_up, down, "silu"))
    rounded = products.make_experts(*matrices, 4, 2, True, "silu", ("fp8", "fp8"))(x, logits)
    assert 0.005 < float((rounded - plain).norm() / plain.norm()) < 0.08
    stored = as_codes(matrices[1], "int8")
    products.make_experts(matrices[0], stored, 4, 2, True, "silu", ("none", "int8"))
    assert products.explain() == "cuBLAS; experts in Triton (expanded, fp8, plain)"
