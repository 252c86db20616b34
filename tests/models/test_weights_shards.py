"""What one rank reads of the files, byte for byte, and what memory that takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import toys
from tests.models.test_decoder_ranks import DIVISIBLE
from tests.models.test_loader_quantized import quantized
from tests.ranks import Meeting, ThreadGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kit
from octavo.config import EngineConfig
from octavo.models.decoder import Decoder
from octavo.models.loader import describe, prepare
from octavo.models.sharding import Shard
from octavo.models.weights import Weights
from octavo.quant.base import INT4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


class Made(TorchDispatchMode):
    """Sizes of the tensors that are made, rather than views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        made = [t.untyped_storage() for t in tensors(out)]
        self.sizes += [s.nbytes() for s in made if s.data_ptr() not in given]
        return out


def tensors(of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


def read(path: Path, shard: Shard, *names: str, method: str = "none") -> tuple[Any, int, int]:
    """The product of `names`, the bytes of files read for it, and the largest tensor made."""
    checkpoint, spec, _ = describe(EngineConfig(model=str(path)))
    weights = Weights(spec, Decoder, checkpoint, "cpu", torch.float32, shard=shard)
    with Made() as made, weights.progress() as phase:
        found = weights.matrix(method, *names)
    return found, phase.done, max(made.sizes)


AT = "model.layers.1."
QKV = [f"{AT}self_attn.{name}_proj.weight" for name in "qkv"]
DOWN = f"{AT}mlp.down_proj.weight"


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_slices_and_makes_nothing_larger(size: int, tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path, **DIVISIBLE)  # 8 heads and 2 KV heads of 16, 64 hidden, 128 inner
    for rank in range(size):
        rows = 128 // size + 2 * 32 // min(size, 2)
        found, bytes_read, largest = read(folder, Shard(rank, size), *QKV)
        assert (tuple(found.shape), bytes_read, largest) == ((rows, 64), rows * 256, rows * 256)
        found, bytes_read, largest = read(folder, Shard(rank, size), DOWN)
        assert tuple(found.shape) == (64, 128 // size)
        assert bytes_read == largest == 64 * 128 // size * 4


def test_the_whole_model_is_read_once_by_all_ranks(tmp_path: Path) -> None:
    """But for what is replicated: embedding and norms."""
    folder = kit.tiny(tmp_path, **DIVISIBLE)
    checkpoint, spec, _ = describe(EngineConfig(model=str(folder)))
    totals = []
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        weights = Weights(spec, Decoder, checkpoint, "cpu", torch.float32, shard=shard)
        with weights.progress() as phase:
            totals.append(phase.total)
    replicated = 4 * (259 * 64 + 5 * 64)
    assert totals[1] + totals[2] == totals[0] + replicated


def test_memory_is_asked_for_what_is_read(tmp_path: Path) -> None:
    """Of a checkpoint that is stored quantized, `weight_bytes` is the rank's part of its files."""
    config = EngineConfig(model=str(quantized(tmp_path, "awq", DIVISIBLE)), load_progress=False)
    for rank in range(2):
        group = ThreadGroup(Meeting(2), rank)
        found = prepare(config, kit.cpu_device(), torch.float32, group)
        shard = Shard(rank, 2)
        weights = Weights(found.spec, Decoder, found.checkpoint, "cpu", torch.float32, shard=shard)
        with weights.progress() as phase:
            assert found.weight_bytes == phase.total


def test_blocks_are_read_whole_and_trimmed(tmp_path: Path) -> None:
    """64 inputs are two blocks of 34 bytes: each of four ranks reads one, and uses half of it."""
    _, path = toys.blocks_of("Q8_0", tmp_path / "m.gguf")
    whole, _, _ = read(path, Shard(), DOWN)
    for rank in range(4):
        found, bytes_read, _ = read(path, Shard(rank, 4), DOWN)
        assert torch.equal(found, whole[:, rank * 16 : rank * 16 + 16])
        assert bytes_read == 64 * 34


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_packed_groups_are_read_by_the_part(method: str, tmp_path: Path) -> None:
    """But for GPTQ's g_idx, of the outputs' parts, and scales and zero points, of the inputs'."""
    path = quantized(tmp_path, method, DIVISIBLE)
    whole, all_bytes, _ = read(path, Shard(), *QKV, method=INT4)
    parts = [read(path, Shard(rank, 2), *QKV, method=INT4) for rank in range(2)]
    halves = [part.chunk(2) for part in whole.values().split([128, 32, 32])]
    for rank, (codes, _, _) in enumerate(parts):
        assert torch.equal(codes.values(), torch.cat([half[rank] for half in halves]))
    again = 3 * 64 * 4 if method == "gptq" else 0
    assert sum(count for _, count, _ in parts) == all_bytes + again

    whole, all_bytes, _ = read(path, Shard(), DOWN, method=INT4)
    parts = [read(path, Shard(rank, 2), DOWN, method=INT4) for rank in range(2)]
    assert torch.equal(torch.cat([codes.values() for codes, _, _ in parts], 1), whole.values())
    again = 4 * 64 * (2 + 0.5) if method == "gptq" else 0  # 4 groups of 64 outputs
    assert sum(count for _, count, _ in parts) == all_bytes + again
