"""Norms as they are declared: where they round, what they add, which rows they see."""

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import on_ranks

from octavo.kernels.dispatch import reference_ops
from octavo.layers.norm import DividedRowNorms, HeadNorm, LayerNorm, NormSpec, RMSNorm, RowNorm

OPS = reference_ops("a test")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def normed(x):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("cast_first", [False, True])
def test_where_a_norm_rounds(cast_first):
    x, weight = random(5, 64), random(64, seed=1)
    spec = NormSpec(1e-5, cast_first=cast_first)
    found, residual = RMSNorm(OPS, weight, spec).forward(x, None)
    first, last = normed(x).bfloat16() * weight, (normed(x) * weight.float()).bfloat16()
    assert not torch.equal(first, last)
    assert torch.equal(found, first if cast_first else last)
    assert residual is x
    for norm, size in ((HeadNorm, 16), (RowNorm, 64)):
        heads = x.clone().view(5, 64 // 16, 16)
        norm(OPS, weight[:size], spec).forward(heads)
        rows = x.view(-1, size)
        first = normed(rows).bfloat16() * weight[:size]
        last = (normed(rows) * weight[:size].float()).bfloat16()
        assert torch.equal(heads.view(-1, size), first if cast_first else last)


@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_what_is_added_to_the_residual_is_scaled(scale):
    x, residual, weight = random(5, 64), random(5, 64, seed=2), random(64, seed=1)
    summed = (residual.float() + x.float() * scale).bfloat16()
    for norm, wanted in (
        (RMSNorm(OPS, weight, NormSpec(1e-5), scale), (normed(summed) * weight).bfloat16()),
        (
            LayerNorm(OPS, weight, weight, 1e-5, scale),
            F.layer_norm(summed, (64,), weight, weight, 1e-5),
        ),
    ):
        kept = residual.clone()
        found, after = norm.forward(x, kept)
        assert torch.equal(after, summed)
        assert after.data_ptr() == kept.data_ptr()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cast_first", [False, True])
def test_a_row_that_ranks_divide_has_the_norm_of_the_whole(size, cast_first):
    """8 query heads and 2 of keys, which four ranks hold twice."""
    spec = NormSpec(1e-5, cast_first=cast_first)
    rows = [random(5, heads, 4, seed=heads).float() for heads in (8, 2)]
    weights = [random(heads * 4, seed=heads + 1).float() for heads in (8, 2)]
    whole = [row.clone() for row in rows]
    for row, weight in zip(whole, weights, strict=True):
        RowNorm(OPS, weight, spec).forward(row)

    def part(rank, heads):
        each = max(1, heads // size)
        begin = rank * heads // size
        return slice(begin, begin + each), slice(begin * 4, (begin + each) * 4)

    def normed_part(group):
        places = [part(group.rank, heads) for heads in (8, 2)]
        q, k = (row[:, place].clone() for row, (place, _) in zip(rows, places, strict=True))
        own = [weight[values] for weight, (_, values) in zip(weights, places, strict=True)]
        DividedRowNorms(OPS, group, *own, spec).forward(q, k)
        return [(q, places[0][0]), (k, places[1][0])]

    for found in on_ranks(size, normed_part):
        for (values, place), row in zip(found, whole, strict=True):
            torch.testing.assert_close(values, row[:, place])
