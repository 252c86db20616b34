"""The vector functions that kernels are made of, through a kernel made for the test."""

import struct

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import compile as compiler
from octavo.kernels.cpu import object_cache, openmp
from octavo.kernels.cpu.simd import (
    LANES,
    geti,
    jit,
    setf,
    vexp2,
    vexp2_rough,
    vkeep,
    vload,
    vloadh,
    vmax,
    vmin,
    vsplat,
    vstore,
    vstoreh,
    vsum,
    vtop,
)


def kernel():
    @jit
    def work(a):
        x, out, n = geti(a + 16), geti(a + 24), geti(a + 32)
        for i in range(n):
            here, to = x + i * LANES * 4, out + i * LANES * 4
            value = vload(here)
            vstore(to, vexp2(value))
            vstore(to + n * LANES * 4, vexp2_rough(value))
            vstoreh(to + 2 * n * LANES * 4, value)
            vstore(to + 3 * n * LANES * 4, vloadh(to + 2 * n * LANES * 4))
            vstore(to + 4 * n * LANES * 4, vkeep(value, 1, 5, np.float32(7.0)))
            one = vsplat(np.float32(1.0))
            vstore(to + 5 * n * LANES * 4, vmax(vmin(value, one), vsplat(np.float32(-2.0))))
            setf(out + 6 * n * LANES * 4 + i * 4, vsum(value))
            setf(out + 7 * n * LANES * 4 + i * 4, vtop(value))

    def run(a):
        work(a)

    return run


@pytest.fixture(scope="module")
def run():
    address = object_cache.link(compiler.object_code(kernel(), "vectors"), "vectors")
    function = openmp.Function(address)

    def call(x: torch.Tensor) -> torch.Tensor:
        count = x.numel() // LANES
        out = torch.zeros(8, x.numel())
        function(struct.pack("<5q", 0, 0, x.data_ptr(), out.data_ptr(), count))
        return out

    return call


def test_exp2(run):
    x = torch.linspace(-126, 126, 4096)
    out, exact = run(x), torch.exp2(x.double())
    assert float((out[0] / exact - 1).abs().max()) < 3e-7
    assert float((out[1] / exact - 1).abs().max()) < 1.1e-4
    ends = torch.tensor([-127.0, -1e4, -torch.inf, -1e30, 0.0, 1.0, torch.nan, 127.0] * 4)
    out = run(ends)[:2, :8]
    assert (out[0, :4] == 0).all()
    assert (out[1, :4] < 2.0**-126).all()
    assert (out[1, 1:4] == 0).all()
    assert (out[:, 4:6] == torch.tensor([1.0, 2.0])).all()
    assert out[:, 6].isnan().all()
    assert torch.equal(out[:, 7], torch.full((2,), 2.0**127))


def test_bfloat16_rounds_as_torch_does(run):
    bits = torch.randint(0x00800000, 0x7F000000, (4096,), dtype=torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, 3.4e38, -1.5] * 4)
    for x in (bits.view(torch.float32), -ties.view(torch.float32), special):
        expected = x.bfloat16().float()
        assert torch.equal(run(x)[3].nan_to_num(9), expected.nan_to_num(9))


def test_lanes(run):
    x = torch.randn(LANES * 8)
    out, lanes = run(x), x.view(-1, LANES)
    kept = torch.full_like(lanes, 7.0)
    kept[:, 1:5] = lanes[:, 1:5]
    assert torch.equal(out[4].view(-1, LANES), kept)
    assert torch.equal(out[5], x.clamp(-2, 1))
    torch.testing.assert_close(out[6, :8], lanes.sum(1))
    assert torch.equal(out[7, :8], lanes.amax(1))
