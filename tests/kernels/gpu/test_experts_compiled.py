"""Mixtures of experts compiled for GPUs that are not here: no spills, matrix units, wide loads."""

import pytest

from octavo.kernels.gpu import experts
from octavo.kernels.gpu.experts_call import SPAN, TILES, outputs_of
from ptx import SHARED_MEMORY, Compiled, compile_for

INTS = dict.fromkeys(
    ("N", "K", "num_items", "stride_x", "stride_weight", "stride_scale"), "i32"
)  # fmt: skip


def _check(capability: int, most: int, gated: bool, stored: str, spans: int = 2) -> Compiled:
    tile, native = TILES[most], capability >= 89
    code = {"fp8": "*fp8e4nv" if native else "*u8"}.get(stored, f"*{stored}")
    types = {
        "y": "*bf16", "x": "*bf16", "weight": code, "scale": "*fp32", "order": "*i32",
        "items": "*i32", **INTS,
    }  # fmt: skip
    constants = {
        "CHOICES": 8, "ROWS": tile.rows, "OUTPUTS": outputs_of(tile, gated), "SPAN": SPAN,
        "GATED": gated, "GELU": False, "FP8": stored == "fp8", "SPANS": spans, "NATIVE": native,
        "WIDE": False, "FIELDS": experts.ITEM_FIELDS,
    }  # fmt: skip
    built = compile_for(capability, experts.multiply_experts, types, constants, tile.num_warps,
                        tile.num_stages, unaligned=("num_items", "stride_scale"))  # fmt: skip
    assert built.spilled == 0
    assert built.shared <= SHARED_MEMORY[capability]
    assert built.count("cp.async.cg") >= 4
    if capability == 90:
        assert built.count("wgmma.mma_async") >= 4
        assert not built.count("mma.sync")
    else:
        assert built.count("mma.sync") >= 8
    return built


@pytest.mark.parametrize("capability", [80, 90])
def test_a_step_of_few_rows(capability: int) -> None:
    _check(capability, 16, True, "bf16")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("stored", "spans"), [("bf16", 1), ("fp8", 2), ("fp8", 2**30)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("most", list(TILES))
@pytest.mark.parametrize("capability", [80, 90])
def test_each_tile(capability: int, most: int, gated: bool, stored: str, spans: int) -> None:
    _check(capability, most, gated, stored, spans)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_routing_sorting_and_sums(capability: int) -> None:
    kernels = [
        (experts.route, {"chosen": "*i32", "weights": "*fp32", "logits": "*bf16",
                         "stride_logits": "i32"},
         {"EXPERTS": 128, "COLUMNS": 128, "CHOICES": 8, "PLACES": 8, "RENORMALIZE": True}, 1),
        (experts.sort_pairs, {"order": "*i32", "items": "*i32", "chosen": "*i32", "pairs": "i32"},
         {"EXPERTS": 128, "ROWS": 16, "BLOCK": 1024, "FIELDS": experts.ITEM_FIELDS}, 4),
        (experts.combine, {"out": "*bf16", "y": "*bf16", "weights": "*fp32", "N": "i32"},
         {"CHOICES": 8, "COLUMNS": 1024}, 4),
    ]  # fmt: skip
    for kernel, types, constants, warps in kernels:
        built = compile_for(capability, kernel, types, constants, warps, unaligned=("pairs",))
        assert built.spilled == 0
        if kernel is not experts.sort_pairs:  # any number of pairs, at any place
            assert built.count(r"ld\.global\S*v[24]") >= 1
