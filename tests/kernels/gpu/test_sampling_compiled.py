"""Sampling compiled for GPUs that are not here: no spills, wide loads."""

import pytest

from octavo.kernels.gpu import sampling
from octavo.kernels.gpu.sampling_call import (
    PART,
    ROW_TILE,
    SURVEY_TILE,
    TAKE_TILE,
    WARPS,
    constants,
)  # fmt: skip
from ptx import SHARED_MEMORY, Compiled, compile_for

# A vocabulary of Llama 3.
SHAPE = constants(128256)
PARTIAL = {"values": "*fp64", "winners": "*i32"}
COMMON = {"logits": "*bf16", "maxima": "*i32", "items": "*i64", "vocab": "i32"}


def _check(built: Compiled, capability: int) -> None:
    assert built.spilled == 0
    assert built.shared <= SHARED_MEMORY[capability]
    assert built.count(r"ld\.global\S*v[24]") >= 1


@pytest.mark.parametrize("capability", [80, 90])
def test_survey(capability: int) -> None:
    types = {name: COMMON[name] for name in ("maxima", "logits", "vocab")}
    built = compile_for(
        capability, sampling.survey, types, {"PIECES": SHAPE["PIECES"], "TILE": SURVEY_TILE // 64}
    )
    _check(built, capability)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_draws(capability: int) -> None:
    types = {"out": "*i64", "plans": "*i64", "places": "*i32", **PARTIAL, **COMMON}
    built = compile_for(capability, sampling.draw, types, {**SHAPE, "PARTS": 16}, WARPS)
    _check(built, capability)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_draws_from_whole_rows(capability: int) -> None:
    types = {"out": "*i64", "plans": "*i64", **COMMON}
    values = {"PIECES": SHAPE["PIECES"], "TILE": ROW_TILE}
    built = compile_for(capability, sampling.draw_from_row, types, values, WARPS)
    _check(built, capability)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_races_in_parts(capability: int) -> None:
    values = {"PIECES": SHAPE["PIECES"], "PARTS": 16, "SIZE": PART, "TILE": ROW_TILE}
    _check(
        compile_for(capability, sampling.spread, {**PARTIAL, **COMMON}, values, WARPS), capability
    )


@pytest.mark.parametrize("capability", [80, 90])
def test_tokens_of_the_step_before(capability: int) -> None:
    types = {"ids": "*i64", "drawn": "*i64", "count": "i32"}
    built = compile_for(
        capability, sampling.take_drawn, types, {"TILE": TAKE_TILE}, unaligned=("count",)
    )
    assert built.spilled == 0
