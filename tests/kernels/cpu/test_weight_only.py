"""Weight-only products: those of the dequantized weight, and the same bits in any company."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.cpu.test_weight_only_layout import NON_LINEAR, drawn

from octavo.kernels import reference
from octavo.kernels.codes import Form, GroupedCodes, linear
from octavo.kernels.cpu import openmp, target
from octavo.kernels.cpu.gemm_int8_call import Workspace
from octavo.kernels.cpu.weight_only_call import WeightOnly
from octavo.kernels.cpu.weight_only_layout import PackedCodes, pack

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (1, 2, 3, 5, 7, 8, 11, 23, 24, 25, 61)
SHAPES = [(1, 8), (33, 100), (96, 64), (64, 600)]
INT8 = Form(8, 64, "half", "none", linear(8, -128))
INT4 = Form(4, 32, "half", "minimum", linear(4, 0))
OTHERS = [
    Form(4, 32, "half", "none", linear(4, -8)),
    Form(4, 32, "half", "none", NON_LINEAR),
    Form(4, 128, "half", "zero", linear(4, 0)),
    Form(4, 32, "super", "minimum", linear(4, 0)),
    Form(4, 16, "super", "none", NON_LINEAR),
    Form(5, 32, "half", "none", linear(5, -16)),
    Form(5, 32, "super", "minimum", linear(5, 0)),
    Form(6, 16, "super", "none", linear(6, -32)),
    Form(8, 256, "single", "zero", linear(8, -128)),
]
# What engines are tested with is tested always; each further form has a kernel to be compiled.
FORMS = [INT8, INT4, *(pytest.param(form, marks=pytest.mark.slow) for form in OTHERS)]


def named(form: object) -> str:
    return f"{form.bits}-{form.terms}-{form.offset}" if isinstance(form, Form) else str(form)


def product(packed: PackedCodes, dtype: torch.dtype, bias: torch.Tensor | None = None):
    return WeightOnly(packed, bias, dtype, Workspace())


def inputs(rows: int, k: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(weight: GroupedCodes, dtype: torch.dtype) -> torch.Tensor:
    """What the product with rows of a type multiplies: on AMX weights are rounded to bfloat16."""
    values = weight.dequantized()
    return values.to(dtype) if target.has_tiles() else values


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for one rounding to the type of the rows; an error of 1% must not pass."""
    exact = found.dtype is FP32
    tolerance = {"rtol": 2e-5 if exact else 2**-8, "atol": float(wanted.abs().max()) * 2e-6}
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.double() * 1.01, wanted, **tolerance)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_it_is_the_product_of_the_dequantized_weight(form, dtype):
    for n, k in SHAPES:
        weight = drawn(form, n, k)
        packed, values = pack(weight), weights_of(weight, dtype).double()
        x, bias = inputs(max(ROWS), k, dtype), inputs(1, n, dtype, seed=5)[0]
        for added in (None, bias):
            wanted = x.double() @ values.T + (0 if added is None else added.double())
            made = product(packed, dtype, added)
            for rows in ROWS:
                check(made(x[:rows]), wanted[:rows])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_a_row_has_the_same_bits_whatever_the_batch_and_on_any_threads(form, dtype, monkeypatch):
    made, x = product(pack(drawn(form, 160, 1040)), dtype), inputs(300, 1040, dtype)
    monkeypatch.setattr(openmp, "threads", lambda: 2)
    together = made(x)
    monkeypatch.setattr(openmp, "threads", lambda: 1)
    for rows in (*ROWS, 300):
        assert torch.equal(made(x[300 - rows :].contiguous()), together[300 - rows :]), rows


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("group", [16, 48, 80, 256, 1024])
def test_groups_of_any_size(group, dtype):
    """Also longer than a row, and with a shorter last one."""
    form = Form(4, group, "half", "minimum", linear(4, 0))
    for k in (96, 472, 2080):
        weight, x = drawn(form, 40, k), inputs(33, k, dtype)
        made, values = product(pack(weight), dtype), weights_of(weight, dtype).double()
        together = made(x)
        check(together, x.double() @ values.T)
        assert torch.equal(made(x[:3]), together[:3])


