"""The kernels made for AMX, on emulated tile instructions (see `amx_emulation`).

The tests that need AMX run in a process of their own, with the plugin and an empty cache folder.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu import target

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not {"avx512f", "avx512bf16"} <= target.cpu()[1], reason="AMX is emulated on AVX-512 BF16 only"
)


def emulated(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python with AMX emulated."""
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True
    )


def run_tests(folder: Path, *arguments: str) -> None:
    command = ("-m", "pytest", "-p", "amx_emulation", "--timeout", "500")  # each compiles kernels
    done = emulated(folder, *command, *arguments)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert " passed" in done.stdout
    assert "no AMX" not in done.stdout


@pytest.mark.timeout(300)
def test_dense_products(tmp_path: Path) -> None:
    run_tests(tmp_path, "-v", "tests/kernels/cpu/test_gemm_bf16.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("attention/test_cpu.py", "tiles or threads or views or dtype"),
        ("kernels/cpu/test_gemm_int8.py", ""),
        ("kernels/cpu/test_weight_only.py", "dtype1"),
        ("kernels/cpu/test_weight_only_tiles.py", "to_the_bit"),
        ("kernels/cpu/test_weight_only_tiles.py", "not to_the_bit"),
        ("test_same_answer.py", "tiles"),
        ("runner/test_steps.py", ""),
    ],
)
def test_everything_that_needs_amx(file: str, chosen: str, tmp_path: Path) -> None:
    run_tests(tmp_path, "-v", f"tests/{file}", "-k", chosen)


MISUSE = """
import sys
import amx_emulation
amx_emulation.install()
import torch
from octavo.kernels.cpu import amx, compile, object_cache, openmp
from octavo.kernels.cpu.simd import I64, jit, op
from numba import types

@op(types.void, types.int64)
def store(b, to):
    amx.store_tiles(b, 1, 1, to, I64(64))

@jit
def run(a, fault):
    if fault != "unconfigured":
        amx.configure(a, 16 if fault != "malformed" else 17, 16)
    if fault == "released":
        amx.release()
    store(a + 64)

fault = sys.argv[1]

def kernel(a: int) -> None:
    run(a, fault)

code = compile.object_code(kernel, "kernel")
openmp.Function(object_cache.link(code, "kernel"))(bytes(2048))
print("done")
"""


SLOW = pytest.mark.slow  # each fault takes a process that compiles
FAULTS = ("none", "unconfigured", *(pytest.param(f, marks=SLOW) for f in ("released", "malformed")))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_processor_faults_on_ends_the_process(fault: str, tmp_path: Path) -> None:
    done = emulated(tmp_path, "-c", MISUSE, fault)
    assert done.returncode == (0 if fault == "none" else -signal.SIGILL), done.stderr
    assert ("done" in done.stdout) == (fault == "none")
