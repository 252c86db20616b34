"""GEMMs of quantized weights: exact sums, so equal to the reference but for one rounding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import openmp, target
from octavo.kernels.cpu.gemm_int8_call import (
    PackedWeight,
    QuantizedWeight,
    Workspace,
    pack_int4,
    pack_int8,
)

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 3, 7, 17, 33, 300)
SHAPES = [(1, 8), (33, 100), (96, 64), (160, 1600)]
UNITS = sorted({"vector", target.int8_unit()})


@pytest.fixture(params=UNITS, autouse=True)
def _unit(request, monkeypatch):
    monkeypatch.setattr(target, "int8_unit", lambda: request.param)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(low, high, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator)


def int8(n, k):
    """A packed weight, and the same as the reference takes it."""
    q, scale = whole(-128, 128, n, k).to(torch.int8), drawn(n, seed=1).abs() / 100
    return pack_int8(q, scale), q, scale


def int4(n, k, group=32):
    groups = -(-k // group)
    codes, scale = whole(0, 16, n, k).to(torch.uint8), drawn(n, seed=1).abs() / 100
    m = whole(1, 2100, n, groups, seed=2).int()
    o = 128 - (m * whole(0, 16, n, groups, seed=3).int())
    o = torch.minimum(o, 32767 - 15 * m)  # the largest value stays below 128
    return (
        pack_int4(codes, m, o, scale, group),
        reference.int4_weights(codes, m, o, group),
        scale,
    )


def check(found, wanted, rtol=1e-6):
    """Equal but for roundings of the last bit; an error of 1% must not pass."""
    rtol = rtol if found.dtype is torch.float32 else 2**-7
    atol = float(wanted.float().abs().max()) * (1e-6 if found.dtype is torch.float32 else 2**-10)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=rtol, atol=atol)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.float() * 1.01, wanted.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("make", [int8, int4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_the_reference_at_odd_shapes(make, shape, dtype):
    packed, q, scale = make(*shape)
    x, bias = drawn(max(ROWS), shape[1], seed=4, dtype=dtype), drawn(shape[0], seed=5, dtype=dtype)
    for added in (None, bias):
        product = QuantizedWeight(packed, added, dtype, Workspace())
        wanted = reference.quantized_linear(x, q, scale, added)
        for rows in ROWS:
            check(product(x[:rows]), wanted[:rows])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_codes(group):
    packed, q, scale = int4(32, 224, group)
    x = drawn(5, 224)
    wanted = reference.quantized_linear(x, q, scale)
    check(QuantizedWeight(packed, None, torch.float32, Workspace())(x), wanted)


@pytest.mark.parametrize("make", [int8, int4])
@pytest.mark.parametrize("inner", [16, 48, 800])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_of_a_gated_mlp_is_fused(make, inner, biased, activation):
    packed, q, scale = make(2 * inner, 96)
    bias = drawn(2 * inner, seed=5) if biased else None
    product = QuantizedWeight(packed, bias, torch.float32, Workspace()).gated(activation)
    x = drawn(300, 96)
    activate = reference.silu_and_mul if activation == "silu" else reference.gelu_and_mul
    wanted = activate(reference.quantized_linear(x, q, scale, bias))
    for rows in (1, 5, 300):
        check(product(x[:rows]), wanted[:rows], rtol=1e-5)


def test_halves_that_are_no_whole_panels_are_not_fused():
    packed, _, _ = int8(48, 64)
    assert QuantizedWeight(packed, None, torch.float32, Workspace()).gated("silu") is None


def test_an_activation_that_the_kernel_does_not_have_is_not_fused():
    packed, _, _ = int8(64, 64)
    assert QuantizedWeight(packed, None, torch.float32, Workspace()).gated("relu") is None


@pytest.mark.parametrize("make", [int8, int4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_batch_and_on_any_threads(make, dtype, monkeypatch):
    packed, _, _ = make(352, 1600)
    product, x = QuantizedWeight(packed, None, dtype, Workspace()), drawn(300, 1600, dtype=dtype)
    monkeypatch.setattr(openmp, "threads", lambda: 2)
    together = product(x)
    monkeypatch.setattr(openmp, "threads", lambda: 1)
    for rows in ROWS:
        assert torch.equal(product(x[300 - rows :].contiguous()), together[300 - rows :])


def test_vectors_and_tiles_give_the_same_bits(monkeypatch):
    packed, _, _ = int8(64, 200)
    x, found = drawn(40, 200), []
    for unit in UNITS:
        monkeypatch.setattr(target, "int8_unit", lambda unit=unit: unit)
        found.append(QuantizedWeight(packed, None, torch.float32, Workspace())(x))
    assert all(torch.equal(found[0], other) for other in found)


def test_rows_with_gaps_zero_rows_and_rows_without_a_number():
    packed, q, scale = int8(40, 64)
    product = QuantizedWeight(packed, None, torch.float32, Workspace())
    wide = drawn(6, 200)
    x = wide[:, 70:134]
    check(product(x), reference.quantized_linear(x, q, scale))
    check(product(x.T.contiguous().T), reference.quantized_linear(x, q, scale))
    x = x.clone()
    x[1] = 0
    x[2, 5], x[3, 63], x[4, 0] = float("nan"), float("inf"), 1e-35
    found = product(x)
    assert torch.equal(found[1], torch.zeros(40))
    assert found[2:4].isnan().all()
    assert torch.equal(found[[0, 5]], product(x[[0, 5]]))


def test_bytes_of_a_weight():
    assert int8(64, 128)[0].num_bytes == 64 * 128 + 64 * 8
    assert int4(64, 128, 64)[0].num_bytes == 64 * 128 // 2 + 64 * 8 + 64 * 2 * 4


def test_a_packed_weight_knows_its_size():
    packed = int4(33, 100)[0]
    assert isinstance(packed, PackedWeight)
    assert (packed.out_size, packed.in_size, packed.group) == (33, 100, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_processor_without_avx512(tmp_path):
    """These tests once more, in a process that is limited to AVX2."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        pytest.skip("this is that process")
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__], env=environment, capture_output=True, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
