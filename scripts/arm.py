"""Runs tests on an emulated Arm processor: whether the kernels are right there, never how fast.

    python -m scripts.arm [--features bf16,i8mm,dotprod] [TEST ...]

The first run makes an Arm system in the cache folder, in about three minutes: Debian's Python
with debootstrap, which needs root, and torch and Numba with pip, both as they come for Arm.
qemu-user translates their instructions; kernels are compiled by Numba as they would be on an Arm
machine. Needs qemu-user, debootstrap, dpkg and a package index.
"""

import argparse
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from octavo import log

_ROOT = Path(__file__).parent.parent
_PROGRAMS = ("qemu-aarch64", "debootstrap", "dpkg")
# With the oldest torch that the package takes; its later releases for Arm bring CUDA.
_TORCH = "torch==2.9.1"
_SAME = ("numba", "numpy", "pytest", "pytest-timeout", "hypothesis", "safetensors", "tokenizers",
         "jinja2", "msgspec", "regex", "llguidance")  # fmt: skip
_TESTS = tuple(
    f"tests/kernels/cpu/test_{name}.py"
    for name in (
        "simd",
        "gemm_int8",
        "fused_call",
        "sampling_call",
        "code_rows",
        "gguf",
        "weight_only",
    )
)
FEATURES = "bf16,dotprod,i8mm,neon"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("tests", nargs="*", default=_TESTS, metavar="TEST")
    parser.add_argument(
        "--features", default=FEATURES, help="what the processor has, in LLVM's words"
    )
    args = parser.parse_args()
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    system = log.cache_dir() / "arm"
    if not (system / "complete").exists():
        make(system)
    options = ["-p", "arm_emulation", "-p", "no:cacheprovider", "--timeout", "1200"]
    return python(
        system, ["-m", "pytest", "-q", "-m", "not slow", *options, *args.tests],
        {
            "OCTAVO_ARM_FEATURES": args.features, "OCTAVO_CACHE_DIR": str(system / "octavo"),
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in args.features.split(",")),
        },
    )  # fmt: skip


def make(system: Path) -> None:
    """An Arm system with Python, and the packages that the tests need."""
    shutil.rmtree(system, ignore_errors=True)
    root = system / "root"
    run("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase",
        "--include=python3,libgomp1,libstdc++6", "bookworm", str(root))  # fmt: skip
    # The packages' own scripts, which would run in a second stage, do nothing that is needed here.
    archives = root / "var/cache/apt/archives"
    for package in sorted(archives.glob("*.deb")):
        run("dpkg", "-x", str(package), str(root))
    shutil.rmtree(archives)
    # pip itself is emulated, so that it takes what an Arm machine would.
    spec = find_spec("pip")
    assert spec
    assert spec.origin
    shutil.copytree(Path(spec.origin).parent, system / "pip" / "pip")
    wanted = [_TORCH, *(f"{name}=={version(name)}" for name in _SAME)]
    words = ["-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
    words += ["--root-user-action=ignore", "--target", str(system / "site"), *wanted]
    if python(system, words, {"PYTHONPATH": str(system / "pip")}):
        raise SystemExit(1)
    (system / "complete").touch()


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def python(system: Path, words: list[str], environment: dict[str, str]) -> int:
    """The exit status of the emulated Python."""
    interpreter = next((system / "root/usr/bin").glob("python3.[0-9]*"))
    paths = [_ROOT / "src", _ROOT / "tests", system / "site"]
    return subprocess.run(
        ["qemu-aarch64", "-cpu", "max", "-L", str(system / "root"), str(interpreter), *words],
        cwd=_ROOT,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", **environment,
        },
        check=False,
    ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
