"""The kernels between the products compiled for GPUs that are not here: no spills, wide loads."""

import pytest

from octavo.kernels.gpu import fused
from octavo.kernels.gpu.fused_call import norm_constants
from ptx import compile_for

WIDE = r"ld\.global\S*v[24]"


# Llama 8B with the residual sum, the heads of Qwen3, and one of 16,384.
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("size", "rows", "adds"), [(4096, 1, True), (128, 8, False), (16384, 1, True)]
)
def test_norms(size: int, rows: int, adds: bool, capability: int) -> None:
    types = dict.fromkeys(("out", "x", "residual", "weight"), "*bf16")
    types |= dict.fromkeys(("stride_out", "stride_x", "stride_residual", "stride_head"), "i64")
    types |= {"eps": "fp32", "rows": "i32"}
    constants = norm_constants(size, rows)
    warps = constants.pop("num_warps")
    constants |= {"HEADS": rows, "ROWS": rows, "ADDS": adds, "CAST_FIRST": False}
    built = compile_for(capability, fused.rms_norm, types, constants, warps, unaligned=("rows",))
    assert built.spilled == 0
    assert built.count(WIDE) >= 1 + adds


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_activations(gelu: bool, capability: int) -> None:
    types = {"out": "*bf16", "gate_up": "*bf16", "stride_out": "i64", "stride": "i64",
             "rows": "i32", "size": "i32"}  # fmt: skip
    constants = {"GELU": gelu, "ROWS": 1, "COLUMNS": 1024}
    built = compile_for(capability, fused.gated, types, constants, unaligned=("rows",))
    assert built.spilled == 0
    assert built.count(WIDE) >= 2


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_add(capability: int) -> None:
    types = {"x": "*bf16", "residual": "*bf16", "stride_x": "i64", "stride_residual": "i64",
             "rows": "i32", "size": "i32", "scale": "fp32"}  # fmt: skip
    constants = {"ROWS": 1, "COLUMNS": 1024}
    built = compile_for(capability, fused.add, types, constants, unaligned=("rows",))
    assert built.spilled == 0
    assert built.count(WIDE) >= 2
