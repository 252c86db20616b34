"""Attention in Triton against the reference on whole sequences."""

from dataclasses import replace

import pytest
import torch

from octavo.attention.base import AttentionMetadata, AttentionSpec
from octavo.attention.triton import TritonAttention
from octavo.kernels import reference
from paging import CODES, Sequences, assert_close, metadata

FLOATS = (torch.float32, torch.float16)


class Prefilled(TritonAttention):
    """Stores keys and values in torch, since interpreted writes of long sequences are slow."""

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        block, offset = meta.slots // meta.block_size, meta.slots % meta.block_size
        heads, size = key.shape[1:]
        codes = meta.block_size * size
        for kind, x in enumerate((key, value)):
            page = cache[:, kind, :, :codes].view(-1, heads, meta.block_size, size)
            if cache.dtype not in CODES:
                page[block, :, offset] = x.to(cache.dtype)
                continue
            scales = cache[:, kind, :, codes:].view(torch.float32)
            page[block, :, offset], scales[block, :, offset] = reference.quantize_kv(x, cache.dtype)


CASES = [
    # heads, KV heads, head size, window, soft cap, block size
    (6, 2, 24, None, None, 16),
    (9, 3, 64, 20, 5.0, 8),
    (4, 4, 40, None, 3.0, 32),
    (8, 1, 128, 300, None, 16),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(
    case: tuple[int, int, int, int | None, float | None, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, size, window, cap, block = case
    spec = AttentionSpec(heads, kv_heads, size, 0.2, window, cap)
    lengths, queries = [1, 15, 300, 530, 70], [1, 15, 1, 3, 40]
    run = Sequences(Prefilled(), spec, lengths, block, dtype)
    for i, got in enumerate(run.attend(queries)):
        assert_close(got, run.expected(i)[-queries[i] :])


@pytest.mark.parametrize("dtype", FLOATS)
def test_sinks_join_the_softmax_once(dtype: torch.dtype) -> None:
    """Of rows in one piece, in three, and in a tile of a prompt."""
    spec = AttentionSpec(6, 2, 24, 0.2, sinks=True)
    queries = [1, 2, 70]
    run = Sequences(Prefilled(), spec, [15, 530, 70], 16, dtype)
    for i, got in enumerate(run.attend(queries)):
        assert_close(got, run.expected(i)[-queries[i] :])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [None, 7, 256])
@pytest.mark.parametrize("shape", [(6, 2, 24), (9, 3, 64), (32, 8, 128), (4, 1, 256), (71, 1, 64)])
def test_more_shapes(shape: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(*shape, 0.1, window)
    lengths, queries = [16, 17, 256, 257, 600, 200], [16, 2, 1, 1, 5, 200]
    run = Sequences(Prefilled(), spec, lengths, 16, dtype)
    for i, got in enumerate(run.attend(queries)):
        assert_close(got, run.expected(i)[-queries[i] :])


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cache_of_codes(dtype: torch.dtype, codes: torch.dtype) -> None:
    spec = AttentionSpec(6, 2, 40, 0.3, 290, 5.0)
    run = Sequences(Prefilled(), spec, [17, 300, 70], 16, dtype, kv_dtype=codes)
    queries = [17, 1, 2]
    for i, got in enumerate(run.attend(queries)):
        assert_close(got, run.expected(i)[-queries[i] :])


def test_a_row_has_the_same_bits_whatever_else_is_in_the_step() -> None:
    spec = AttentionSpec(6, 2, 24, 0.3)
    run = Sequences(Prefilled(), spec, [300, 17, 600, 40], 16, torch.float16)
    queries = [1, 17, 2, 40]
    together = run.attend(queries)
    step = metadata([(n, n) for n in run.lengths], 16)
    for i, count in enumerate(queries):
        alone = metadata([(count, run.lengths[i])], 16)
        table = step.block_tables[i : i + 1, : alone.block_tables.shape[1]].contiguous()
        alone = replace(alone, block_tables=table)
        got = run.backend.attend(run.q[i][-count:], run.cache, alone, spec)
        assert torch.equal(got, together[i])


def test_padding_rows_change_nothing() -> None:
    spec = AttentionSpec(6, 2, 24, 0.3)
    run = Sequences(Prefilled(), spec, [300, 17], 16, torch.float32)
    step = metadata([(1, 300), (1, 17)], 16)
    query = torch.cat([run.q[0][-1:], run.q[1][-1:]])
    expected = run.backend.attend(query, run.cache, step, spec)
    padded = replace(
        step,
        query_starts=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        seq_lens=torch.tensor([300, 17, 0, 0], dtype=torch.int32),
        block_tables=torch.nn.functional.pad(step.block_tables, (0, 0, 0, 2)),
        num_rows=4,
    )
    query = torch.cat([query, torch.full_like(query, torch.nan)])
    assert torch.equal(run.backend.attend(query, run.cache, padded, spec)[:2], expected)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """Sparse memory: only the pages that are written exist."""
    spec, size = AttentionSpec(2, 2, 64, 0.3), 16
    backend = Prefilled()
    per_block = 2 * 2 * size * (64 + 4)
    blocks = 2**31 // per_block + 40
    shape, dtype = backend.kv_layout(spec, blocks, size, torch.int8)
    cache = torch.empty(shape, dtype=dtype)
    near = metadata([(20, 20), (1, 40)], size)
    far = replace(near, block_tables=near.block_tables.clone(), slots=near.slots.clone())
    far.block_tables[far.block_tables > 0] += blocks - 10
    far.slots.add_((blocks - 10) * size)
    assert int(far.block_tables.max()) * per_block > 2**31
    torch.manual_seed(0)
    key, value, query = (torch.randn(21, 2, 64) for _ in range(3))
    results = []
    for meta in (near, far):
        for table in meta.block_tables[1, :3].tolist():
            cache[table].zero_()
        TritonAttention().write(key, value, cache, meta)
        results.append(TritonAttention().attend(query, cache, meta, spec))
    assert torch.equal(*results)
