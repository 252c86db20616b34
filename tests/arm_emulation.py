"""A pytest plugin (`-p arm_emulation`) for tests that run in qemu's user mode (`scripts/arm.py`).

LLVM asks the system for the features of an Arm processor, and qemu shows it those of the host. So
they are given: in the environment variable OCTAVO_ARM_FEATURES, in LLVM's words.
"""

import os

from octavo.kernels.cpu import target

_FEATURES = frozenset(filter(None, os.environ.get("OCTAVO_ARM_FEATURES", "").split(",")))


def pytest_configure() -> None:
    target.cpu = lambda: ("generic", _FEATURES)
