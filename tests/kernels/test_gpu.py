"""Runs the tests in tests/kernels/gpu in Triton's interpreter.

Whether a kernel is interpreted is decided when its module is imported, so they need a process
where nothing was imported without it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def interpreted(*arguments: str) -> None:
    """Run pytest with the interpreter. An access far outside of memory ends that process only."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", *arguments],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(400)
def test_kernels_in_the_interpreter() -> None:
    interpreted("-m", "not slow", "tests/kernels/gpu")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_more_shapes_in_the_interpreter() -> None:
    interpreted("-m", "slow", "tests/kernels/gpu")