@pytest.mark.parametrize("panels", [1, 2, 3, 11, 64])
def test_runs_of_panels_are_each_claimed_once(panels, monkeypatch):
    """A column that no thread computes, or that is computed for another panel, is a wrong one."""
    weight = drawn(INT8, 32 * panels - 5, 48)
    made, x = product(pack(weight), FP32), inputs(9, 48, FP32)
    monkeypatch.setattr(made, "_threads", 1 << 16)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(openmp, "threads", lambda count=threads: count)
        for rows in (1, 9):
            out = torch.full((rows, 32 * panels - 5), float("nan"))
            check(made.into(x[:rows], out), x[:rows].double() @ weight.dequantized().double().T)


@pytest.mark.parametrize("form", [INT8, INT4], ids=named)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_of_a_gated_mlp_is_fused(form, biased, activation):
    activate = reference.silu_and_mul if activation == "silu" else reference.gelu_and_mul
    for inner in (16, 48, 160):
        weight = drawn(form, 2 * inner, 96)
        bias = inputs(1, 2 * inner, FP32, seed=5)[0] if biased else None
        fused = product(pack(weight), FP32, bias).gated(activation)
        x = inputs(61, 96, FP32)
        plain = x @ weight.dequantized().T + (0 if bias is None else bias)
        for rows in (1, 5, 61):
            check(fused(x[:rows]), activate(plain[:rows]).double())


def test_a_gated_product_has_the_memory_of_the_one_that_it_replaces():
    """An arena hands out its memory only once."""
    packed = pack(drawn(INT4, 64, 96))
    where = packed.codes.data_ptr(), packed.terms.data_ptr()
    fused = product(packed, FP32).gated("silu")
    assert (fused._weight.codes.data_ptr(), fused._weight.terms.data_ptr()) == where


def test_each_thread_of_a_replay_has_scratch_however_small_the_product_is(monkeypatch):
    """One that is called alone runs on one thread, but a captured step on the whole team."""
    sizes = []

    class Asked(Workspace):
        def memory(self, size):
            sizes.append(size)
            return super().memory(size)

    made = WeightOnly(pack(drawn(INT4, 64, 96)), None, FP32, Asked())
    for threads in (1, 3):
        monkeypatch.setattr(openmp, "threads", lambda count=threads: count)
        made(inputs(9, 96, FP32))
    assert sizes[1] - sizes[0] == 2 * made._sizes[2] > 0


def test_halves_that_are_no_whole_panels_and_other_activations_are_not_fused():
    assert product(pack(drawn(INT8, 48, 64)), FP32).gated("silu") is None
    assert product(pack(drawn(INT8, 64, 64)), FP32).gated("relu") is None


def test_rows_with_gaps_and_rows_without_a_number():
    weight = drawn(INT8, 40, 64)
    made, values = product(pack(weight), FP32), weight.dequantized().double()
    x = inputs(6, 200, FP32)[:, 70:134]
    check(made(x), x.double() @ values.T)
    check(made(x.T.contiguous().T), x.double() @ values.T)
    x = x.clone()
    x[2, 5], x[3, 63] = float("nan"), float("inf")
    found = made(x)
    assert not found[2:4].isfinite().any()
    assert torch.equal(found[[0, 5]], made(x[[0, 5]]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE"])
def test_other_processors(limit, tmp_path):
    """These tests once more, and those of what lays weights out and reads them, in a process that
    is limited to AVX2 or to AVX-512 without BF16."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        pytest.skip("this is that process")
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path), "ONEDNN_MAX_CPU_ISA": limit}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    names = ("gguf", "gguf_pack", "code_rows", "codes_pack", "stored")
    others = [Path(__file__).with_name(f"test_{name}.py") for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, *map(str, others)], env=environment,
        capture_output=True, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
