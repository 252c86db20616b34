"""Kernels for GPUs without a GPU: interpreted, or compiled only (test_*_compiled.py).

Whether Triton interprets a kernel is decided when its module is imported, so the interpreted tests
run in a process of their own: see test_gpu.py. The interpreter multiplies no bfloat16, so kernels
are judged in float32 and float16.
"""

from pathlib import Path

import triton


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The other kind of tests."""
    if collection_path.suffix != ".py":
        return None
    compiled = collection_path.stem.endswith("_compiled")
    return True if compiled == triton.knobs.runtime.interpret else None
