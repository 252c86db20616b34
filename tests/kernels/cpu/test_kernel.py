"""Kernels are compiled once per machine, by this process or another; later starts only load."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import abi, fused_call, object_cache, openmp
from octavo.kernels.cpu.kernel import Kernel, kernel


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "kernels")
    return tmp_path / "kernels"


def activation():
    return Kernel("fused:activation", "silu-float32")


def check(made, monkeypatch):
    gate_up = torch.randn(3, 10)
    monkeypatch.setattr(fused_call, "kernel", lambda arguments, variant: made)
    found = fused_call.CpuOps(torch.float32).silu_and_mul(gate_up)
    torch.testing.assert_close(found, reference.silu_and_mul(gate_up), rtol=1e-5, atol=1e-6)


def test_a_kernel_is_made_once():
    assert kernel(abi.RMS_NORM, "float32") is kernel(abi.RMS_NORM, "float32")
    assert kernel(abi.RMS_NORM, "float32") is not kernel(abi.RMS_NORM, "bfloat16")


def test_the_second_start_compiles_nothing(folder, monkeypatch):
    check(activation(), monkeypatch)
    [file] = folder.glob("*.o")
    assert file.name.startswith("activation_silu-float32-")
    monkeypatch.setattr(Kernel, "compiled", None)
    check(activation(), monkeypatch)


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_object_file_is_made_again(folder, monkeypatch, damage):
    check(activation(), monkeypatch)
    [file] = folder.glob("*.o")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if damage is None else damage)
    check(activation(), monkeypatch)
    assert object_cache.read(file) is not None


def test_a_folder_that_cannot_be_written_is_only_logged(folder, monkeypatch, caplog):
    folder.write_text("a file where the folder should be")
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("WARNING"):
        check(activation(), monkeypatch)
    assert "not kept for the next start" in caplog.text


def test_a_warm_start_does_not_import_numba(tmp_path):
    code = (
        "import sys, torch\n"
        "from octavo.kernels.cpu.fused_call import CpuOps\n"
        "CpuOps(torch.float32).silu_and_mul(torch.ones(1, 64))\n"
        "print('numba' in sys.modules)\n"
    )
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path)}
    for expected in ("True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


@pytest.mark.parametrize(("helper", "compiled_here"), [(sys.executable, False), ("false", True)])
def test_a_kernel_that_another_process_compiles_is_waited_for(tmp_path, helper, compiled_here):
    """And compiled here where that process fails."""
    code = (
        "import sys, torch\n"
        "from octavo.kernels.cpu import abi, openmp\n"
        "from octavo.kernels.cpu.fused_call import CpuOps\n"
        "from octavo.kernels.cpu.kernel import Kernel, kernel\n"
        "openmp.threads = lambda: 2\n"
        f"sys.executable = {helper!r}\n"
        "Kernel.compile_ahead([kernel(abi.ACTIVATION, 'silu-float32')])\n"
        "print(CpuOps(torch.float32).silu_and_mul(torch.ones(1, 64)).shape)\n"
        "print('numba' in sys.modules)\n"
    )
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch.Size([1, 32])", str(compiled_here)]


def test_no_other_process_compiles_for_a_cache_that_cannot_be_written(folder, monkeypatch):
    """Each kernel would be compiled twice at every start."""
    folder.write_text("a file where the folder should be")
    monkeypatch.setattr(openmp, "threads", lambda: 2)
    monkeypatch.setattr("subprocess.Popen", None)
    made = activation()
    Kernel.compile_ahead([made])
    compiled = []
    compile_it = Kernel.compiled
    monkeypatch.setattr(Kernel, "compiled", lambda self: compiled.append(1) or compile_it(self))
    check(made, monkeypatch)
    check(made, monkeypatch)
    assert compiled == [1]
