"""Rounding to 4-bit codes, and what codes stand for."""

import torch

from octavo.kernels.codes import Codes, round_to_codes


def test_codes_are_the_nearest_of_sixteen_levels():
    w = torch.randn(48, 200, generator=torch.Generator().manual_seed(0))
    codes = round_to_codes(w, group=64)
    assert codes.scale.shape == (48, 4)
    assert codes.codes.max() == 15
    step = codes.scale.repeat_interleave(64, 1)[:, :200]
    assert ((codes.values() - w).abs() <= step * 0.5001).all()


def test_values_of_codes():
    codes = Codes(
        torch.tensor([[0, 1, 2, 3, 15]], dtype=torch.uint8),
        torch.tensor([[0.5, 2.0]]), torch.tensor([[-1.0, 3.0]]), 4, 4,
    )  # fmt: skip
    assert codes.values().tolist() == [[-1.0, -0.5, 0.0, 0.5, 33.0]]
