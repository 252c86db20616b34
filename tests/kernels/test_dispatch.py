"""Which function serves an op, and whether it can say so."""

import torch

from octavo.kernels import dispatch, reference


def test_the_cpu_has_kernels_of_its_own():
    for dtype in (torch.float32, torch.bfloat16):
        ops = dispatch.select("cpu", dtype)
        assert "CpuOps.rms_norm" in ops.explain()["rms_norm"]
        assert str(dtype) in ops.explain()["silu_and_mul"]


def test_what_has_no_kernel_runs_the_reference_and_says_so():
    for device, dtype in (("cpu", torch.float16), ("meta", torch.float32)):
        ops = dispatch.select(device, dtype)
        assert ops.rms_norm is reference.rms_norm
        assert f"no kernels for {device} in {dtype}" in ops.explain()["rope"]
