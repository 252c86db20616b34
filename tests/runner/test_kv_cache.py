"""The pool's tensors and the plan's copies."""

import dataclasses

import pytest
import torch
from tests import kit
from tests.runner.accelerator import FakeAccelerator

from octavo.attention.base import AttentionSpec
from octavo.attention.cpu import CpuAttention
from octavo.attention.torch_ref import TorchAttention
from octavo.config import EngineConfig
from octavo.core.plan import FULL, BlockCopy, CacheSpec
from octavo.errors import ConfigError
from octavo.runner.kv_cache import KVCache, kv_layout
from paging import CODES, metadata

CPU = kit.cpu_device()
SPECS = [AttentionSpec(4, 2, 8, 1.0), AttentionSpec(4, 1, 16, 1.0)]


@pytest.fixture
def cache():
    made = KVCache(TorchAttention(), SPECS, 8, 4, torch.float32, CPU, num_host_blocks=5)
    for pool in (made.layers, made.host):
        for number, layer in enumerate(pool):
            for block in range(len(layer)):
                layer[block] = 100 * (pool is made.host) + 10 * number + block
    return made


def values(pool, number=0):
    return [float(block.flatten()[0]) for block in pool[number]]


def test_copies_within_the_pool_out_and_back(cache):
    cache.copy([BlockCopy("copy", 1, 2), BlockCopy("out", 3, 0), BlockCopy("in", 4, 5)])
    assert values(cache.layers)[2] == 1
    assert values(cache.host)[0] == 3
    assert values(cache.layers)[5] == 104
    assert values(cache.layers, 1)[2] == 11


def test_order_is_kept(cache):
    """A block may be written by one copy and read by the next, or freed and used again."""
    cache.copy(
        [BlockCopy("copy", 1, 2), BlockCopy("copy", 2, 3), BlockCopy("out", 3, 1),
         BlockCopy("in", 1, 6), BlockCopy("copy", 6, 7)]
    )  # fmt: skip
    assert values(cache.layers)[2:4] == [1, 1]
    assert values(cache.layers)[6:] == [1, 1]
    # A target that an earlier copy of the run reads must not be overwritten before it.
    cache.copy([BlockCopy("copy", 4, 5), BlockCopy("copy", 0, 4)])
    assert values(cache.layers)[4:6] == [0, 4]


def test_every_value_of_a_block_is_copied(cache):
    whole = torch.randn_like(cache.layers[0][1])
    cache.layers[0][1] = whole
    cache.copy([BlockCopy("copy", 1, 2)])
    assert torch.equal(cache.layers[0][2], whole)


def test_block_bytes_is_what_the_tensors_take(cache):
    total = sum(layer.numel() * layer.element_size() for layer in cache.layers)
    assert cache.layout.block_bytes * 8 == total


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("backend", [CpuAttention, TorchAttention])
def test_codes_move_with_their_scales_and_take_a_byte_each(backend, codes):
    specs = [AttentionSpec(4, 2, 64, 0.125)]
    made = KVCache(backend(), specs, 8, 16, codes, CPU, num_host_blocks=5)
    assert made.layout.block_bytes == 16 * 2 * 2 * (64 + 4)
    assert kv_layout(backend(), specs, 16, torch.bfloat16).block_bytes == 16 * 2 * 2 * 64 * 2
    k, v = torch.randn(2, 30, 2, 64).bfloat16()
    step = metadata([(30, 30)], 16)
    made_by, q = backend(), torch.randn(30, 4, 64).bfloat16()
    made_by.write(k, v, made.layers[0], step)
    before = made_by.attend(q, made.layers[0], step, specs[0])
    first, second = step.block_tables[0].tolist()
    made.copy([BlockCopy("out", first, 4), BlockCopy("copy", second, 5), BlockCopy("in", 4, 6)])
    made.layers[0].view(torch.uint8)[:5] = 0xFF
    moved = dataclasses.replace(step, block_tables=torch.tensor([[6, 5]], dtype=torch.int32))
    assert torch.equal(made_by.attend(q, made.layers[0], moved, specs[0]), before)


