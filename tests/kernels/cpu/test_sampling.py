"""The sampling kernels, item by item; whole draws are compared in tests/runner/test_sampler.py."""

import math

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import sampling_call as ops

MASK = 2**64 - 1


def items(count, **fields):
    made = np.zeros(count, ops.ITEM)
    made["row"] = np.arange(count)
    made["top_p"] = 1.0
    for name, value in fields.items():
        made[name] = value
    return made


def drawn(logits, made):
    ops.draw(logits, made)
    return made["token"].tolist(), made["status"].tolist()


def split_mix(state, count):
    """The first outputs of SplitMix64, as its authors wrote it."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def test_the_reference_is_split_mix():
    """Outputs for the seed 1234567, as published with other implementations."""
    assert split_mix(1234567, 3) == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def many_outputs(states, count):
    """Outputs 0 .. count-1 of SplitMix64 from each state: uint64 [states, count]."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = states[:, None] + steps
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@pytest.mark.parametrize("size", [2, 63, 64, 65, 200])
def test_flat_draws_take_the_smallest_hash(size):
    """With equal logits the race is won by the least exponential, so by the smallest output."""
    made = items(3000, temperature=1.0, seed=np.arange(3000), index=3, position=7)
    tokens, _ = drawn(torch.zeros(3000, size), made)
    states = [split_mix(split_mix(split_mix(seed, 1)[0], 4)[3], 8)[7] for seed in range(3000)]
    outputs = many_outputs(np.array(states, np.uint64), size)
    assert outputs[0].tolist() == split_mix(states[0], size)
    assert tokens == (outputs >> np.uint64(11)).argmin(1).tolist()


@pytest.mark.parametrize("size", [1, 7, 64, 129, 1000, 9000])
@pytest.mark.parametrize("k", [1, 2, 5, 64, 200, 999, 8999])
def test_the_k_largest_are_exactly_those(size, k):
    """Many equal logits, negative and positive, so that the cut falls among equals."""
    generator = torch.Generator().manual_seed(size * 10_000 + k)
    logits = torch.randint(-20, 20, (3, size), generator=generator) / 4
    made = items(3, token=0, top_k=min(k, size))
    ids, values = ops.logprobs(logits, made)
    for row, found, logprobs in zip(logits.tolist(), ids, values, strict=True):
        order = sorted(range(size), key=lambda i: (-row[i], i))[:k]
        assert found[1 : 1 + len(order)].tolist() == order
        assert np.all(np.diff(logprobs[1:]) <= 0)


def test_exponentials_are_exact_over_their_whole_range():
    """log-softmax of two tokens that are `gap` apart is -log1p(exp(-gap)) and that - gap."""
    gaps = torch.cat([torch.linspace(0, 20, 400), torch.linspace(20, 90, 100)])
    logits = torch.stack([torch.zeros(500), -gaps], dim=1) + 3.0
    made = items(500, token=1)
    _, values = ops.logprobs(logits, made)
    expected = [-(3.0 - x) - math.log1p(math.exp(x - 3.0)) for x in logits[:, 1].tolist()]
    np.testing.assert_allclose(values[:, 0], expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("top_k", [0, 3])
def test_bfloat16_is_widened_exactly(top_k):
    generator = torch.Generator().manual_seed(1)
    half = (torch.randn(30, 777, generator=generator) * 3).bfloat16()
    fields = {"temperature": np.arange(30) % 3 / 2, "top_k": top_k, "seed": np.arange(30)}
    narrow, wide = items(30, **fields), items(30, **fields)
    assert drawn(half, narrow) == drawn(half.float(), wide)
    for mine, theirs in zip(
        ops.logprobs(half, narrow), ops.logprobs(half.float(), wide), strict=True
    ):
        assert np.array_equal(mine, theirs)


def test_ranks_count_equals_of_lower_id_first():
    logits = torch.tensor([1.0, 5.0, 1.0, 5.0, 0.0, 1.0]).repeat(6, 1)
    made = items(6, token=np.arange(6))
    ops.logprobs(logits, made)
    assert made["rank"].tolist() == [3, 1, 4, 2, 6, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 257, 5000])
def test_argmax(size, dtype):
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randint(-30, 30, (40, size), generator=generator) / 8).to(dtype)
    made = items(40)
    ops.draw(logits, made)
    assert made["token"].tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "status"),
    [(float("nan"), ops.NOT_FINITE), (float("inf"), ops.NOT_FINITE), (float("-inf"), ops.OK)],
)
@pytest.mark.parametrize("at", [0, 63, 64, 99])
def test_status(value, status, dtype, at):
    logits = torch.zeros(3, 100, dtype=dtype)
    logits[1, at] = value
    made = items(3)
    ops.draw(logits, made)
    assert made["status"].tolist() == [ops.OK, status, ops.OK]
    assert (made["token"] < 0).tolist() == [False, status != ops.OK, False]


def test_a_row_without_any_token():
    made = items(1, temperature=1.0)
    assert drawn(torch.full((1, 70), float("-inf")), made) == ([-1], [ops.EMPTY])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 259, 4097])
def test_copies_are_the_rows_with_their_masks(dtype, vocab):
    draw = np.random.default_rng(vocab)
    logits = torch.from_numpy(draw.standard_normal((5, vocab)).astype(np.float32)).to(dtype)
    logits[0, 0] = torch.nan
    rows = np.array([4, 0, 0, 2, 1, 3], np.int64)
    words = -(-vocab // 32)
    masks = [
        None, draw.integers(-(2**31), 2**31, words).astype(np.int32), np.zeros(words, np.int32),
        np.full(words, -1, np.int32), draw.integers(-(2**31), 2**31, words + 2).astype(np.int32),
        None,
    ]  # fmt: skip
    out = np.full((6, vocab), 7, np.float32)
    ops.copies(logits, rows, masks, out)
    for row, mask, found in zip(rows, masks, out, strict=True):
        wanted = logits[row].float().numpy().copy()
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")
            wanted[bits == 0] = -np.inf
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 33, 259, 4097])
def test_masked_draws_are_those_from_copies_with_the_masks(dtype, vocab):
    """Also of rows in which only excluded tokens, or allowed ones, are not numbers."""
    draw = np.random.default_rng(vocab)
    logits = torch.from_numpy(draw.standard_normal((6, vocab)).astype(np.float32)).to(dtype)
    logits[4, vocab // 2] = torch.nan
    words = -(-vocab // 32)
    kinds = [
        lambda: None, lambda: draw.integers(-(2**31), 2**31, words).astype(np.int32),
        lambda: np.zeros(words, np.int32), lambda: np.full(words + 1, -1, np.int32),
        lambda: np.where(draw.random(words) < 0.3, -1, draw.integers(0, 3, words)).astype(np.int32),
    ]  # fmt: skip
    made = items(120, row=np.arange(120) % 6, seed=np.arange(120))
    made["temperature"] = np.arange(120) // 30 % 2 * 0.8
    made["top_k"], made["top_p"] = np.arange(120) % 7 // 5 * 3, 1 - np.arange(120) % 11 // 9 * 0.4
    made["min_p"] = np.arange(120) % 13 // 11 * 0.05
    masks = [kinds[n % len(kinds)]() for n in range(120)]
    copies = np.empty((120, vocab), np.float32)
    ops.copies(logits, made["row"].copy(), masks, copies)
    wanted = made.copy()
    wanted["row"] = np.arange(120)
    ops.draw(torch.from_numpy(copies), wanted)
    ops.draw(logits, made, masks)
    assert made["token"].tolist() == wanted["token"].tolist()
    assert made["status"].tolist() == wanted["status"].tolist()
