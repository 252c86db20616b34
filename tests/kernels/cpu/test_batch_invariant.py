"""Row counts that give a row other bits are found, and padded or split around."""

import pytest
import torch
from tests.kernels.cpu.products import flawed, weight

from octavo.kernels.cpu.batch_invariant import (
    BatchInvariantRows,
    batch_invariant,
    cancelling_inputs,
)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("bad", "rows", "fit"),
    [
        (set(), 40, 40),
        ({40}, 40, 41),
        (set(range(1, 33)), 1, 33),
        (set(range(33, 64)), 40, 64),
        (set(range(193, 257)), 200, 257),
        (set(range(129, 4096)), 1000, 128),
        (set(range(129, 4096)) - {300}, 1000, 300),
        (set(range(65, 4096)), 70, 64),
        ({1}, 1, 2),
    ],
)
def test_row_counts_that_disagree_are_found(
    bad: set[int], rows: int, fit: int, dtype: torch.dtype
) -> None:
    w = weight(48, 300, dtype)
    assert BatchInvariantRows(flawed(w, bad), w)[rows] == fit


@pytest.mark.parametrize("bad", [{40}, set(range(129, 4096)), set(range(1, 64))])
def test_padded_and_split_rows_join_exactly(bad: set[int]) -> None:
    w = weight(48, 300, BF16)
    product = batch_invariant(flawed(w, bad), BatchInvariantRows(flawed(w, bad), w))
    exact = flawed(w, set())
    for count in (1, 40, 128, 129, 300, 384):
        x = cancelling_inputs(w).repeat(24, 1)[:count]
        assert torch.equal(product(x), exact(x)), count


def test_a_zero_weight_is_inconclusive() -> None:
    """The first layer may hold zeros, of which every order of summation gives the same."""
    bad = set(range(193, 257))
    zero, real = torch.zeros(48, 300), weight(48, 300, FP32)
    counts = BatchInvariantRows(flawed(zero, bad), zero)
    assert counts.inconclusive
    counts.probe(flawed(real, bad), real)
    assert not counts.inconclusive
    assert counts[200] == 257


@pytest.mark.parametrize(
    ("bad", "affordable"),
    [(set(), True), ({200, 256}, True), (set(range(129, 4096)), True), ({2048}, True),
     (set(range(65, 4096)), False), (set(range(250, 500)), True)],
)  # fmt: skip
def test_what_is_affordable(bad: set[int], affordable: bool) -> None:
    w = weight(48, 300, BF16)
    assert BatchInvariantRows(flawed(w, bad), w).is_affordable(2048) is affordable
