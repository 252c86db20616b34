"""Attention compiled for GPUs that are not here: no spills, matrix units, wide loads."""

from dataclasses import replace

import pytest
import torch
import triton

from octavo.attention.base import AttentionSpec
from octavo.attention.triton import attend_constants, join_constants, tiles
from octavo.kernels.gpu import attention
from octavo.kernels.gpu.cache import rotate_and_write
from ptx import SHARED_MEMORY, TYPES, Compiled, compile_for

# Triton 3.6 allots registers less well than the version in constraints.txt.
MOST_SPILLED = 264 if triton.__version__.startswith("3.6.") else 0
LLAMA_8B = AttentionSpec(32, 8, 128, 0.088)
SPECS = {
    "Llama 8B": LLAMA_8B,
    "Llama 13B": AttentionSpec(40, 40, 128, 0.088),
    "Gemma 3 270M": AttentionSpec(4, 1, 256, 0.0625, window=512),
    "Gemma 2": AttentionSpec(8, 4, 256, 0.0625, window=4096, soft_cap=50.0),
    "SmolLM2": AttentionSpec(9, 3, 64, 0.125),
    "gpt-oss": AttentionSpec(64, 8, 64, 0.125, window=128, sinks=True),
}


def _attend(
    capability: int, spec: AttentionSpec, name: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Compiled:
    tile = tiles(spec, dtype, kv_dtype)[name]
    value, code = TYPES[dtype], TYPES[kv_dtype]
    types = {
        "out": f"*{value}", "query": f"*{value}", "sinks": f"*{value}", "cache": f"*{code}",
        "scales": "*fp32", "partials": "*fp32", "moments": "*fp32", "tables": "*i32",
        "items": "*i32", "count": "*i32", "stride_block": "i64", "stride_kind": "i64",
        "stride_head": "i64", "stride_table": "i32", "stride_query": "i32", "stride_out": "i32",
        "window": "i32", "scale": "fp32", "soft_cap": "fp32",
    }  # fmt: skip
    return compile_for(
        capability,
        attention.attend,
        types,
        attend_constants(spec, dtype, kv_dtype, 16, tile),
        tile.num_warps,
        tile.num_stages,
        unaligned=("stride_table", "window", "count"),
    )


def _check(capability: int, name: str, built: Compiled) -> None:
    assert built.spilled <= MOST_SPILLED
    assert built.shared <= SHARED_MEMORY[capability]
    assert built.count("cp.async.cg") >= 2  # keys and values arrive while others are multiplied
    if capability == 90 and name == "whole":
        assert built.count("wgmma.mma_async") >= 4
        assert not built.count("mma.sync")
    else:
        assert built.count("mma.sync") >= 8


@pytest.mark.parametrize("name", ["split", "whole"])
@pytest.mark.parametrize("capability", [80, 90])
def test_attention_of_an_8b_model(capability: int, name: str) -> None:
    _check(capability, name, _attend(capability, LLAMA_8B, name, torch.bfloat16, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("model", SPECS)
def test_attention_of_each_shape(model: str, kv_dtype: torch.dtype, capability: int) -> None:
    if kv_dtype == torch.float8_e4m3fn and capability < 89:
        pytest.skip("no conversion of float8_e4m3fn before compute capability 8.9")
    for spec in (SPECS[model], replace(SPECS[model], window=None, soft_cap=None)):
        for name in ("split", "whole"):
            _check(capability, name, _attend(capability, spec, name, torch.bfloat16, kv_dtype))


@pytest.mark.parametrize("capability", [80, 90])
def test_the_join(capability: int) -> None:
    types = {
        "out": "*bf16", "partials": "*fp32", "moments": "*fp32", "joins": "*i32", "count": "*i32",
        "sinks": "*bf16", "stride_out": "i32",
    }  # fmt: skip
    built = compile_for(capability, attention.join, types, join_constants(LLAMA_8B),
                        unaligned=("count",))  # fmt: skip
    assert built.spilled == 0
    assert built.count(r"ld\.global\S*v4") >= 1


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_rotary_embedding_and_write(form: int, capability: int) -> None:
    types = {
        "cache": "*bf16" if form == 0 else "*i8", "scales": "*fp32", "query": "*bf16",
        "key": "*bf16", "value": "*bf16", "query_norm": "*bf16", "key_norm": "*bf16",
        "eps": "fp32", "cos_sin": "*fp32", "positions": "*i64",
        "slots": "*i64", "stride_block": "i64", "stride_kind": "i64", "stride_head": "i64",
        "stride_query": "i32", "stride_key": "i32", "stride_value": "i32", "stride_table": "i32",
    }  # fmt: skip
    constants = {
        "Q_HEADS": 32, "KV_HEADS": 8, "HEADS": 8, "HEAD_DIM": 128, "DIMS": 128, "HALF": 64,
        "BLOCK": 16, "FORM": form, "WRITES": True, "NORMS": form == 0, "CAST_FIRST": False,
    }  # fmt: skip
    built = compile_for(capability, rotate_and_write, types, constants)
    assert built.spilled == 0
    assert built.count(r"ld\.global\S*v[24]") >= 1
