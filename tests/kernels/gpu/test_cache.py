"""The write kernel: the same pages as the reference makes, and the rotary embedding on the way."""

import pytest
import torch

from octavo.attention.base import AttentionSpec, HeadNorms
from octavo.attention.triton import TritonAttention
from octavo.kernels import reference
from paging import CODES, assert_close, metadata

SIZE, HEADS, DIM = 16, 3, 40


def _page(cache: torch.Tensor, kind: int) -> torch.Tensor:
    """Codes or values [blocks, heads, SIZE, DIM]."""
    return cache[:, kind, :, : SIZE * DIM].reshape(-1, HEADS, SIZE, DIM)


def _written(key: torch.Tensor, value: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    backend, spec = TritonAttention(), AttentionSpec(6, HEADS, DIM, 1.0)
    shape, dtype = backend.kv_layout(spec, 4, SIZE, kind)
    cache = torch.zeros(shape, dtype=dtype)
    backend.write(key, value, cache, metadata([(len(key), len(key))], SIZE))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_are_stored_as_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    key, value = (torch.randn(21, HEADS, DIM).to(dtype) for _ in range(2))
    meta = metadata([(21, 21)], SIZE)
    cache = _written(key, value, dtype)
    block, offset = meta.slots // SIZE, meta.slots % SIZE
    for kind, x in enumerate((key, value)):
        assert torch.equal(_page(cache, kind)[block, :, offset], x)
    untouched = torch.ones(4 * SIZE, dtype=torch.bool)
    untouched[meta.slots] = False
    pages = _page(cache, 0).transpose(1, 2).flatten(0, 1)
    assert not pages[untouched].any()


# NumPy, in which the interpreter computes, warns of infinity times zero.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", CODES)
def test_codes_equal_the_reference(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    key = torch.randn(20, HEADS, DIM) * torch.logspace(-4, 4, 20)[:, None, None]
    key[3, 1] = 0.0
    key[4, 2, 5] = torch.inf
    key[5, 0, 7] = torch.nan
    key[6, 0] = torch.linspace(-1, 1, DIM) * 2.0**-7  # subnormals of e4m3, were the scale one
    key[6, 0, 0] = 448.0
    value = torch.randn(20, HEADS, DIM)
    meta = metadata([(20, 20)], SIZE)
    cache = _written(key, value, kind)
    block, offset = meta.slots // SIZE, meta.slots % SIZE
    for part, x in enumerate((key, value)):
        codes, scales = reference.quantize_kv(x, kind)
        stored = cache[:, part, :, SIZE * DIM :].contiguous().view(torch.float32)[block, :, offset]
        assert torch.equal(stored.isnan(), scales.isnan())
        assert torch.equal(stored.nan_to_num(), scales.nan_to_num())
        finite = ~scales.isnan()
        got = _page(cache.view(torch.uint8), part)[block, :, offset]
        assert torch.equal(got[finite], codes.view(torch.uint8)[finite])


@pytest.mark.parametrize("rotated", [DIM, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotary_embedding_on_the_way(dtype: torch.dtype, rotated: int) -> None:
    torch.manual_seed(0)
    backend, spec = TritonAttention(), AttentionSpec(6, HEADS, DIM, 1.0)
    meta = metadata([(5, 19), (2, 2)], SIZE)
    qkv = torch.randn(7, 12, DIM).to(dtype)
    query, key, value = qkv.clone().split([6, HEADS, HEADS], 1)
    angles = torch.rand(64, rotated // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    shape, stored = backend.kv_layout(spec, 4, SIZE, dtype)
    cache = torch.zeros(shape, dtype=stored)
    backend.rope_write(query, key, value, cos_sin, cache, meta)
    expected = [x.contiguous() for x in qkv.split([6, HEADS, HEADS], 1)]
    reference.rope(expected[0], expected[1], cos_sin, meta.positions)
    assert_close(query.flatten(1), expected[0].flatten(1))
    block, offset = meta.slots // SIZE, meta.slots % SIZE
    assert_close(_page(cache, 0)[block, :, offset], expected[1])
    assert torch.equal(_page(cache, 1)[block, :, offset], expected[2])


@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_heads_on_the_way(dtype: torch.dtype, cast_first: bool) -> None:
    torch.manual_seed(0)
    backend, spec = TritonAttention(), AttentionSpec(6, HEADS, DIM, 1.0)
    meta = metadata([(5, 19), (2, 2)], SIZE)
    qkv = torch.randn(7, 12, DIM).to(dtype)
    query, key, value = qkv.clone().split([6, HEADS, HEADS], 1)
    angles = torch.rand(64, 12) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norms = HeadNorms(torch.randn(DIM).to(dtype), torch.randn(DIM).to(dtype), 1e-3, cast_first)
    shape, stored = backend.kv_layout(spec, 4, SIZE, dtype)
    cache = torch.zeros(shape, dtype=stored)
    backend.norm_rope_write(query, key, value, norms, cos_sin, cache, meta)
    expected = [x.contiguous() for x in qkv.split([6, HEADS, HEADS], 1)]
    reference.head_norm(expected[0], norms.query, 1e-3, cast_first)
    reference.head_norm(expected[1], norms.key, 1e-3, cast_first)
    reference.rope(expected[0], expected[1], cos_sin, meta.positions)
    assert_close(query.flatten(1), expected[0].flatten(1))
    block, offset = meta.slots // SIZE, meta.slots % SIZE
    assert_close(_page(cache, 0)[block, :, offset], expected[1])
    assert torch.equal(_page(cache, 1)[block, :, offset], expected[2])


def test_a_negative_slot_stores_nothing() -> None:
    backend, spec = TritonAttention(), AttentionSpec(6, HEADS, DIM, 1.0)
    shape, dtype = backend.kv_layout(spec, 4, SIZE, torch.float32)
    cache = torch.zeros(shape, dtype=dtype)
    meta = metadata([(3, 3)], SIZE)
    meta.slots[1:] = -1
    ones = torch.ones(3, HEADS, DIM)
    backend.write(ones, ones, cache, meta)
    assert int(cache.count_nonzero()) == 2 * HEADS * DIM
