"""Products on codes and in fixed tiles against torch's on the dequantized weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.codes import Codes, round_to_codes
from octavo.kernels.gpu import linear
from octavo.kernels.gpu.linear import GpuProducts, as_codes, pack_codes
from paging import assert_close

FLOATS = (torch.float32, torch.float16)


def _codes(n: int, k: int, group: int, bits: int) -> Codes:
    torch.manual_seed(n + k)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    groups = -(-k // group)
    scale = (torch.rand(n, groups) * 0.01 + 0.005) * 16 / 2**bits
    return Codes(codes, scale, -scale * 7.3 * 2**bits / 16, group, bits)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("n", "k", "group", "bits"),
    [(70, 200, 32, 4), (64, 256, 128, 4), (33, 144, 16, 4), (40, 200, 200, 8), (50, 192, 64, 8)],
)
def test_codes(n: int, k: int, group: int, bits: int, dtype: torch.dtype) -> None:
    codes = _codes(n, k, group, bits)
    method = "int4" if bits == 4 else "int8"
    for rows, bias in ((1, None), (17, torch.randn(n).to(dtype))):
        x = torch.randn(rows, k + 8).to(dtype)[:, :k]
        product = GpuProducts(dtype, False).make(codes, bias, method=method)
        weight = codes.values().to(dtype)
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert_close(product(x), expected)


def test_nothing_is_read_behind_the_scales() -> None:
    """The last chunk of 192 inputs has a span without any."""
    codes, behind = _codes(50, 192, 64, 4), torch.full((2, 50 * 3 + 8), torch.nan)
    for row, terms in zip(behind, (codes.scale, codes.minimum), strict=True):
        row[: terms.numel()] = terms.flatten()
    scale, minimum = (row[: 50 * 3].view(50, 3) for row in behind)
    product = GpuProducts(torch.float32, False).make(
        replace(codes, scale=scale, minimum=minimum), method="int4"
    )
    x = torch.randn(2, 192)
    assert_close(product(x), F.linear(x, codes.values()))


def test_parts_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "parts_of", lambda outputs, inputs: 3)
    codes, bias = _codes(40, 300, 32, 4), torch.randn(40)
    x = torch.randn(5, 300)
    expected = F.linear(x, codes.values(), bias)
    assert_close(GpuProducts(torch.float32, False).make(codes, bias, method="int4")(x), expected)
    product = GpuProducts(torch.float32, True).make(codes, bias)
    assert_close(product(x), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fixed_tiles_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(50, 100), torch.randn(50), torch.randn(40, 100)
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    product = GpuProducts(dtype, deterministic=True).make(weight, bias)
    together = product(x)
    assert_close(together, F.linear(x.float(), weight.float(), bias.float()))
    for row in (0, 17, 39):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_weights_are_rounded_to_codes(method: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 96)
    codes = as_codes(weight, method)
    levels = 255 if method == "int8" else 15
    spread = weight.abs().amax(1) * 2
    assert (codes.values() - weight).abs().max() <= float(spread.max()) / levels / 1.9
    stored = round_to_codes(weight)
    assert as_codes(stored, method) is stored


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_parts_are_rounded_as_the_whole_is(method: str) -> None:
    """Of a weight whose inputs are divided among ranks, given the largest value of the whole."""
    torch.manual_seed(0)
    weight = torch.randn(30, 96)
    whole, largest = as_codes(weight, method).values(), weight.abs().amax(1)
    parts = [as_codes(part.contiguous(), method, largest) for part in weight.split(32, 1)]
    assert torch.equal(torch.cat([part.values() for part in parts], 1), whole)


def test_codes_in_a_group_without_a_span_are_dequantized() -> None:
    codes = _codes(20, 100, 20, 4)
    products = GpuProducts(torch.float32, False)
    x = torch.randn(3, 100)
    assert_close(products.make(codes, method="int4")(x), x @ codes.values().T)
    assert products.explain() == "cuBLAS"


def test_packed_codes_hold_the_second_span_in_the_high_halves() -> None:
    codes = torch.arange(40, dtype=torch.uint8).remainder(16).view(1, 40)
    packed = pack_codes(codes, 4, 16)
    assert packed.shape == (1, 32)
    assert packed[0, :8].tolist() == [i | i << 4 for i in range(8)]
    assert packed[0, 16:24].tolist() == [(i + 32) % 16 for i in range(8)]


def _fp8(n: int, k: int, group: int) -> Codes:
    """With every code that is a number, subnormals too, in each row."""
    torch.manual_seed(n + k)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].repeat(n, k // 254 + 1)[:, :k]
    order = torch.rand(n, k).argsort(1)
    codes = every.gather(1, order).view(torch.float8_e4m3fn)
    scale = torch.rand(n, -(-k // group)) * 0.01 + 0.001
    return Codes(codes, scale, torch.zeros_like(scale), group, 8)


@pytest.mark.parametrize(("dtype", "native"), [(torch.float32, False), (torch.float16, True)])
@pytest.mark.parametrize(("n", "k", "group"), [(70, 300, 128), (33, 260, 260)])
def test_fp8(n: int, k: int, group: int, dtype: torch.dtype, native: bool) -> None:
    """Converted by the GPU, or from the bits of codes."""
    _check_fp8(n, k, group, dtype, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(70, 300, 128), (33, 260, 260), (40, 270, 32), (64, 256, 64)]
)
def test_fp8_in_more_shapes(n: int, k: int, group: int, dtype: torch.dtype, native: bool) -> None:
    _check_fp8(n, k, group, dtype, native)


def _check_fp8(n: int, k: int, group: int, dtype: torch.dtype, native: bool) -> None:
    codes = _fp8(n, k, group)
    products = GpuProducts(dtype, False, converts_fp8=native)
    for rows, bias in ((1, None), (17, torch.randn(n).to(dtype))):
        x = torch.randn(rows, k + 8).to(dtype)[:, :k]
        product = products.make(codes, bias, method="fp8")
        expected = F.linear(x.float(), codes.values(), None if bias is None else bias.float())
        assert_close(product(x), expected)
    assert products.explain() == "cuBLAS; 2 products on codes in Triton"


def test_parts_of_a_sum_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "parts_of", lambda outputs, inputs: 3)
    for group in (128, 500):
        codes, bias, x = _fp8(40, 500, group), torch.randn(40), torch.randn(5, 500)
        product = GpuProducts(torch.float32, False).make(codes, bias, method="fp8")
        assert_close(product(x), F.linear(x, codes.values(), bias))


def test_weights_are_rounded_to_fp8() -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 96)
    codes = as_codes(weight, "fp8")
    assert codes.are_floats
    assert codes.codes.float().abs().amax(1).eq(448).all()
    error = (codes.values() - weight).abs() / weight.abs().clamp(min=1e-2)
    assert error.max() < 2**-4 + 1e-3
