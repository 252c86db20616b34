"""Products on AMX: right to the rounding of bfloat16, and a row's bits its own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.cpu import openmp, target
from octavo.kernels.cpu.gemm_bf16_call import TiledWeight, fits

pytestmark = pytest.mark.skipif(not target.has_tiles(), reason="no AMX here")

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 255, 256, 257, 300, 530)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
    """Within a rounding to bfloat16 and the float32 sum of `terms` (of absolute products)."""
    slack = exact.abs() * 2.0**-8 + terms * 2.0**-20
    assert ((found.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("columns", "depth"), [(1, 32), (16, 96), (33, 32), (100, 64), (544, 576), (960, 1536)]
)
def test_it_is_right_at_odd_shapes(columns: int, depth: int, has_bias: bool) -> None:
    w, bias = drawn(columns, depth), drawn(columns, seed=1) if has_bias else None
    product, x = TiledWeight(w, bias), drawn(max(ROWS), depth, seed=2)
    exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    terms = x.double().abs() @ w.double().abs().T
    for rows in ROWS:
        assert_rounded(product(x[:rows]), exact[:rows], terms[:rows])


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("inner", "depth"), [(32, 32), (48, 64), (1536, 576)])
def test_the_activation_of_a_gated_mlp_is_fused(inner: int, depth: int, activation: str) -> None:
    w, x = drawn(2 * inner, depth) / 16, drawn(max(ROWS), depth, seed=2)
    product = TiledWeight(w).gated(activation)
    assert product is not None
    gate, up = F.linear(x.double(), w.double()).chunk(2, dim=1)
    exact = ACTIVATIONS[activation](gate) * up
    for rows in ROWS:
        found = product(x[:rows])
        assert found.shape == (rows, inner)
        assert_rounded(found, exact[:rows], 1 + up[:rows].abs() + gate[:rows].abs())


def test_halves_off_the_tiles_or_with_a_bias_are_not_fused() -> None:
    assert TiledWeight(drawn(48, 32)).gated("silu") is None
    assert TiledWeight(drawn(64, 32), drawn(64)).gated("silu") is None


def test_an_activation_that_the_kernel_does_not_have_is_not_fused() -> None:
    assert TiledWeight(drawn(64, 32)).gated("relu") is None


@pytest.mark.parametrize(("columns", "depth"), [(96, 576), (576, 1536), (64, 4864)])
def test_a_row_has_the_same_bits_whatever_the_batch(
    columns: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, x = TiledWeight(drawn(columns, depth)), drawn(max(ROWS), depth, seed=2)
    whole = product(x)
    for threads in (1, 2):
        monkeypatch.setattr(openmp, "threads", lambda: threads)  # noqa: B023
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), whole[:rows]), rows
            assert torch.equal(product(x[-rows:]), whole[-rows:]), rows


def test_rows_may_have_gaps_and_what_lies_beyond_is_not_read() -> None:
    w = drawn(64, 96)
    wide = torch.full((40, 200), float("nan"), dtype=torch.bfloat16)
    wide[:37, 32:128] = x = drawn(37, 96, seed=2)
    assert torch.equal(TiledWeight(w)(wide[:37, 32:128]), TiledWeight(w)(x))
    assert torch.equal(TiledWeight(w)(x.T.contiguous().T), TiledWeight(w)(x))


def test_a_nan_stays_in_its_row() -> None:
    w, x = drawn(64, 96), drawn(40, 96, seed=2)
    clean = TiledWeight(w)(x)
    x[17, 5] = float("nan")
    found = TiledWeight(w)(x)
    assert found[17].isnan().all()
    kept = [row for row in range(40) if row != 17]
    assert torch.equal(found[kept], clean[kept])


def test_which_weights_can_be_laid_out() -> None:
    assert fits(drawn(5, 64))
    assert not fits(drawn(5, 65))
    assert not fits(torch.zeros(5, 64))
