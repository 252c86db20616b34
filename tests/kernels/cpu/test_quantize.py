"""Rounding weights to int8 and int4: how far values move, and that codes stay what they are."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.codes import Codes, round_to_codes
from octavo.kernels.cpu import quantize


def weights(n=48, k=200, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def captured(monkeypatch, weight, method, largest=None):
    """The int8 values and scales that `pack` hands to the layout."""
    seen = {}

    def pack_int8(q, scale):
        seen.update(q=q, scale=scale)

    def pack_int4(codes, m, o, scale, group):
        seen.update(q=reference.int4_weights(codes, m, o, group), scale=scale, codes=codes)

    monkeypatch.setattr(quantize.gemm, "pack_int8", pack_int8)
    monkeypatch.setattr(quantize.gemm, "pack_int4", pack_int4)
    quantize.pack(weight, method, largest)
    return seen["q"].float() * seen["scale"].unsqueeze(1), seen


def test_int8_moves_no_value_by_more_than_half_a_step(monkeypatch):
    w = weights()
    found, _ = captured(monkeypatch, w, "w8a8")
    step = w.abs().amax(1, keepdim=True) / 127
    assert ((found - w).abs() <= step * 0.5001).all()
    assert ((found - w).abs() > step * 0.45).any()


def test_int4_lies_within_a_step_of_the_column_grid(monkeypatch):
    codes = round_to_codes(weights())
    found, seen = captured(monkeypatch, codes, "w4a8")
    assert torch.equal(seen["codes"], codes.codes)
    grid = codes.values().abs().amax(1, keepdim=True) / 127
    assert ((found - codes.values()).abs() <= grid * 0.56).all()


@pytest.mark.parametrize("method", ["w8a8", "w4a8"])
def test_parts_are_rounded_as_the_whole_is(monkeypatch, method):
    """Of a weight whose inputs are divided among ranks, given the largest value of the whole."""
    w = weights(48, 192)
    largest = (w if method == "w8a8" else round_to_codes(w).values()).abs().amax(1)
    whole, _ = captured(monkeypatch, w, method)
    for part, columns in zip(w.split(64, 1), whole.split(64, 1), strict=True):
        found, _ = captured(monkeypatch, part.contiguous(), method, largest)
        assert torch.equal(found, columns)
        alone, _ = captured(monkeypatch, part.contiguous(), method)
        assert not torch.equal(alone, columns)


@pytest.mark.parametrize("method", ["w8a8", "w4a8"])
def test_columns_of_zeros_and_of_one_value(monkeypatch, method):
    w = torch.zeros(3, 64)
    w[1] = -2.5
    w[2, :32] = 1e-6
    found, _ = captured(monkeypatch, w, method)
    torch.testing.assert_close(found, w, rtol=0.01, atol=1e-8)


def test_eight_bit_codes_are_widened_to_int8(monkeypatch):
    w = weights(4, 64)
    codes = Codes((w * 20 + 128).to(torch.uint8), torch.full((4, 2), 0.05),
                  torch.full((4, 2), -6.4), 32, 8)  # fmt: skip
    assert not quantize.keeps_codes(codes)
    found, _ = captured(monkeypatch, codes, "w8a8")
    torch.testing.assert_close(found, codes.values(), rtol=0, atol=0.6 * 3.5 / 127)
