"""The CPU as a device: what it offers, and that it can be kept from changing the allocator."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests import kit

from octavo.config import EngineConfig
from octavo.kernels import reference
from octavo.kernels.cpu import abi, huge_pages, memory, object_cache, openmp
from octavo.kernels.cpu.kernel import Kernel, kernel
from octavo.runner.device import cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_kernels_of_its_own(dtype):
    ops = kit.cpu_device().ops(dtype)
    assert "CpuOps.rms_norm" in ops.explain()["rms_norm"]
    assert str(dtype) in ops.explain()["silu_and_mul"]


def test_what_has_no_kernel_runs_the_reference_and_says_so():
    ops = kit.cpu_device().ops(torch.float16)
    assert ops.rms_norm is reference.rms_norm
    assert "no kernels for cpu in torch.float16" in ops.explain()["rope"]


def test_inputs_are_the_arrays_themselves():
    array = np.arange(6, dtype=np.int64)
    tensor = kit.cpu_device().tensor("token_ids", array)
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2, 3, 4, 5]
    gaps = kit.cpu_device().tensor("token_ids", array[::2])
    assert gaps.tolist() == [7, 2, 4]


def test_compiled_decoders_are_for_host_memory_in_the_types_they_know():
    raw = torch.zeros(34, dtype=torch.uint8)
    device = kit.cpu_device()
    out = torch.full((32,), torch.nan)
    assert device.decode_blocks("Q8_0", 1, raw, out)
    assert out.tolist() == [0] * 32
    assert not device.decode_blocks("Q8_0", 1, raw, torch.empty(32, dtype=torch.float64))
    assert not device.decode_blocks("Q8_0", 1, raw, torch.empty(32, device="meta"))


def test_without_huge_pages_nothing_is_asked_of_the_allocator(monkeypatch):
    def refused(*_):
        raise AssertionError

    for name in ("loading", "request", "prepare_heap", "collapse"):
        monkeypatch.setattr(huge_pages, name, refused)
    device = cpu(EngineConfig(huge_pages=False))
    with device.loading():
        assert device.empty((3,), torch.float32).shape == (3,)
        assert device.host_empty((3,), torch.float32).shape == (3,)
    with pytest.raises(AssertionError):
        kit.cpu_device().loading()


def test_an_llm_without_huge_pages_moves_no_memory(tmp_path):
    """In a process of its own: the allocator is changed for ever by the first LLM without."""
    kit.tiny(tmp_path)
    code = """
import sys, ctypes
from octavo import LLM
from octavo.kernels.cpu import huge_pages
libc = huge_pages._libc()
made = LLM(sys.argv[1], huge_pages=sys.argv[2] == "True", load_progress=False, swap_space=0,
           num_gpu_blocks_override=8, max_model_len=64)
print(huge_pages.prepare_heap.cache_info().currsize)
"""
    for wanted in (False, True):
        command = [sys.executable, "-c", code, str(tmp_path), str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(int(wanted))], done.stderr


def test_memory_is_the_machine_s():
    assert kit.cpu_device().memory().total <= memory.installed_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_over_ranks_are_compiled_ahead_where_there_are_ranks(ranks, monkeypatch):
    wanted = []
    monkeypatch.setattr(Kernel, "compile_ahead", lambda first, others: wanted.extend(others))
    cpu(EngineConfig(dtype="float32", tensor_parallel_size=ranks)).start()
    assert (kernel(abi.ALL_REDUCE, "float32") in wanted) == (ranks > 1)


def test_a_peak_with_compilation_in_it_is_measured_again(monkeypatch):
    """On a first start, what the compiler takes is not what steps take."""
    monkeypatch.setattr(object_cache, "object_file", lambda module, name: None)  # there is no cache
    monkeypatch.setattr(object_cache, "link", lambda code, name: 1)
    monkeypatch.setattr(openmp, "Function", lambda address: None)
    hungry: list[bytes] = []

    def compile_it(self):
        hungry.append(b"x" * 150_000_000)
        return b"code"

    monkeypatch.setattr(Kernel, "compiled", compile_it)
    steps = []

    def step(made):
        steps.append(made)
        made.load()

    one = Kernel("nowhere:made")
    assert cpu(EngineConfig()).peak_of(lambda: step(one)) < 50_000_000
    assert len(steps) == 2
    assert cpu(EngineConfig()).peak_of(lambda: step(one)) < 50_000_000
    assert len(steps) == 3  # a warm start measures once
    # Ranks of one model must run the same steps, whichever of them compiles.
    several = cpu(EngineConfig(tensor_parallel_size=2))
    several.peak_of(lambda: step(Kernel("nowhere:other")))
    assert len(steps) == 4
