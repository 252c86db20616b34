"""What the sections of the check share: their scale, and rows that are safe once they are made."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton


@dataclass(frozen=True)
class Scale:
    """dry: tiny shapes in Triton's interpreter, which show that the sections run, and no speed."""

    dry: bool
    until: float  # seconds of `time.monotonic`: no new work after it

    @property
    def device(self) -> str:
        return "interpret" if self.dry else "cuda"

    @property
    def torch_device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until


class Rows:
    """Results, one JSON object a line, on the disk before the next one is measured."""

    def __init__(self, path: Path, section: str) -> None:
        self._path, self._section = path, section

    def add(self, **values: Any) -> None:
        line = json.dumps({"section": self._section, **values})
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line, flush=True)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that are compiled, or loaded from the disk, meanwhile. None should be, once an
    engine is ready."""
    names: list[str] = []

    def note(**event: Any) -> None:
        names.append(event["fn"].name)

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def synchronize(scale: Scale) -> None:
    if not scale.dry:
        torch.cuda.synchronize()


def median_ms(scale: Scale, run: Callable[[], object], repeats: int) -> float:
    """The median time of `run`, which may return before the device has finished."""
    times = []
    for _ in range(1 if scale.dry else repeats):
        synchronize(scale)
        begin = time.perf_counter()
        run()
        synchronize(scale)
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference over that of `expected`; NaN if either has one."""
    difference = (got.double() - expected.double()).square().mean()
    return float((difference / expected.double().square().mean()).sqrt())
