"""A mapped file: views of its bytes, and pages that are given back."""

import mmap
from pathlib import Path

import numpy as np

from octavo.checkpoint.mapped import MappedFile


def resident(path: Path) -> int:
    """Bytes of the file's pages that are in this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_pages_that_were_read_are_given_back_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    path.write_bytes(values.tobytes())
    mapped = MappedFile(path)
    view = np.frombuffer(mapped.view(100, len(values) - 5), np.uint8)
    assert (view == values[100:-5]).all()
    assert resident(path) == len(values)
    mapped.release(100, len(values) - 5)
    assert resident(path) <= mmap.PAGESIZE
    assert (view == values[100:-5]).all()
    mapped.release(7, 7)