def test_the_host_pool_may_lie_on_a_disk(tmp_path):
    made = KVCache(
        TorchAttention(), SPECS, 8, 4, torch.float32, CPU, num_host_blocks=5,
        swap_path=str(tmp_path),
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, however the process ends
    value = torch.randn_like(made.layers[1][3])
    made.layers[1][3] = value
    made.copy([BlockCopy("out", 3, 4)])
    made.layers[1][3] = 0
    made.copy([BlockCopy("in", 4, 6)])
    assert torch.equal(made.layers[1][6], value)


def test_a_swap_path_that_cannot_be_used_is_refused(tmp_path):
    def make(path, blocks=5):
        KVCache(TorchAttention(), SPECS, 8, 4, torch.float32, CPU, blocks, str(path))

    with pytest.raises(ConfigError, match=r"swap_path.*nowhere.*No such file"):
        make(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"swap_path.*Not a directory"):
        make(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"swap_path.*cannot hold"):
        make(tmp_path, 2**45)
    with pytest.raises(ConfigError, match=r"swap_path '~nobody-of-that-name/x'.*No such file"):
        make("~nobody-of-that-name/x")


@pytest.fixture
def accelerated():
    device = FakeAccelerator(EngineConfig())
    specs = [AttentionSpec(4, 2, 8, 1.0)] * 3
    made = KVCache(TorchAttention(), specs, 8, 4, torch.float32, device, num_host_blocks=5)
    for number, layer in enumerate(made.layers):
        for block in range(len(layer)):
            layer[block] = 10 * number + block
    return made


def test_on_an_accelerator_a_block_is_one_piece_of_memory(accelerated):
    assert [layer.shape[0] for layer in accelerated.layers] == [8, 8, 8]
    assert len({layer.untyped_storage().data_ptr() for layer in accelerated.layers}) == 1
    assert accelerated.layers[1][2].is_contiguous()
    assert len(accelerated.host) == 1
    accelerated.copy(
        [BlockCopy("copy", 1, 2), BlockCopy("copy", 2, 3), BlockCopy("out", 3, 1),
         BlockCopy("in", 1, 6), BlockCopy("copy", 4, 5), BlockCopy("copy", 0, 4)]
    )  # fmt: skip
    for number in range(3):
        wanted = [0, 1, 1, 1, 0, 4, 1, 7]
        assert values(accelerated.layers, number) == [10 * number + value for value in wanted]


def layout(windows, head_dim=16):
    specs = [AttentionSpec(4, 2, head_dim, 1.0, window) for window in windows]
    return kv_layout(CpuAttention(), specs, 16, torch.bfloat16)


def test_layers_of_one_kind_are_one_group():
    for windows in ([None] * 5, [64] * 5):
        found = layout(windows)
        assert found.groups == (AttentionSpec(4, 2, 16, 1.0, windows[0]).cache,)
        assert found.places == tuple((0, layer) for layer in range(5))
        assert found.block_bytes == 5 * 16 * 2 * 2 * 16 * 2


def test_gemma_3_270m_has_five_groups_of_windows_to_one():
    found = layout([None if n % 6 == 5 else 512 for n in range(18)])
    assert found.groups == (*[CacheSpec("window", 512)] * 5, FULL)
    assert found.block_bytes == 3 * 16 * 2 * 2 * 16 * 2
    assert [found.places[layer] for layer in (0, 1, 2, 3, 5, 11, 17)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (5, 0), (5, 1), (5, 2),
    ]  # fmt: skip
    assert len(set(found.places)) == 18


@pytest.mark.parametrize(
    ("num_windows", "num_full", "size"),
    [(13, 13, 13), (22, 4, 4), (29, 5, 5), (28, 27, 28), (10, 4, 2), (5, 3, 1)],
)
def test_groups_are_as_large_as_they_can_be_with_little_padding(num_windows, num_full, size):
    """Gemma 2 2B, Gemma 3 1B and 4B, and odd counts."""
    found = layout([32] * num_windows + [None] * num_full)
    assert found.block_bytes == size * 16 * 2 * 2 * 16 * 2
    assert len(found.groups) == -(-num_windows // size) + -(-num_full // size)
    assert len(set(found.places)) == num_windows + num_full


def test_layers_of_different_shapes_cannot_share_blocks():
    specs = [AttentionSpec(4, 2, 16, 1.0, 32), AttentionSpec(4, 2, 32, 1.0)]
    found = kv_layout(CpuAttention(), specs, 16, torch.bfloat16)
    assert found.groups == (FULL,)
    assert found.places == ((0, 0), (0, 1))


def test_layers_of_groups_share_tensors_and_copies_move_each_once():
    specs = [AttentionSpec(4, 2, 8, 1.0, window) for window in (9, 9, None)]
    made = KVCache(TorchAttention(), specs, 8, 4, torch.float32, CPU, num_host_blocks=5)
    assert len(made.tensors) == len(made.host) == 1
    assert made.layers[0] is made.layers[1] is made.layers[2]
    made.layers[2][3] = 7.0
    made.copy([BlockCopy("copy", 3, 4), BlockCopy("out", 3, 1), BlockCopy("in", 1, 5)])
    assert made.layers[0][4].eq(7).all()
    assert made.layers[1][5].eq(7).all()
    assert made.per_layer(["a", "b", "c"]) == ["a", "b", "c"]
