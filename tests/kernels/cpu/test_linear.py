"""Products: right, and the same bits for a row however many rows there are."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.cpu.products import flawed, weight

from octavo.kernels.cpu import linear, target
from octavo.kernels.cpu.batch_invariant import cancelling_inputs
from octavo.kernels.cpu.linear import CpuProducts

BF16, FP32 = torch.bfloat16, torch.float32
ROW_COUNTS = (*range(1, 36), 48, 63, 64, 65, 100, 129, 150, 200, 256, 300)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has no kernels."""
    monkeypatch.setattr(target, "has_tiles", lambda: False)
    monkeypatch.setattr(target, "has_fma", lambda: False)


@pytest.fixture(params=["best", "vectors", "onednn"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "onednn":
        request.getfixturevalue("_onednn")
    elif request.param == "vectors":
        monkeypatch.setattr(target, "has_tiles", lambda: False)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(7, 30), (96, 64), (33, 100)])
def test_products_are_right(rows: int, columns: int, has_bias: bool, dtype: torch.dtype) -> None:
    w = weight(rows, columns, dtype)
    bias = torch.randn(rows).to(dtype) if has_bias else None
    product = CpuProducts(dtype).make(w, bias)
    for count in (1, 2, 17, 70):
        x = torch.randn(count, columns).to(dtype)
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        error = (product(x).double() - exact).abs().max()
        assert error < (1e-5 if dtype == FP32 else 3e-2)
        assert product(x).shape == (count, rows)


# 1536 -> 576: oneDNN on AMX some counts differ; 2048 -> 64 and 4864 -> 64: most do.
@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "columns"), [(96, 576), (576, 1536), (64, 2048), (64, 4864)])
def test_a_row_has_the_same_bits_in_any_batch(rows: int, columns: int, dtype: torch.dtype) -> None:
    product = CpuProducts(dtype, strict=True).make(weight(rows, columns, dtype))
    x = torch.randn(max(ROW_COUNTS), columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = product(x)
    for count in ROW_COUNTS:
        assert torch.equal(product(x[:count]), whole[:count]), count
        assert torch.equal(product(x[-count:]), whole[-count:]), count


@pytest.mark.usefixtures("_onednn")
def test_a_later_layer_makes_an_inconclusive_probe_conclusive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = set(range(193, 257))
    monkeypatch.setattr(linear, "_onednn", lambda packed, bias: flawed(packed.to_dense(), bad))
    monkeypatch.setattr(linear, "_has_onednn", lambda dtype: True)
    products = CpuProducts(FP32)
    products.make(torch.zeros(48, 300))
    w = weight(48, 300, FP32)
    x = torch.randn(200, 300)
    assert torch.equal(products.make(w)(x), flawed(w, set())(x))


@pytest.mark.usefixtures("_onednn")
def test_not_a_number_in_a_weight_is_no_error() -> None:
    w = weight(48, 300, FP32)
    w[3, 5] = float("nan")
    CpuProducts(FP32).make(w)(torch.ones(3, 300))


@pytest.mark.usefixtures("_onednn")
def test_without_onednn_the_plain_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    products = CpuProducts(FP32)
    w = weight(96, 64, FP32)
    x = torch.randn(5, 64)
    torch.testing.assert_close(products.make(w)(x), F.linear(x, w))
    assert products.explain().startswith("torch linear")


@pytest.mark.usefixtures("_onednn")
def test_it_says_which_shapes_are_not_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = set(range(65, 4096))
    monkeypatch.setattr(linear, "_onednn", lambda packed, bias: flawed(packed.to_dense(), bad))
    monkeypatch.setattr(linear, "_has_onednn", lambda dtype: True)
    w = weight(48, 300, BF16)
    loose, strict = CpuProducts(BF16), CpuProducts(BF16, strict=True)
    x = cancelling_inputs(w).repeat(20, 1)
    assert not torch.equal(loose.make(w)(x), flawed(w, set())(x))
    assert torch.equal(strict.make(w)(x), flawed(w, set())(x))
    assert (loose.unstable, strict.unstable) == (["300x48"], [])
    assert "300x48" in loose.explain()
