"""The team of threads that kernels share with torch, and what happens without it."""

import logging
import os

import pytest
import torch

import kit
from octavo import cgroup
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels import reference
from octavo.kernels.cpu import openmp
from octavo.kernels.cpu.fused_call import CpuOps
from octavo.runner.device import cpu


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


@pytest.mark.parametrize(
    ("quota", "allowed"), [(None, 8), (0.5, 1), (1.0, 1), (2.9, 2), (8.0, 8), (64.0, 8)]
)
def test_threads_are_those_of_the_affinity_or_of_the_quota(monkeypatch, quota, allowed):
    monkeypatch.setattr(openmp.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cgroup, "processor_quota", lambda: quota)
    assert openmp.allowed_threads() == allowed


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_device_obeys_the_quota_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    monkeypatch.setattr(cgroup, "processor_quota", lambda: 1.5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with caplog.at_level("INFO"):
        kit.cpu_device()
    assert openmp.threads() == 1
    assert "1 threads rather than 2: this container may use 1.50 processors" in caplog.text


@pytest.mark.usefixtures("two_threads")
def test_explicit_threads_win(monkeypatch):
    monkeypatch.setattr(cgroup, "processor_quota", lambda: 0.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    kit.cpu_device()
    assert openmp.threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(cgroup, "processor_quota", lambda: 64.0)
    kit.cpu_device()
    assert openmp.threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_option_wins_over_the_environment_and_too_many_are_reported(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    monkeypatch.setattr(openmp, "allowed_threads", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    caplog.set_level("INFO")
    cpu(EngineConfig(threads=1))
    assert openmp.threads() == 1
    assert "compute threads: 1 (threads)" in caplog.text
    assert "WARNING" not in caplog.text
    cpu(EngineConfig(threads=3))
    assert openmp.threads() == 3
    assert "3 compute threads have 2 processors" in caplog.text


@pytest.mark.usefixtures("two_threads")
def test_a_new_engine_in_a_fork_of_one_that_ran_is_refused():
    openmp.team()
    kit.cpu_device()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            kit.cpu_device()
        except ConfigError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert f"made in process {os.getpid()} and is used in its fork" in said
    assert "spawn" in said
