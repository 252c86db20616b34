"""Products of floats on vectors: right to the rounding of the result, and a row's bits its own."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.cpu import abi, openmp, target
from octavo.kernels.cpu.gemm_vectors_call import VectorWeight, fits

pytestmark = pytest.mark.skipif(not target.has_fma(), reason="no AVX2 here")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = [(BF16, BF16), (BF16, FP32), (FP16, FP32), (FP32, FP32)]  # of the weight, and of x
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 13, 64, 119, 120, 121, 250)
# One panel, two, an odd number; one value of k, odd ones; more steps than a chunk.
SHAPES = [(1, 1), (7, 30), (64, 48), (70, 101), (96, 2052)]
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
    """Within a rounding of the result and of the float32 sum of `terms` (of absolute products)."""
    slack = exact.abs() * (2.0**-8 if found.dtype == BF16 else 2.0**-22) + terms * 2.0**-20
    assert ((found.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), TYPES)
def test_it_is_right_at_odd_shapes(kind: torch.dtype, dtype: torch.dtype, has_bias: bool) -> None:
    for columns, depth in SHAPES:
        w = drawn(columns, depth, dtype=kind)
        bias = drawn(columns, dtype=dtype, seed=1) if has_bias else None
        product, x = VectorWeight(w, bias, dtype), drawn(max(ROWS), depth, dtype=dtype, seed=2)
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        terms = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.abs())
        for rows in ROWS:
            assert_rounded(product(x[:rows]), exact[:rows], terms[:rows])
        with pytest.raises(AssertionError):
            assert_rounded(product(x) * 1.01, exact, terms)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), TYPES)
def test_the_activation_of_a_gated_mlp_is_fused(
    kind: torch.dtype, dtype: torch.dtype, has_bias: bool, activation: str
) -> None:
    for inner, depth in ((16, 32), (48, 64), (160, 97)):
        w = drawn(2 * inner, depth, dtype=kind) / 16
        bias = drawn(2 * inner, dtype=dtype, seed=1) if has_bias else None
        x = drawn(max(ROWS), depth, dtype=dtype, seed=2)
        product = VectorWeight(w, bias, dtype).gated(activation)
        assert product is not None
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        gate, up = exact.chunk(2, dim=1)
        for rows in ROWS:
            found = product(x[:rows])
            assert found.shape == (rows, inner)
            wanted = (ACTIVATIONS[activation](gate) * up)[:rows]
            assert_rounded(found, wanted, 4 * (1 + up[:rows].abs() + gate[:rows].abs()))


def test_halves_off_the_panels_and_other_activations_are_not_fused() -> None:
    assert VectorWeight(drawn(48, 32, dtype=BF16), None, FP32).gated("silu") is None
    assert VectorWeight(drawn(64, 32, dtype=BF16), None, FP32).gated("relu") is None


@pytest.mark.parametrize(("kind", "dtype"), TYPES)
@pytest.mark.parametrize(("columns", "depth"), [(288, 576), (160, 2304)])
def test_a_row_has_the_same_bits_whatever_the_batch_and_on_any_threads(
    columns: int, depth: int, kind: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = VectorWeight(drawn(columns, depth, dtype=kind), None, dtype)
    x = drawn(max(ROWS), depth, dtype=dtype, seed=2)
    whole = product(x)
    for threads in (1, 2):
        monkeypatch.setattr(openmp, "threads", lambda: threads)  # noqa: B023
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), whole[:rows]), rows
            assert torch.equal(product(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize(("kind", "dtype"), TYPES)
def test_rows_may_have_gaps_and_what_lies_beyond_is_not_used(
    kind: torch.dtype, dtype: torch.dtype
) -> None:
    for depth in (96, 95):
        product = VectorWeight(drawn(64, depth, dtype=kind), None, dtype)
        wide = torch.full((40, 200), float("nan"), dtype=dtype)
        wide[:37, 32 : 32 + depth] = x = drawn(37, depth, dtype=dtype, seed=2)
        assert torch.equal(product(wide[:37, 32 : 32 + depth]), product(x))
        assert torch.equal(product(x.T.contiguous().T), product(x))


@pytest.mark.parametrize(("kind", "dtype"), TYPES)
def test_a_nan_stays_in_its_row(kind: torch.dtype, dtype: torch.dtype) -> None:
    product = VectorWeight(drawn(64, 96, dtype=kind), None, dtype)
    x = drawn(40, 96, dtype=dtype, seed=2)
    clean = product(x)
    x[17, 5] = float("nan")
    found = product(x)
    assert found[17].isnan().all()
    kept = [row for row in range(40) if row != 17]
    assert torch.equal(found[kept], clean[kept])


def test_a_weight_may_be_rows_of_a_larger_one_and_in_memory_that_is_given() -> None:
    given: list[torch.Tensor] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        given.append(torch.full(shape, float("nan"), dtype=dtype))
        return given[0]

    w, x = drawn(64, 100, dtype=BF16), drawn(3, 48, dtype=FP32)
    product = VectorWeight(w[10:50, 20:68], None, FP32, allocate)
    assert not given[0].isnan().any()
    assert torch.equal(product(x), VectorWeight(w[10:50, 20:68].clone(), None, FP32)(x))
    turned, x = w.T, drawn(3, 64, dtype=FP32)
    assert torch.equal(
        VectorWeight(turned, None, FP32)(x), VectorWeight(turned.contiguous(), None, FP32)(x)
    )


def test_rows_of_a_work_item_are_whole_tiles() -> None:
    assert abi.GEMM_VECTORS_ROWS % abi.GEMM_VECTORS_TALL == 0


def test_which_types_have_a_kernel() -> None:
    assert all(fits(kind, dtype) for kind, dtype in TYPES)
    assert not fits(FP32, BF16)
    assert not fits(torch.float64, FP32)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16"])
def test_other_processors(limit: str, tmp_path: Path) -> None:
    """These tests once more, in a process that is limited to AVX2, or to AVX-512 with or without
    BF16."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        pytest.skip("this is that process")
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path), "ONEDNN_MAX_CPU_ISA": limit}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__], env=environment, capture_output=True, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
