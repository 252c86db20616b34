"""The processor that kernels are compiled for: its name, its features, and what they allow.

Imports neither Numba nor torch, so that a warm start can find the code that it needs.
"""

import ctypes
from functools import lru_cache

from octavo import log

# oneDNN's name of a limit -> the LLVM processor of that kind, and features beyond it.
_LIMITS = {
    "AVX2": ("haswell", ("avx10", "avx512", "amx", "evex")),
    "AVX512_CORE": ("skylake-avx512", ("avx10", "avx512bf16", "avx512fp16", "amx")),
    "AVX512_CORE_BF16": ("cooperlake", ("avx10", "avx512fp16", "amx")),
}


@lru_cache(maxsize=1)
def cpu() -> tuple[str, frozenset[str]]:
    """Name and features of the processor, as LLVM calls them.

    ONEDNN_MAX_CPU_ISA, which limits the GEMMs of torch, also limits the kernels, so that a
    machine can be benchmarked as an older one.
    """
    import llvmlite.binding as llvm

    name, found = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    features = {feature for feature, present in found.items() if present}
    name, beyond = _LIMITS.get(log.instruction_limit(), (name, ()))
    return name, frozenset(f for f in features if not f.startswith(beyond))


@lru_cache(maxsize=1)
def has_tiles() -> bool:
    """Whether this processor has AMX for bfloat16 and the system lets this process use it.

    Linux disables the tile registers until a process asks for them (arch_prctl,
    ARCH_REQ_XCOMP_PERM, feature 18: tile data); else the first tile instruction would kill it.
    """
    features = cpu()[1]
    if not {"amx-tile", "amx-bf16", "avx512bf16"} <= features:
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
    except (OSError, AttributeError):
        return False


def int8_unit() -> str:
    """What multiplies int8: "tiles" (AMX) or "vector"."""
    return "tiles" if has_tiles() and "amx-int8" in cpu()[1] else "vector"


def has_dot() -> bool:
    """Whether vectors multiply pairs of bfloat16 (AVX-512 BF16)."""
    return {"avx512f", "avx512bf16"} <= cpu()[1]


def has_fma() -> bool:
    """Whether vectors of 8 float32 or more multiply and add at once, and convert from float16."""
    return {"avx2", "fma", "f16c"} <= cpu()[1]


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware."""
    return bool({"avx512bf16", "amx-bf16", "bf16"} & cpu()[1])
