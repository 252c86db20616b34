"""Compiled kernels that travel in a wheel, for processors that many people have.

A folder for each processor holds the object code of kernels, written by `object_cache.store`, which
adds a digest to each, and a file of the digest of the sources that they were compiled from. It is
used by a processor that has all the instructions in it, and none that kernels would make other use
of, while the sources are the same. `scripts/shipped_kernels.py` writes it; a source checkout has
none. Imports no Numba.
"""

import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from octavo.kernels.cpu import object_cache, target

SOURCES = "sources.sha256"
_HASWELL = frozenset(
    ("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "cx16", "cx8", "f16c", "fma", "fxsr", "lzcnt",
     "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave")
)  # fmt: skip
_CASCADE_LAKE = _HASWELL | {
    "adx", "aes", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512vnni",
    "clflushopt", "pclmul", "prfchw",
}  # fmt: skip
_NEWER = {"avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "gfni",
          "vaes", "vpclmulqdq"}  # fmt: skip
# LLVM's names of processors -> the instructions that are used of each, the best first.
PROCESSORS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "sapphirerapids": _CASCADE_LAKE | _NEWER | {"avx512bf16", "avx512fp16", "avxvnni",
                                                    "amx-tile", "amx-bf16", "amx-int8"},
        "znver4": _CASCADE_LAKE | _NEWER | {"avx512bf16"},
        "cascadelake": _CASCADE_LAKE,
        "haswell": _HASWELL,
    }
)  # fmt: skip
# What the sources of kernels, and their callers, ask for: code differs in kind, not only in speed.
_DECIDING = frozenset(
    ("avx2", "avx512f", "avx512bw", "avx512dq", "avx512bf16", "avx512vnni", "avxvnni", "amx-tile",
     "amx-bf16", "amx-int8")
)  # fmt: skip
_FOLDER = "shipped"


def processor_of(features: frozenset[str]) -> str | None:
    """Of PROCESSORS, the best whose code a processor with these features runs as its own."""
    for name, needed in PROCESSORS.items():
        if needed <= features and _deciding(needed) == _deciding(features):
            return name
    return None


def _deciding(features: frozenset[str]) -> frozenset[str]:
    """Those of _DECIDING; VNNI for vectors of 32 bytes is used only where those of 64 are not."""
    found = features & _DECIDING
    return found - {"avxvnni"} if "avx512f" in found else found


def read(module: str, name: str) -> bytes | None:
    """The object code of kernel `name` of `module`; None if there is none, or it is damaged."""
    folder = _folder()
    return None if folder is None else object_cache.read(file_of(folder, module, name))


def file_of(folder: Path, module: str, name: str) -> Path:
    return folder / f"{module}-{name}.o"


@lru_cache(maxsize=1)
def _folder() -> Path | None:
    """The folder for this processor, if there is one of these sources."""
    if not sys.platform.startswith("linux") or not (shipped := parent()).is_dir():
        return None
    processor = processor_of(target.cpu()[1])
    if processor is None:
        return None
    folder = shipped / processor
    try:
        digest = (folder / SOURCES).read_text().strip()
    except OSError:
        return None
    return folder if digest == object_cache.sources_digest() else None


def parent() -> Path:
    """Where the folders of processors are."""
    return Path(__file__).parent / _FOLDER
