"""Products compiled for GPUs that are not here: no spills, matrix units, wide loads."""

import pytest

from octavo.kernels.gpu import matmul
from octavo.kernels.gpu.linear import CODE_TILES, DENSE_TILES, FP8_TILES, Tile, fp8_span
from ptx import SHARED_MEMORY, Compiled, compile_for

INTS = dict.fromkeys(("M", "N", "K"), "i32")
MOST = list(CODE_TILES)


def _codes(capability: int, tile: Tile, bits: int, span: int = 64) -> Compiled:
    types = {
        "y": "*bf16", "x": "*bf16", "codes": "*u8", "scale": "*fp16", "minimum": "*fp16",
        "bias": "*bf16", "stride_x": "i32", "stride_codes": "i32", "stride_scale": "i32", **INTS,
    }  # fmt: skip
    constants = {
        "ROWS": tile.rows, "OUTPUTS": tile.outputs, "SPAN": span, "SPANS": 128 // span,
        "BITS": bits, "PARTS": 1, "BIAS": False, "WIDE": False,
    }  # fmt: skip
    return compile_for(capability, matmul.multiply_codes, types, constants, tile.num_warps,
                       tile.num_stages, unaligned=("M", "stride_scale"))  # fmt: skip


def _check(capability: int, built: Compiled) -> None:
    assert built.spilled == 0
    assert built.shared <= SHARED_MEMORY[capability]
    assert built.count("wgmma.mma_async" if capability == 90 else "mma.sync") >= 2


@pytest.mark.parametrize("capability", [80, 90])
def test_products_of_few_rows_on_4_bit_codes(capability: int) -> None:
    built = _codes(capability, CODE_TILES[16], 4)
    _check(capability, built)
    assert built.count("cp.async") + built.count(r"ld\.global\S*v[24]") >= 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("span", [16, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("capability", [80, 90])
def test_products_on_codes(capability: int, most: int, bits: int, span: int) -> None:
    _check(capability, _codes(capability, CODE_TILES[most], bits, span))


def _fp8(capability: int, tile: Tile, group: int, native: bool) -> Compiled:
    """group: 0 for a scale per output."""
    types = {
        "y": "*bf16", "x": "*bf16", "codes": "*fp8e4nv" if native else "*u8", "scale": "*fp32",
        "bias": "*bf16", "stride_x": "i32", "stride_codes": "i32", "stride_scale": "i32", **INTS,
    }  # fmt: skip
    span = fp8_span(group, group == 0, tile.rows)
    assert span is not None
    constants = {
        "ROWS": tile.rows, "OUTPUTS": tile.outputs, "SPAN": span, "SPANS": group // span,
        "PARTS": 1, "BIAS": False, "NATIVE": native, "WIDE": False,
    }  # fmt: skip
    return compile_for(capability, matmul.multiply_fp8, types, constants, tile.num_warps,
                       tile.num_stages, unaligned=("M", "stride_scale"))  # fmt: skip


@pytest.mark.parametrize(("capability", "native"), [(80, False), (90, True)])
def test_products_of_few_rows_on_fp8(capability: int, native: bool) -> None:
    built = _fp8(capability, FP8_TILES[16], 128, native)
    _check(capability, built)
    assert built.count("cp.async.cg") >= 8
    if native:
        assert built.count(r"cvt\.\S*e4m3x2") >= 8


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize(("capability", "native"), [(80, False), (90, False), (90, True)])
def test_products_on_fp8(capability: int, native: bool, most: int, group: int) -> None:
    _check(capability, _fp8(capability, FP8_TILES[most], group, native))


@pytest.mark.slow
@pytest.mark.parametrize("most", list(DENSE_TILES))
@pytest.mark.parametrize("capability", [80, 90])
def test_dense_products(capability: int, most: int) -> None:
    tile = DENSE_TILES[most]
    types = {"y": "*bf16", "x": "*bf16", "weight": "*bf16", "bias": "*bf16",
             "stride_x": "i32", "stride_weight": "i32", **INTS}  # fmt: skip
    constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "SPAN": 64, "PARTS": 1,
                 "BIAS": True, "WIDE": False}  # fmt: skip
    built = compile_for(capability, matmul.multiply, types, constants, tile.num_warps,
                        tile.num_stages, unaligned=("M",))  # fmt: skip
    assert built.spilled == 0
    assert built.shared <= SHARED_MEMORY[capability]
