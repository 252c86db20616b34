"""The team of threads that kernels share with torch, and what happens without it."""

import torch

from octavo.kernels import reference
from octavo.kernels.cpu import openmp
from octavo.kernels.cpu.fused_call import CpuOps


def test_torch_s_team_is_found():
    assert openmp.team().is_exact(1)
    assert openmp.threads() == torch.get_num_threads()


def test_without_libgomp_kernels_run_on_python_threads(monkeypatch):
    monkeypatch.setattr(openmp, "_find_gomp", lambda: None)
    team = openmp.Team()
    assert team.is_exact(1)
    assert not team.is_exact(2)
    monkeypatch.setattr(openmp, "team", lambda: team)
    monkeypatch.setattr(openmp, "threads", lambda: 2)
    gate_up = torch.randn(300, 400)
    found = CpuOps(torch.float32).silu_and_mul(gate_up)
    torch.testing.assert_close(found, reference.silu_and_mul(gate_up), rtol=1e-5, atol=1e-6)
