"""Compile kernels for the processors of `octavo.kernels.cpu.shipped`, to travel in a wheel.

    python -m scripts.shipped_kernels [--processor NAME] [--remove]

Each processor has a process of its own, as the sources of kernels are written for one. Takes
minutes for each. --remove: delete what was written, after a wheel was built.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from octavo.kernels.codes import Form, linear
from octavo.kernels.cpu import object_cache, shipped, target
from octavo.kernels.cpu.arguments import Arguments
from octavo.quant.registry import BLOCKS

_ROOT = Path(__file__).parent.parent
# What AWQ, GPTQ and rounding make, beside the forms of GGUF's blocks.
_FORMS = (
    Form(4, 32, "half", "minimum", linear(4, 0)),
    Form(4, 128, "half", "zero", linear(4, 0)),
    Form(4, 128, "half", "none", linear(4, -8)),
    Form(8, 64, "half", "none", linear(8, -128)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--processor", choices=sorted(shipped.PROCESSORS), help="only this one")
    parser.add_argument("--remove", action="store_true", help="delete all of them")
    args = parser.parse_args()
    if args.remove:
        shutil.rmtree(shipped.parent(), ignore_errors=True)
    elif args.processor:
        write(args.processor, shipped.parent() / args.processor)
    else:
        for name in shipped.PROCESSORS:
            command = [sys.executable, "-m", "scripts.shipped_kernels", "--processor", name]
            subprocess.run(command, cwd=_ROOT, check=True)
    return 0


def write(processor: str, folder: Path, only: Iterable[str] | None = None) -> None:
    """The folder of a processor. only: names of kernels, as `wanted` has them (None: all)."""
    features = shipped.PROCESSORS[processor]
    # Numba compiles what it reads, too, and cannot select AMX's instructions for a processor
    # without them.
    words = ",".join(f"+{feature}" for feature in sorted(features))
    with (
        mock.patch.object(target, "cpu", return_value=(processor, features)),
        mock.patch.multiple("numba.core.config", CPU_NAME=processor, CPU_FEATURES=words),
    ):
        from octavo.kernels.cpu.kernel import Kernel

        shutil.rmtree(folder, ignore_errors=True)
        for name in wanted() if only is None else only:
            where, _, variant = name.rpartition(":")
            kernel = Kernel(where, variant)
            file = shipped.file_of(folder, where.partition(":")[0], kernel.name)
            object_cache.store(file, kernel.compiled())
    (folder / shipped.SOURCES).write_text(object_cache.sources_digest())


def wanted() -> list[str]:
    """The kernels that common models start with, in the type that is the processor's default."""
    from octavo.kernels.cpu import abi

    name = "bfloat16" if target.has_bf16() else "float32"
    has_tiles = {"amx-tile", "amx-bf16"} <= target.cpu()[1]
    attention = "tiles" if has_tiles else name
    forms = {*_FORMS, *(codec.form for codec in BLOCKS.values())}
    products = {f"{_bits(form)}-{form.terms}-{form.offset}-{name}" for form in forms}
    tables = {
        f"{form.bits}-{form.terms}-{form.offset}-{name}" for form in forms if form.offset != "zero"
    }
    floats = ("bfloat16",) if name == "bfloat16" else ("bfloat16", "float16", "float32")
    dense: list[tuple[Arguments, Iterable[str]]] = [
        (abi.GEMM_VECTORS, [f"{weight}-{name}" for weight in floats]),
        (abi.PACK_VECTORS, floats),
    ]
    if has_tiles:
        dense = [(abi.GEMM_BF16, ("plain", "silu"))]
    listed: list[tuple[Arguments, Iterable[str]]] = [
        *dense,
        (abi.ATTENTION, (attention, f"{attention}-int8")),
        (abi.RMS_NORM, (name, *([f"{name}-wide"] if name != "float32" else []))),
        (abi.ROPE_WRITE, (name, f"{name}-int8")),
        (abi.ACTIVATION, (f"silu-{name}", f"gelu-{name}")),
        (abi.ADD, (name,)),
        (abi.DRAW, ("",)),
        (abi.LOGPROBS, ("",)),
        (abi.COPIES, ("",)),
        (abi.PROGRAM, ("",)),
        (abi.GGUF_PACK, sorted(BLOCKS)),
        (abi.WEIGHT_ONLY_TILES if has_tiles else abi.WEIGHT_ONLY, sorted(products)),
        (abi.CODE_ROWS, sorted(tables)),
        (abi.EXTENTS, ("bfloat16", "float32")),
        (abi.CODES_PACK, [f"{bits}-{kind}" for bits in (4, 8) for kind in ("bfloat16", "codes")]),
    ]
    return [f"{kind.kernel}:{variant}" for kind, variants in listed for variant in variants]


def _bits(form: Form) -> str:
    return f"{form.bits}" if form.is_linear else f"{form.bits}table"


if __name__ == "__main__":
    sys.exit(main())
