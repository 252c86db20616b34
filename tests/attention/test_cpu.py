"""The CPU backend against the reference, and bit against bit with itself in other batches."""

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paging
from octavo.attention import cpu
from octavo.attention.base import AttentionSpec
from octavo.attention.cpu import CpuAttention
from octavo.kernels import reference
from octavo.kernels.cpu import target
from paging import CODES, Sequences, assert_close

DTYPES = [torch.float32, torch.bfloat16]
HEAD_DIMS = [8, 16, 40, 64, 80, 96, 112, 128, 160, 192, 256]
HEADS = [(4, 4), (4, 1), (6, 2), (7, 1), (12, 4)]
BLOCK_SIZES = [8, 16, 32, 64, 128]


def spec_of(heads: int, kv_heads: int, head_dim: int, **more: object) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, **more)  # type: ignore[arg-type]


@pytest.fixture(params=["tiles", "vectors"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """bfloat16 on AMX (where there is AMX) and on the vector units."""
    if request.param == "tiles" and not target.has_tiles():
        pytest.skip("this processor has no AMX")
    if request.param == "vectors":
        monkeypatch.setattr(target, "has_tiles", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_mdl_06_odd_head_sizes(head_dim: int, dtype: torch.dtype, kind: str) -> None:
    if dtype == torch.float32 and kind == "tiles":
        pytest.skip("float32 has one kind")
    for index, (heads, kv_heads) in enumerate(HEADS):
        block_size = BLOCK_SIZES[(index + head_dim // 8) % len(BLOCK_SIZES)]
        spec = spec_of(heads, kv_heads, head_dim)
        lengths = [1, 15, 16, 17, 129]
        run = Sequences(CpuAttention(), spec, lengths, block_size, dtype)
        for queries in (lengths, [1] * 5, [1, 7, 16, 1, 40]):
            for i, got in enumerate(run.attend(queries)):
                assert_close(got, run.expected(i)[-queries[i] :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 128, 256])
def test_a_cache_of_codes(head_dim: int, codes: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    if dtype == torch.float32 and kind == "tiles":
        pytest.skip("float32 has one kind")
    masks = [(None, None), (50, None), (None, 5.0), (100, 20.0), (None, None)]
    for index, ((heads, kv_heads), (window, cap)) in enumerate(zip(HEADS, masks, strict=True)):
        block_size = BLOCK_SIZES[(index + head_dim // 8) % len(BLOCK_SIZES)]
        spec = spec_of(heads, kv_heads, head_dim, window=window, soft_cap=cap)
        lengths = [1, 15, 17, 129, 300]
        run = Sequences(CpuAttention(), spec, lengths, block_size, dtype, kv_dtype=codes)
        for queries in (lengths, [1] * 5, [1, 7, 16, 1, 40]):
            for i, got in enumerate(run.attend(queries)):
                assert_close(got, run.expected(i)[-queries[i] :])
        assert torch.equal(run.chunks(4, 77), run.attend(lengths)[4])


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_lie_as_documented(dtype: torch.dtype, block_size: int, codes: torch.dtype) -> None:
    """The codes of the reference, bit for bit, at every size that occurs in keys and values."""
    heads, dim, tokens = 3, 40, 45
    spec, backend = spec_of(6, heads, dim), CpuAttention()
    k, v = (torch.randn(tokens, heads, dim) * torch.logspace(-9, 4, tokens)[:, None, None]
            for _ in range(2))  # fmt: skip
    k, v = k.to(dtype), v.to(dtype)
    k[3], v[4] = 0, 0
    step = paging.metadata([(tokens, tokens)], block_size)
    shape, kind = backend.kv_layout(spec, 8, block_size, codes)
    assert shape[2] == 2 * block_size * (48 + 4)
    cache = torch.zeros(shape, dtype=kind)
    backend.write(k, v, cache, step)
    raw, size = cache.view(torch.uint8)[step.slots // block_size], block_size * 48
    at, rows = step.slots % block_size, torch.arange(tokens)
    parts = raw.split([size, size, block_size * 4, block_size * 4], 2)
    run = min(16, block_size)
    keys = parts[0].view(tokens, heads, -1, 24, run, 2)[rows, :, at // run, :, at % run].flatten(2)
    values = parts[1].view(tokens, heads, -1, 48, 2)[rows, :, at // 2, :, at % 2]
    for x, found, scales in ((k, keys, parts[2]), (v, values, parts[3])):
        wanted, scale = reference.quantize_kv(x, codes)
        assert torch.equal(found[..., :dim], wanted.view(torch.uint8))
        assert not found[..., dim:].any()
        assert torch.equal(scales.contiguous().view(torch.float32)[rows, :, at], scale)


def attend_to(run: Sequences, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last query of a run's only sequence over other keys and values."""
    length, codes = run.lengths[0], run.cache.dtype
    run.backend.write(k, v, run.cache, paging.metadata([(length, length)], run.block_size))
    run.k, run.v = [paging.decoded(k, codes)], [paging.decoded(v, codes)]
    return run.attend([1])[0]


@pytest.mark.parametrize("codes", CODES)
def test_sums_of_the_largest_codes(codes: torch.dtype) -> None:
    """Every code as large as can be: 256 dimensions in a score, 256 keys in a weighted sum."""
    run = Sequences(CpuAttention(), spec_of(3, 1, 256), [256], 16, torch.bfloat16, kv_dtype=codes)
    run.q[0][:] = 1.5
    for sign in (1.0, -1.0):
        k = torch.full((256, 1, 256), 2.0 * sign).bfloat16()
        out = attend_to(run, k, 3.0 * sign * torch.ones_like(k))
        assert_close(out, run.expected(0)[-1:])


@pytest.mark.parametrize("codes", CODES)
def test_a_key_with_most_of_the_weight_and_small_values(codes: torch.dtype) -> None:
    """As the first token of many models: what the others weigh must not be lost in rounding."""
    run = Sequences(CpuAttention(), spec_of(3, 1, 64), [300], 16, torch.bfloat16, kv_dtype=codes)
    k, v = (torch.randn(300, 1, 64).bfloat16() for _ in range(2))
    k[0], v[0] = run.q[0][-1].mean(0) * 3.5, v[0] / 4096
    out = attend_to(run, k, v)
    weights = torch.softmax(run.q[0][-1].float() @ run.k[0][:, 0].T / 8, dim=1)
    assert weights[:, 0].min() > 0.6
    assert_close(out, run.expected(0)[-1:])


@pytest.mark.parametrize("codes", CODES)
def test_queries_of_zeros_see_what_is_visible(codes: torch.dtype) -> None:
    """As of a token whose embedding is zero: all that it may see counts alike, and nothing else."""
    run = Sequences(CpuAttention(), spec_of(3, 1, 64), [70], 16, torch.bfloat16, kv_dtype=codes)
    run.q[0].zero_()
    whole = run.attend([70])[0]
    assert_close(whole, run.expected(0))
    assert torch.equal(run.chunks(0, 7), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 31, 100, 256, 300, 5000])
def test_mdl_11_sliding_window(window: int, dtype: torch.dtype) -> None:
    spec = spec_of(6, 2, 64, window=window)
    run = Sequences(CpuAttention(), spec, [700, 300, 20], 16, dtype)
    for queries in ([700, 300, 20], [1, 1, 1], [200, 1, 3]):
        for i, got in enumerate(run.attend(queries)):
            assert_close(got, run.expected(i)[-queries[i] :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layers_of_gemma_3(dtype: torch.dtype, kind: str) -> None:
    """Heads of 256 with a window of 512 over an int8 cache, chunked or not."""
    if dtype == torch.float32 and kind == "tiles":
        pytest.skip("float32 has one kind")
    spec = spec_of(4, 1, 256, window=512)
    run = Sequences(CpuAttention(), spec, [900, 40], 16, dtype, kv_dtype=torch.int8)
    for queries in ([900, 40], [1, 1], [300, 7]):
        for i, got in enumerate(run.attend(queries)):
            assert_close(got, run.expected(i)[-queries[i] :])
    whole = run.attend([900, 40])[0]
    for size in (1, 100, 513):
        assert torch.equal(run.chunks(0, size), whole), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_with_and_without_a_window_share_a_step(dtype: torch.dtype) -> None:
    backend = CpuAttention()
    runs = [
        Sequences(backend, spec_of(4, 2, 64, window=w), [300, 40], 16, dtype) for w in (50, None)
    ]
    step = paging.metadata([(5, 300), (1, 40)], 16)
    for run in (*runs, *runs):
        query = torch.cat([run.q[0][-5:], run.q[1][-1:]])
        out = backend.attend(query, run.cache, step, run.spec)
        expected = torch.cat([run.expected(0)[-5:], run.expected(1)[-1:]])
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_soft_cap(cap: float, dtype: torch.dtype) -> None:
    spec = AttentionSpec(4, 2, 64, 0.6, None, cap)
    run = Sequences(CpuAttention(), spec, [300, 33], 32, dtype)
    for queries in ([300, 33], [1, 1]):
        for i, got in enumerate(run.attend(queries)):
            assert_close(got, run.expected(i)[-queries[i] :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_stay_finite(dtype: torch.dtype) -> None:
    for scale in (1e-6, 1.0, 30.0):
        spec = AttentionSpec(4, 2, 32, scale)
        run = Sequences(CpuAttention(), spec, [300], 16, dtype)
        assert_close(run.attend([300])[0], run.expected(0))


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_smp_12_a_row_is_the_same_whatever_the_batch(
    dtype: torch.dtype, codes: torch.dtype | None, kind: str
) -> None:
    spec = spec_of(6, 2, 64)
    lengths = [3, 700, 129, 33, 256, 257, 1, 600]
    run = Sequences(CpuAttention(), spec, lengths, 16, dtype, kv_dtype=codes)
    queries = [3, 1, 64, 1, 256, 1, 1, 200]
    together = run.attend(queries)
    for order in (range(8), reversed(range(8)), (5, 1), (7, 0, 4), (1,), (7,)):
        rows = list(order)
        step = paging.metadata([(n, n) for n in lengths], 16)
        some = paging.metadata([(queries[i], lengths[i]) for i in rows], 16)
        table = torch.zeros(len(rows), step.block_tables.shape[1], dtype=torch.int32)
        table[:] = step.block_tables[rows]
        some = replace(some, block_tables=table)
        query = torch.cat([run.q[i][len(run.q[i]) - queries[i] :] for i in rows])
        out = run.backend.attend(query, run.cache, some, spec)
        for i, got in zip(rows, out.split([queries[i] for i in rows]), strict=True):
            assert torch.equal(got, together[i]), (i, rows)


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (20, 1)])
def test_rows_with_the_same_blocks_read_them_together(
    heads: tuple[int, int], dtype: torch.dtype, codes: torch.dtype | None, kind: str
) -> None:
    """And each gets the bits that it has alone."""
    spec = spec_of(*heads, 64)
    lengths = [700, 513, 600, 900, 530, 1030, 300, 256, 257, 20, *range(521, 545, 2), 2100]
    run = Sequences(CpuAttention(), spec, lengths, 16, dtype, kv_dtype=codes)
    step = paging.metadata([(1, n) for n in lengths], 16)
    table = step.block_tables.clone()
    for row, length in enumerate(lengths):
        table[row, : min(32, (length - 1) // 16)] = table[0, : min(32, (length - 1) // 16)]
    table[3, 16:32] = table[4, 16:32] = step.block_tables[3, 16:32]  # different after one split
    table[5, 31] = step.block_tables[5, 31]  # within a split
    query = torch.cat([q[-1:] for q in run.q])

    def attend(rows: list[int]) -> torch.Tensor:
        some = paging.metadata([(1, lengths[i]) for i in rows], 16)
        meta = replace(some, block_tables=table[rows].contiguous())
        return run.backend.attend(query[rows], run.cache, meta, spec)

    everyone = list(range(len(lengths)))
    together = attend(everyone)
    for row in everyone:
        assert torch.equal(together[row], attend([row])[0]), row
    assert torch.equal(attend(everyone[::-1]), together.flip(0))


def test_shared_prefix_groups_are_of_whole_splits_and_their_readers() -> None:
    spec = spec_of(6, 2, 64)
    lengths = [600, 600, 256, 257, 769, 769, *[300] * 11]
    meta = paging.metadata([(1, n) for n in lengths], 16)
    table = meta.block_tables
    table[1:6, :16] = table[0, :16]
    table[5, 16:48] = table[4, 16:48]
    table[7:, :16] = table[6, :16]
    blocks = cpu._query_blocks(meta, spec, 2)
    found = cpu._shared_prefix_groups(blocks, meta, spec)
    groups = sorted((split, *map(int, group)) for split, group in found)
    # The third row writes to its first split. A product has rows for ten queries of three heads.
    assert groups == [
        (0, 0, 1, 3, 4, 5), (0, *range(6, 12)), (0, *range(12, 17)), (1, 4, 5), (2, 4, 5),
    ]  # fmt: skip
    assert not cpu._shared_prefix_groups(blocks, meta, spec_of(6, 2, 64, window=100))


@pytest.mark.parametrize(
    ("dtype", "kv"), [*itertools.product(DTYPES, (None, *CODES)), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (90, 20.0)])
def test_any_chunking_gives_the_same_bits(
    dtype: torch.dtype, kv: torch.dtype | None, window: int | None, cap: float | None, kind: str
) -> None:
    """Also where codes are decoded for many rows, and multiplied in place for few."""
    if dtype == torch.float32 and kind == "tiles":
        pytest.skip("float32 has one kind")
    spec = spec_of(6, 2, 64, window=window, soft_cap=cap)
    run = Sequences(CpuAttention(), spec, [20, 600], 16, dtype, kv_dtype=kv)
    whole = run.attend([20, 600])[1]
    for size in (1, 17, 64, 255, 599):
        assert torch.equal(run.chunks(1, size), whole), size


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(
    dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    """With more threads a long row's pieces are shared among them and joined by the last."""
    spec = spec_of(6, 2, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            run = Sequences(CpuAttention(), spec, [2000, 300], 16, dtype, kv_dtype=codes)
            results.append([torch.cat(run.attend([1, 1])), torch.cat(run.attend([4, 300]))])
            results[-1] += [torch.cat(run.attend([1, 1]))]  # counters are ready for a next layer
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert torch.equal(results[0][0], results[0][2])


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_size_changes_nothing(
    block_size: int, dtype: torch.dtype, codes: torch.dtype | None, kind: str
) -> None:
    spec = spec_of(4, 2, 48)
    one, other = (
        Sequences(CpuAttention(), spec, [200, 17], size, dtype, kv_dtype=codes)
        for size in (block_size, 16)
    )
    assert all(map(torch.equal, one.attend([200, 17]), other.attend([200, 17])))
    assert all(map(torch.equal, one.attend([1, 1]), other.attend([1, 1])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_one_product_are_read_where_they_lie(dtype: torch.dtype) -> None:
    backend, spec = CpuAttention(), spec_of(6, 2, 64)
    qkv = torch.randn(40, 10, 64).to(dtype)
    q, k, v = qkv.split([6, 2, 2], dim=1)
    step = paging.metadata([(40, 40)], 16)
    shape, kind = backend.kv_layout(spec, 4, 16, dtype)
    caches = [torch.zeros(shape, dtype=kind) for _ in range(2)]
    backend.write(k, v, caches[0], step)
    backend.write(k.contiguous(), v.contiguous(), caches[1], step)
    assert torch.equal(caches[0], caches[1])
    outs = [backend.attend(x, caches[0], step, spec) for x in (q, q.contiguous())]
    assert torch.equal(*outs)
    gaps = torch.randn(40, 6, 128).to(dtype)[..., ::2]
    outs = [backend.attend(x, caches[0], step, spec) for x in (gaps, gaps.contiguous())]
    assert torch.equal(*outs)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 256])
def test_float32_over_a_cache_of_bfloat16(head_dim: int) -> None:
    """As exact as over float32: values are converted, queries and weights are not rounded."""
    masks = [(None, None), (50, None), (None, 5.0), (100, 20.0), (None, None)]
    for index, ((heads, kv_heads), (window, cap)) in enumerate(zip(HEADS, masks, strict=True)):
        block_size = BLOCK_SIZES[(index + head_dim // 8) % len(BLOCK_SIZES)]
        spec = spec_of(heads, kv_heads, head_dim, window=window, soft_cap=cap)
        lengths = [1, 15, 17, 129, 300]
        run = Sequences(
            CpuAttention(), spec, lengths, block_size, torch.float32, kv_dtype=torch.bfloat16
        )
        for queries in (lengths, [1] * 5, [1, 7, 16, 1, 40]):
            for i, got in enumerate(run.attend(queries)):
                assert_close(got, run.expected(i)[-queries[i] :])
        assert torch.equal(run.chunks(4, 77), run.attend(lengths)[4])


def test_keys_and_values_are_written_in_the_dtype_of_the_cache() -> None:
    """float32 keys, rotated, and values to a cache of bfloat16: rounded once, at the end."""
    backend, spec = CpuAttention(), spec_of(6, 2, 40)
    step = paging.metadata([(45, 45)], 16)
    q, k, v = (torch.randn(45, heads, 40) for heads in (6, 2, 2))
    angle = torch.rand(45, 20) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    shape, kind = backend.kv_layout(spec, 5, 16, torch.bfloat16)
    caches = [torch.zeros(shape, dtype=kind) for _ in range(2)]
    rotated = k.clone()
    reference.rope(q.clone(), rotated, cos_sin, step.positions)
    backend.rope_write(q, k, v, cos_sin, caches[0], step)
    backend.write(rotated.bfloat16(), v.bfloat16(), caches[1], step)
    assert (caches[0] - caches[1]).abs().max() < 0.02  # a unit in the last place, of the rotation
    assert (caches[0] != caches[1]).float().mean() < 0.01
    backend.write(rotated, v, caches[0], step)
    assert torch.equal(*caches)


@pytest.mark.parametrize("codes", CODES)
def test_a_value_that_is_not_finite_is_seen(codes: torch.dtype, kind: str) -> None:
    """Keys may be finite, and the value's weight small: the answer says so all the same."""
    run = Sequences(CpuAttention(), spec_of(3, 1, 64), [300], 16, torch.bfloat16, kv_dtype=codes)
    k, v = (torch.randn(300, 1, 64).bfloat16() for _ in range(2))
    v[7, 0, 3] = float("nan")
    assert attend_to(run, k, v).isnan().all()


def test_a_cache_of_another_dtype() -> None:
    spec = spec_of(4, 2, 64)
    backend = CpuAttention()
    step = paging.metadata([(50, 50)], 16)
    q, k, v = (torch.randn(50, heads, 64) for heads in (4, 2, 2))
    shape, kind = backend.kv_layout(spec, 5, 16, torch.bfloat16)
    cache = torch.zeros(shape, dtype=kind)
    cos_sin = torch.cat((torch.ones(50, 32), torch.zeros(50, 32)), dim=1)
    backend.rope_write(q, k, v, cos_sin, cache, step)
    out = backend.attend(q, cache, step, spec)
    assert out.dtype == torch.float32
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert_close(out.bfloat16(), expected.transpose(0, 1).flatten(1))


def test_a_broken_neighbour_stays_alone() -> None:
    """NaN in one request's keys and values never reaches another request, nor a freed block."""
    spec = spec_of(4, 2, 64)
    for dtype, codes, length in itertools.product(DTYPES, (None, *CODES), (1, 8, 17, 250)):
        run = Sequences(CpuAttention(), spec, [length, 40], 16, dtype, kv_dtype=codes)
        step = paging.metadata([(length, length), (40, 40)], 16)
        run.backend.write(torch.cat(run.k), torch.cat(run.v), run.cache, step)
        clean = run.attend([1, 40])[0]
        run.k[1][:] = float("nan")
        run.v[1][:] = float("nan")
        run.backend.write(torch.cat(run.k), torch.cat(run.v), run.cache, step)
        again = run.attend([1, 40])
        assert torch.equal(again[0], clean)
        assert again[1].isnan().all()


def test_two_backends_in_two_threads() -> None:
    spec = spec_of(4, 2, 64)
    runs = [Sequences(CpuAttention(), spec, [300, 90], 16, torch.bfloat16, seed) for seed in (1, 2)]
    expected = [torch.cat(run.attend([300, 90])) for run in runs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(torch.cat(runs[index].attend([300, 90])), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


AVX2 = """
import torch, paging
from octavo.attention import cpu
from octavo.attention.base import AttentionSpec
from octavo.attention.cpu import CpuAttention
from octavo.kernels.cpu import compile as compiler, simd
from tests import kit
assert (simd.LANES, simd.HAS_DOT) == (8, False)
assert kit.cpu_device().default_dtype() == torch.float32
optimize, texts = compiler._optimize, []
def spied(module):
    machine = optimize(module)
    texts.append(machine.emit_assembly(module))
    return machine
compiler._optimize = spied
for dtype in (torch.float32, torch.bfloat16):
    shapes = ((4, 1, 40, 8, None), (7, 1, 64, 16, None), (4, 4, 80, 32, None),
              (4, 2, 40, 8, torch.int8), (4, 2, 64, 64, torch.int8),
              (6, 2, 64, 16, torch.float8_e4m3fn), (9, 3, 64, 16, torch.bfloat16))
    for heads, kv_heads, head_dim, block_size, codes in shapes:
        spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
        run = paging.Sequences(
            CpuAttention(), spec, [1, 17, 300], block_size, dtype, kv_dtype=codes
        )
        for queries in ([1, 17, 300], [1, 1, 1], [1, 5, 33]):
            for i, got in enumerate(run.attend(queries)):
                paging.assert_close(got, run.expected(i)[-queries[i] :])
        whole = run.attend([1, 17, 300])[2]
        assert torch.equal(run.chunks(2, 77), whole)
assert all("%ymm" in text and "%zmm" not in text and "%k1" not in text for text in texts)
print(len(texts))
"""


@pytest.mark.slow
def test_a_processor_without_avx512(tmp_path: Path) -> None:
    """The code made for AVX2 and no more, run here: the same results as the reference."""
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", AVX2], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Of attention and of the cache write, for two types times three, and float32 over bfloat16.
    assert int(done.stdout) == 14


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("window", [5, 40, 300])
def test_the_null_block_behind_a_window_changes_no_bit(
    window: int, codes: torch.dtype | None, dtype: torch.dtype, kind: str
) -> None:
    """Blocks behind the window are released, and may hold what another request writes."""
    backend, lengths = CpuAttention(), [700, 290, 20]
    run = Sequences(backend, spec_of(6, 2, 64, window=window), lengths, 16, dtype, kv_dtype=codes)
    for queries in ([1, 1, 1], [60, 9, 20]):
        step = paging.metadata(list(zip(queries, lengths, strict=True)), 16)
        query = torch.cat([q[len(q) - n :] for q, n in zip(run.q, queries, strict=True)])
        expected = backend.attend(query, run.cache, step, run.spec)
        tables = step.block_tables.clone()
        for row, (count, length) in enumerate(zip(queries, lengths, strict=True)):
            tables[row, : max(0, length - count - window + 1) // 16] = 0
        assert (tables == 0).sum() > (step.block_tables == 0).sum()
        released = replace(step, block_tables=tables, group=1)
        assert torch.equal(backend.attend(query, run.cache, released, run.spec), expected)


def test_groups_with_one_window_share_the_plan_but_not_the_tables() -> None:
    """Metadata of several KV groups in turn, as the layers of a step come."""
    backend, lengths = CpuAttention(), [300, 40]
    runs = [Sequences(backend, spec_of(4, 2, 64, window=50), lengths, 16, torch.float32, seed=seed)
            for seed in (1, 2)]  # fmt: skip
    first = paging.metadata([(1, 300), (1, 40)], 16)
    moved = runs[1].cache.clone()
    order = torch.randperm(len(moved) - 1) + 1  # the second group's blocks lie elsewhere
    moved[order] = runs[1].cache[1:]
    place = torch.cat((torch.zeros(1, dtype=torch.long), order))
    second = replace(first, block_tables=place[first.block_tables.long()].int(), group=1)
    for meta, run, cache in [(first, runs[0], runs[0].cache), (second, runs[1], moved)] * 2:
        query = torch.cat([run.q[0][-1:], run.q[1][-1:]])
        out = backend.attend(query, cache, meta, run.spec)
        assert_close(out, torch.cat([run.expected(0)[-1:], run.expected(1)[-1:]]))
    assert len(backend._work) == 2
    (a, b) = backend._work.values()
    assert a.keep is b.keep
