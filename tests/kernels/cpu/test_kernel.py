"""Kernels are compiled once per machine; a damaged or unwritable cache costs time, not answers."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import fused_call as cpu_ops
from octavo.kernels.cpu import kernel as cpu_jit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_jit, "cache_folder", lambda: tmp_path / "kernels")
    return tmp_path / "kernels"


def activation():
    return cpu_jit.Kernel("octavo.kernels.cpu.fused:activation", "silu-float32")


def check(kernel, monkeypatch):
    gate_up = torch.randn(3, 10)
    monkeypatch.setattr(cpu_ops, "kernel", lambda maker, variant: kernel)
    found = cpu_ops.CpuOps(torch.float32).silu_and_mul(gate_up)
    torch.testing.assert_close(found, reference.silu_and_mul(gate_up), rtol=1e-5, atol=1e-6)


def test_the_second_start_compiles_nothing(folder, monkeypatch):
    check(activation(), monkeypatch)
    assert [file.name for file in folder.iterdir()] == ["activation_silu-float32.o"]
    monkeypatch.setattr(cpu_jit.Kernel, "_compile", None)
    check(activation(), monkeypatch)


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_object_file_is_made_again(folder, monkeypatch, damage):
    check(activation(), monkeypatch)
    file = folder / "activation_silu-float32.o"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if damage is None else damage)
    check(activation(), monkeypatch)
    assert cpu_jit._read("activation_silu-float32") is not None


def test_a_folder_that_cannot_be_written_is_only_logged(folder, monkeypatch, caplog):
    folder.write_text("a file where the folder should be")
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("WARNING"):
        check(activation(), monkeypatch)
    assert "not kept for the next start" in caplog.text


def test_without_libgomp_kernels_run_on_threads_of_our_own(monkeypatch):
    monkeypatch.setattr(cpu_jit, "_find_gomp", lambda: None)
    team = cpu_jit.Team()
    monkeypatch.setattr(cpu_jit, "team", lambda: team)
    monkeypatch.setattr(cpu_jit, "threads", lambda: 2)
    gate_up = torch.randn(300, 400)
    found = cpu_ops.CpuOps(torch.float32).silu_and_mul(gate_up)
    torch.testing.assert_close(found, reference.silu_and_mul(gate_up), rtol=1e-5, atol=1e-6)


def test_a_warm_start_does_not_import_numba(tmp_path):
    code = (
        "import sys, torch\n"
        "from octavo.kernels.cpu import fused_call as cpu_ops\n"
        "cpu_ops.CpuOps(torch.float32).silu_and_mul(torch.ones(1, 64))\n"
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
        "from octavo.kernels.cpu import kernel as cpu_jit, fused_call as cpu_ops\n"
        "cpu_jit.threads = lambda: 2\n"
        f"sys.executable = {helper!r}\n"
        "cpu_jit.Kernel.compile_ahead([cpu_ops.kernel('activation', 'silu-float32')])\n"
        "print(cpu_ops.CpuOps(torch.float32).silu_and_mul(torch.ones(1, 64)).shape)\n"
        "print('numba' in sys.modules)\n"
    )
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch.Size([1, 32])", str(compiled_here)]


def test_object_code_is_kept_apart_by_processor_and_source(monkeypatch, tmp_path):
    def folder():
        cpu_jit.cache_folder.cache_clear()
        return cpu_jit.cache_folder()

    name, features = cpu_jit.cpu()
    folders = {folder()}
    monkeypatch.setattr(cpu_jit, "cpu", lambda: (name, features - {sorted(features)[0]}))
    folders.add(folder())
    monkeypatch.setattr(cpu_jit, "cpu", lambda: (name + "2", features))
    folders.add(folder())
    monkeypatch.setattr(cpu_jit, "cpu", lambda: (name, features))
    source = tmp_path / "cpu_jit.py"
    source.write_text("changed")
    monkeypatch.setattr(cpu_jit, "__file__", str(source))
    folders.add(folder())
    monkeypatch.undo()
    assert len(folders) == 4
    assert folder() in folders
