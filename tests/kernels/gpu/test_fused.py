"""The kernels between the products against the reference; strided, in place, of odd sizes."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.dispatch import OPS, Ops
from octavo.kernels.gpu import fused_call

FLOATS = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = 2e-6 if found.dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def strided(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, size] out of wider rows."""
    return torch.randn(rows, size + 5).to(dtype)[:, 3 : size + 3]


def test_all_ops_are_there() -> None:
    assert Ops.of(fused_call, "").explain().keys() == set(OPS)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_rms_norm(adds: bool, cast_first: bool, wide_weight: bool, dtype: torch.dtype) -> None:
    x, residual = strided(3, 259, dtype), strided(3, 259, dtype) if adds else None
    weight = torch.randn(259).to(torch.float32 if wide_weight else dtype)
    kept = None if residual is None else residual.clone()
    expected = reference.rms_norm(x.clone(), weight, 1e-5, kept, cast_first)
    out, summed = fused_call.rms_norm(x, weight, 1e-5, residual, cast_first)
    close(out, expected[0])
    assert torch.equal(summed, expected[1])
    assert summed is (residual if adds else x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cast_first", [False, True])
def test_norms_in_place(cast_first: bool, dtype: torch.dtype) -> None:
    """Of the queries of a joined product; keys and values next to them do not change."""
    for norm, size in (("head_norm", 24), ("row_norm", 9 * 24)):
        qkv = torch.randn(3, 15, 24).to(dtype)
        expected, weight = qkv.clone(), torch.randn(size).to(dtype)
        getattr(reference, norm)(expected[:, :9], weight, 1e-6, cast_first)
        getattr(fused_call, norm)(qkv[:, :9], weight, 1e-6, cast_first)
        close(qkv, expected)
        assert torch.equal(qkv[:, 9:], expected[:, 9:])


@pytest.mark.parametrize("dtype", FLOATS)
def test_add(dtype: torch.dtype) -> None:
    x, residual = strided(3, 1100, dtype), strided(3, 1100, dtype)
    expected = reference.add(x, residual.clone(), 0.22)
    assert fused_call.add(x, residual, 0.22) is residual
    close(residual, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    gate_up = strided(3, 2 * 1100, dtype) * 3
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -20.0])
    close(getattr(fused_call, name)(gate_up), getattr(reference, name)(gate_up))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["joined", "apart", "no keys"])
def test_rotary_embedding(layout: str, dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 15, 40).to(dtype)
    expected, positions = qkv.clone(), torch.tensor([3, 0, 63, 7, 7])
    angles = torch.rand(64, 12) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    first = slice(9, 12) if layout == "joined" else slice(12, 15)
    for op, x in ((reference.rope, expected), (fused_call.rope, qkv)):
        op(x[:, :9], None if layout == "no keys" else x[:, first], cos_sin, positions)
    close(qkv, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_step(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 200).to(dtype), torch.randn(200).to(dtype)
    together = fused_call.rms_norm(x, weight, 1e-5)[0], fused_call.silu_and_mul(x)
    alone = fused_call.rms_norm(x[2:3], weight, 1e-5)[0], fused_call.silu_and_mul(x[2:3])
    assert all(torch.equal(a, b[2:3]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "add"])
def test_no_rows(op: str) -> None:
    x = torch.empty(0, 8)
    arguments = {"rms_norm": (torch.ones(8), 1e-5), "add": (torch.empty(0, 8),)}.get(op, ())
    getattr(fused_call, op)(x, *arguments)


def test_columns_apart_are_the_references() -> None:
    x, weight = torch.randn(8, 3).t(), torch.ones(8)
    expected = reference.rms_norm(x, weight, 1e-5)[0]
    assert torch.equal(fused_call.rms_norm(x, weight, 1e-5)[0], expected)
