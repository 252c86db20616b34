"""Compiles Triton kernels for a GPU that is not here, and reads what the assembler says of them."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
# Bytes of shared memory that one program can have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Compiled:
    """registers: of a thread; spilled, shared: bytes, of a thread and of a program."""

    registers: int
    spilled: int
    shared: int
    ptx: str

    def count(self, instruction: str) -> int:
        return len(re.findall(instruction, self.ptx))


def compile_for(
    capability: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    unaligned: tuple[str, ...] = (),
) -> Compiled:
    """`kernel` for compute capability `capability` / 10.

    types: of the arguments that are no constants, such as "*bf16" or "i32". Pointers are taken as
    aligned to 16 bytes and integers as multiples of 16, as a launch finds them, except `unaligned`.
    """
    names = kernel.arg_names
    specialized = [n for n in names if n in types and n not in unaligned
                   and types[n] not in ("fp32", "fp64")]  # fmt: skip
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in specialized},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    return Compiled(*_assembled(ptx, capability), built.metadata.shared, ptx)


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """(registers, bytes spilled)"""
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        said = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={architecture[1]}", path, "-o",
             os.path.join(folder, "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spills is not None, said
    return int(registers[1]), int(spills[1]) + int(spills[2])
