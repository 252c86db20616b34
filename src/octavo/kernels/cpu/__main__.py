"""Compile kernels into the cache: what `Kernel.compile_ahead` starts beside a first start.

python -m octavo.kernels.cpu MODULE:MAKER:VARIANT ...
"""

import sys

from octavo.kernels.cpu.kernel import Kernel


def main(names: list[str]) -> int:
    for name in names:
        where, _, variant = name.rpartition(":")
        Kernel(where, variant).load()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
