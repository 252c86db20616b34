"""The fused CPU kernels against the torch reference, at odd shapes."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import fused_call as cpu_ops

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 8), (3, 64), (17, 96), (64, 576), (5, 1537)]


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def check(found, wanted):
    """Equal but for the last bits; an error of 1% of the values must not pass."""
    rtol = 1e-5 if found.dtype is torch.float32 else 2**-7
    atol = 1e-6 if found.dtype is torch.float32 else 2**-8 * 0.25
    torch.testing.assert_close(found.float(), wanted.float(), rtol=rtol, atol=atol)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.float() * 1.01, wanted.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(dtype, shape, added):
    x, weight = random(*shape, dtype=dtype), 1 + random(shape[1], dtype=dtype, seed=1) / 4
    residual = random(*shape, dtype=dtype, seed=2) if added else None
    kept = residual.clone() if residual is not None else None
    wanted, wanted_sum = reference.rms_norm(x.clone(), weight, 1e-5, kept)
    found, found_sum = cpu_ops.CpuOps(dtype).rms_norm(x, weight, 1e-5, residual)
    check(found, wanted)
    assert torch.equal(found_sum, wanted_sum)
    assert residual is None or found_sum.data_ptr() == residual.data_ptr()


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_weights_in_float32(shape):
    ops, weight = cpu_ops.CpuOps(torch.bfloat16), 1 + random(shape[1], seed=1) / 64
    x, residual = (random(*shape, dtype=torch.bfloat16, seed=n) for n in (0, 2))
    kept = residual.clone()
    wanted = reference.rms_norm(x.clone(), weight, 1e-5, kept)[0]
    check(ops.rms_norm(x, weight, 1e-5, residual)[0], wanted)
    # A weight that is rounded first gives other bits in one value of six or more.
    rounded = reference.rms_norm(kept, weight.bfloat16(), 1e-5)[0]
    found = ops.rms_norm(kept, weight, 1e-5)[0]
    assert (found != wanted).float().mean() < 0.05
    assert shape[1] < 64 or (rounded != wanted).float().mean() > 0.15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dim", [8, 40, 256])
def test_head_norm_and_row_norm(dtype, wide, dim):
    ops, tokens, heads = cpu_ops.CpuOps(dtype), 19, 5
    packed = random(tokens, heads + 2, dim, dtype=dtype)
    for name, size in (("head_norm", dim), ("row_norm", heads * dim)):
        weight = 1 + random(size, dtype=torch.float32 if wide else dtype, seed=3) / 4
        found, wanted = packed.clone(), packed.clone()
        getattr(ops, name)(found[:, 1 : heads + 1], weight, 1e-6)
        getattr(reference, name)(wanted[:, 1 : heads + 1], weight, 1e-6)
        check(found[:, 1 : heads + 1], wanted[:, 1 : heads + 1])
        assert torch.equal(found[:, :: heads + 1], packed[:, :: heads + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dim", [8, 40])
@pytest.mark.parametrize("cast_first", [False, True])
def test_norms_of_rows_that_ranks_divide(dtype, wide, dim, cast_first):
    """Three of five query heads and one of keys, between others in the row of a product."""
    ops, packed = cpu_ops.CpuOps(dtype), random(19, 7, dim, dtype=dtype)
    found, wanted = packed.clone(), packed.clone()
    parts = [(slice(1, 4), 0), (slice(5, 6), 1)]
    squares = ops.row_squares(*(found[:, heads] for heads, _ in parts))
    expected = reference.row_squares(*(wanted[:, heads] for heads, _ in parts))
    torch.testing.assert_close(squares, expected)
    for heads, column in parts:
        size = dim * (heads.stop - heads.start)
        weight = 1 + random(size, dtype=torch.float32 if wide else dtype, seed=3) / 4
        rest = (column, 2 * size, 1e-6, cast_first)
        ops.divided_row_norm(found[:, heads], weight, squares, *rest)
        reference.divided_row_norm(wanted[:, heads], weight, expected, *rest)
        check(found[:, heads], wanted[:, heads])
    assert torch.equal(found[:, [0, 4, 6]], packed[:, [0, 4, 6]])


@pytest.mark.parametrize("wide", [False, True])
def test_a_normed_row_may_be_rounded_before_the_weight(wide):
    ops, dtype = cpu_ops.CpuOps(torch.bfloat16), torch.bfloat16
    weight = 1 + random(200, dtype=torch.float32 if wide else dtype, seed=3) / 4
    x = random(9, 200, dtype=dtype)
    wanted = reference.rms_norm(x, weight, 1e-5, None, True)[0]
    found = ops.rms_norm(x, weight, 1e-5, None, True)[0]
    plain = ops.rms_norm(x, weight, 1e-5)[0]
    check(found, wanted)
    assert (found != wanted).float().mean() < 0.05
    assert (plain != wanted).float().mean() > 0.1
    for name in ("head_norm", "row_norm"):
        here = x.clone().view(9, 1, 200)
        getattr(ops, name)(here, weight, 1e-5, True)
        assert (here[:, 0] != wanted).float().mean() < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add(dtype, shape, scale):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2)
    kept = residual.clone()
    found = cpu_ops.CpuOps(dtype).add(x, residual, scale)
    check(found, reference.add(x, kept, scale))
    assert found is residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activations(dtype, shape, name):
    gate_up = 3 * random(shape[0], 2 * shape[1], dtype=dtype)
    check(getattr(cpu_ops.CpuOps(dtype), name)(gate_up), getattr(reference, name)(gate_up))


def cos_sin(positions, dim):
    angles = torch.outer(torch.arange(positions), 10000 ** -torch.linspace(0, 1, dim // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 40, 64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (7, 1), (12, 4)])
def test_rope_and_head_norm(dtype, dim, heads):
    ops, tokens = cpu_ops.CpuOps(dtype), 19
    packed = random(tokens, sum(heads) + heads[1], dim, dtype=dtype)
    wanted = packed.clone()
    table, positions = cos_sin(200, dim), torch.arange(tokens) * 7
    weight = 1 + random(dim, dtype=dtype, seed=3) / 4
    q, k, _ = torch.split(packed, (heads[0], heads[1], heads[1]), 1)
    want_q, want_k, _ = torch.split(wanted, (heads[0], heads[1], heads[1]), 1)
    ops.head_norm(q, weight, 1e-6)
    reference.head_norm(want_q, weight, 1e-6)
    check(q, want_q)
    ops.rope(q, k, table, positions)
    reference.rope(want_q, want_k, table, positions)
    torch.testing.assert_close(q.float(), want_q.float(), rtol=2**-6, atol=2**-5)
    check(k, want_k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(dtype):
    ops, x = cpu_ops.CpuOps(dtype), random(200, 576, dtype=dtype)
    weight = random(576, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole, act = ops.rms_norm(x, weight, 1e-5)[0], ops.silu_and_mul(x)
        torch.set_num_threads(1)
        for begin, end in ((0, 1), (7, 8), (13, 90), (199, 200)):
            part = x[begin:end].clone()
            assert torch.equal(ops.rms_norm(part, weight, 1e-5)[0], whole[begin:end])
            assert torch.equal(ops.silu_and_mul(part), act[begin:end])
    finally:
        torch.set_num_threads(before)


def test_values_past_the_end_of_a_row_are_not_touched():
    for dtype, size in ((torch.float32, 37), (torch.bfloat16, 37)):
        ops, x = cpu_ops.CpuOps(dtype), random(3, size, dtype=dtype)
        alone = [
            ops.rms_norm(x[i : i + 1].clone(), torch.ones(size, dtype=dtype), 1e-5)[0]
            for i in range(3)
        ]
        together = ops.rms_norm(x, torch.ones(size, dtype=dtype), 1e-5)[0]
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotary_and_strided_heads(dtype):
    ops, packed = cpu_ops.CpuOps(dtype), random(9, 5, 64, dtype=dtype)
    wanted = packed.clone()
    table, positions = cos_sin(50, 24), torch.arange(9) * 5
    ops.rope(packed[:, :3], packed[:, 3:4], table, positions)
    reference.rope(wanted[:, :3], wanted[:, 3:4], table, positions)
    check(packed, wanted)
    assert torch.equal(packed[..., 24:], wanted[..., 24:])


def test_what_the_kernels_do_not_take_goes_to_the_reference():
    ops, x = cpu_ops.CpuOps(torch.bfloat16), random(4, 64, dtype=torch.bfloat16)
    weight = random(64)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5)[0], reference.rms_norm(x, weight, 1e-5)[0])
    gaps = random(4, 128, dtype=torch.bfloat16)[:, ::2]
    assert torch.equal(
        ops.rms_norm(gaps, weight, 1e-5)[0], reference.rms_norm(gaps, weight, 1e-5)[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_rope_write_is_norm_rope_and_write(dtype, dim):
    """In one pass, but for the rounding between the norm and the rotary."""
    from octavo.attention.base import AttentionSpec
    from octavo.attention.cpu import CpuAttention
    from paging import metadata

    backend, ops = CpuAttention(), cpu_ops.CpuOps(dtype)
    step = metadata([(20, 20), (3, 40)], 16)
    packed = random(23, 8, dim, dtype=dtype)
    table, weight = cos_sin(50, dim), 1 + random(dim, dtype=dtype, seed=4) / 4
    shape, kind = backend.kv_layout(AttentionSpec(4, 2, dim, 1.0), 9, 16, dtype)
    caches = [torch.zeros(shape, dtype=kind) for _ in range(2)]
    for norm in (None, weight):
        fused, apart = (x.split([4, 2, 2], 1) for x in (packed.clone(), packed.clone()))
        backend.rope_write(*fused, table, caches[0], step, norm, norm, 1e-6)
        if norm is not None:
            ops.head_norm(apart[0], norm, 1e-6)
            ops.head_norm(apart[1], norm, 1e-6)
        ops.rope(apart[0], apart[1], table, step.positions)
        backend.write(apart[1], apart[2], caches[1], step)
        torch.testing.assert_close(fused[0], apart[0], rtol=2**-6, atol=2**-5)
        torch.testing.assert_close(caches[0], caches[1], rtol=2**-6, atol=2**-5)
        if norm is None:
            assert torch.equal(caches[0], caches[1])
