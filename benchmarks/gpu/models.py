"""Models of the shapes of known ones, with seeded random weights: nothing is downloaded.

A checkpoint here is a header and a hole: the file of the weights has its full size and takes no
space. The weights are made where they are needed.
"""

import json
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.section import Scale, median_ms
from benchmarks.llama_shapes import SHAPES, Shape
from octavo.config import EngineConfig
from octavo.core.plan import PlanRow, SampleSpec, StepPlan
from octavo.models import loader
from octavo.models.weights import Weights
from octavo.params import SamplingParams
from octavo.runner.model_runner import ModelRunner


class RandomWeights(Weights):
    """Normal values of a suitable size, the same on every device of one kind for one seed.

    on_host: made in host memory, so that they are the same on all devices.
    """

    on_host = False

    def take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        parts = [self._made(name, dtype or self._dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def matrix(self, method: str, *names: str) -> torch.Tensor:
        return self.take(*names).flatten(0, -2)

    def _made(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self._advance(self._sources.pop(name))
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        device = "cpu" if self.on_host else self._device
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=torch.float32 if self.on_host else dtype, device=device)
        scale = 1.0 if "embed" in name else 1.0 / math.sqrt(shape[-1])
        return values.normal_(0, scale, generator=generator).to(self._device, dtype)


class HostRandomWeights(RandomWeights):
    on_host = True


def write(folder: Path, shape: Shape) -> Path:
    """A checkpoint of `shape` whose values are a hole in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    entries: dict[str, Any] = {}
    end = 0
    for name, dims in shape.tensors().items():
        begin, end = end, end + 2 * math.prod(dims)
        entries[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return folder


def start(folder: Path, scale: Scale, same_everywhere: bool = False, **options: Any) -> ModelRunner:
    """A runner of the checkpoint in `folder` with random weights, and random values as KV.

    same_everywhere: the weights are the same on every device.
    """
    given = {"model": str(folder), "device": scale.device, "load_progress": False, **options}
    given.setdefault("dtype", "float32" if scale.dry else "bfloat16")
    kind = HostRandomWeights if same_everywhere else RandomWeights
    with patch.object(loader, "Weights", kind):
        runner = ModelRunner(EngineConfig.from_options(given))
    for tensor in runner.cache.tensors:
        if tensor.dtype.itemsize > 1:
            tensor[1:].normal_()
    return runner


def step_ms(scale: Scale, runner: ModelRunner, plan: StepPlan, repeats: int) -> float:
    """The median time of a step, after one that is not counted."""
    runner.execute(plan)
    return median_ms(scale, lambda: runner.execute(plan), repeats)


# What is compiled beside the first sections: shapes, and options.
AHEAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("8B", {}),
    ("1B", {}),
    ("13B", {}),
    ("toy", {"dtype": "float32"}),
    ("1B of 4 layers", {"dtype": "float32"}),
    ("toy", {"dtype": "float32", "device": "cpu"}),
)


def compile_ahead(folder: Path, scale: Scale, number: int) -> None:
    """Start an engine with one layer of a shape: its kernels are then in the caches on disk."""
    name, options = AHEAD[number]
    sizes: dict[str, Any] = {} if "device" in options else {"cuda_graph_sizes": "1"}
    start(
        write(folder, replace(SHAPES[name], layers=1)), scale, max_num_seqs=256,
        num_gpu_blocks_override=1024, max_model_len=4096, swap_space=0, **sizes, **options,
    ).close()  # fmt: skip


_GREEDY = SamplingParams(temperature=0)


def decode_step(runner: ModelRunner, rows: int, context: int) -> StepPlan:
    """A step in which each of `rows` sequences of `context` tokens gains one."""
    blocks = -(-context // runner.limits.block_size)
    return _step(runner, [(1, context - 1, 1 + row * blocks, blocks) for row in range(rows)])


def prefill_step(runner: ModelRunner, rows: int, tokens: int) -> StepPlan:
    """A step that computes `rows` prompts of `tokens` tokens."""
    blocks = -(-tokens // runner.limits.block_size)
    return _step(runner, [(tokens, 0, 1 + row * blocks, blocks) for row in range(rows)])


def _step(runner: ModelRunner, rows: list[tuple[int, int, int, int]]) -> StepPlan:
    """rows: (tokens, first position, first block, blocks)"""
    assert all(first + blocks <= runner.limits.num_blocks for *_, first, blocks in rows)
    vocab = runner.limits.vocab_size
    return StepPlan(1, tuple(
        PlanRow(
            str(n), tuple((7 * i + n) % vocab for i in range(tokens)), begin,
            (tuple(range(first, first + blocks)),), (SampleSpec(_GREEDY, 0, 0, 0),),
        )
        for n, (tokens, begin, first, blocks) in enumerate(rows)
    ))  # fmt: skip


def most_rows(runner: ModelRunner, context: int) -> int:
    """How many sequences of `context` tokens the pool holds."""
    return (runner.limits.num_blocks - 1) // -(-context // runner.limits.block_size)


def size(scale: Scale, name: str) -> Shape:
    """The shape called `name`, or in a dry run the toy."""
    return SHAPES["toy" if scale.dry else name]
