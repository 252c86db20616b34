"""The plain backend pages what the reference computes on whole sequences."""

from dataclasses import replace

import pytest
import torch

from octavo.attention.base import AttentionSpec
from octavo.attention.torch_ref import TorchAttention
from paging import CODES, Sequences, assert_close, metadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (None, 3.0), (20, 5.0)])
def test_paging_changes_nothing(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    spec = AttentionSpec(6, 2, 24, 0.3, window, cap)
    run = Sequences(TorchAttention(), spec, [1, 15, 16, 17, 50], 16, dtype)
    for queries in ([1, 15, 16, 17, 50], [1] * 5, [1, 2, 16, 5, 33]):
        for i, got in enumerate(run.attend(queries)):
            assert_close(got, run.expected(i)[-queries[i] :])


def test_sinks() -> None:
    spec = AttentionSpec(6, 2, 24, 0.3, window=20, sinks=True)
    run = Sequences(TorchAttention(), spec, [1, 50], 16, torch.float32)
    for i, got in enumerate(run.attend([1, 50])):
        assert_close(got, run.expected(i))


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_of_codes(dtype: torch.dtype, codes: torch.dtype) -> None:
    spec = AttentionSpec(6, 2, 20, 0.3, 20, 5.0)
    run = Sequences(TorchAttention(), spec, [1, 17, 50], 16, dtype, kv_dtype=codes)
    for i, got in enumerate(run.attend([1, 17, 50])):
        assert_close(got.float() if dtype == torch.float32 else got.bfloat16(), run.expected(i))


@pytest.mark.parametrize("codes", [None, *CODES])
def test_the_null_block_behind_a_window_changes_nothing(codes: torch.dtype | None) -> None:
    spec = AttentionSpec(6, 2, 24, 0.3, window=20)
    run = Sequences(TorchAttention(), spec, [70, 50], 16, torch.float32, kv_dtype=codes)
    step = metadata([(1, 70), (9, 50)], 16)
    query = torch.cat([run.q[0][-1:], run.q[1][-9:]])
    expected = run.backend.attend(query, run.cache, step, spec)
    tables = step.block_tables.clone()
    tables[0, :3] = tables[1, :1] = 0  # seen are tokens from 50 and from 22 on
    released = replace(step, block_tables=tables)
    assert torch.equal(run.backend.attend(query, run.cache, released, spec), expected)
    tables[0, 3] = 0
    assert not torch.equal(run.backend.attend(query, run.cache, released, spec), expected)
