"""How parameters are divided, and which sizes divide a model, before anything is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import toys
from tests.models.test_loader_quantized import fp8, quantized
from tests.ranks import Meeting, ThreadGroup

import kit
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.config import from_config
from octavo.models.decoder import Decoder
from octavo.models.loader import prepare
from octavo.models.registry import FAMILIES, by_architecture, decoder_class
from octavo.models.sharding import (
    FIRST,
    REPLICATED,
    Shard,
    Span,
    column,
    local_attention,
    local_shape,
    row,
    vocabulary,
)
from octavo.models.spec import ModelSpec

HEADS = Span(64, 8, "num_attention_heads")
KEYS = Span(16, 2, "num_key_value_heads", shared=True)


def regions(cut, shape, size):
    return [cut.regions(shape, Shard(rank, size)) for rank in range(size)]


def test_columns_are_rows_of_the_weight_and_rows_its_columns() -> None:
    assert regions(column(HEADS), (64, 10), 2) == [[((0, 32), (0, 10))], [((32, 64), (0, 10))]]
    assert regions(column(HEADS), (64,), 2) == [[((0, 32),)], [((32, 64),)]]
    assert regions(row(HEADS), (10, 64), 2) == [[((0, 10), (0, 32))], [((0, 10), (32, 64))]]
    assert regions(row(HEADS), (3, 10, 64), 2)[1] == [((0, 3), (0, 10), (32, 64))]
    assert regions(REPLICATED, (5, 6), 2) == [[((0, 5), (0, 6))]] * 2
    assert regions(FIRST, (5,), 2) == [[((0, 5),)], []]


def test_ranks_beyond_the_kv_heads_hold_copies() -> None:
    parts = [KEYS.part(Shard(rank, 8)) for rank in range(8)]
    assert parts == [(0, 8)] * 4 + [(8, 16)] * 4  # rank r has head r * 2 // 8


def test_the_parts_of_a_joined_weight_are_cut_one_by_one() -> None:
    joined = column(HEADS, KEYS, KEYS)
    assert [part[0] for part in joined.regions((96, 5), Shard(1, 4))] == [
        (16, 32), (64, 72), (80, 88),
    ]  # fmt: skip
    assert local_shape((96, 5), joined, Shard(1, 4)) == (32, 5)


def test_shares_of_a_vocabulary_are_equal_and_the_last_is_shorter_or_empty() -> None:
    parts = [vocabulary(101, 101).parts(Shard(rank, 3))[0] for rank in range(3)]
    assert parts == [(0, 64), (64, 101), (101, 101)]
    # Rows that no id has are left out, but for those that may be packed with ones that are used.
    assert vocabulary(101, 200).parts(Shard(1, 2)) == [(64, 128)]
    assert local_shape((200, 5), vocabulary(60, 200), Shard(2, 3)) == (0, 5)


def spec_of(family: str, **changes: Any) -> ModelSpec:
    config = {
        "architectures": [by_architecture(family).architecture], "vocab_size": 101,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 8,
        "max_position_embeddings": 512, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changes,
    }  # fmt: skip
    return from_config(config)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_every_parameter_of_every_family_is_divided_without_loss(family: str) -> None:
    spec = spec_of(family)
    kind = decoder_class(spec.family)
    shapes, cuts = kind.parameter_shapes(spec), kind.parameter_cuts(spec)
    assert shapes.keys() == cuts.keys()
    for name, shape in shapes.items():
        found = [r for rank in range(4) for r in cuts[name].regions(shape, Shard(rank, 4))]
        at = 1 if cuts[name].kind == "row" else 0
        held = sorted(i for region in found for i in range(*region[at]))
        each = 4 if cuts[name].kind == "replicated" else 1
        assert held == sorted([*range(shape[at])] * each), name
    divided = [name for name, cut in cuts.items() if cut.kind in ("row", "column")]
    assert {name for name in shapes if name.endswith("_proj.weight")} <= set(divided)
    attention = local_attention(Decoder.describe_attention(spec), 4)
    assert {(one.num_heads, one.num_kv_heads) for one in attention} == {(2, 1)}


def refused(folder: Path, size: int, **options: Any) -> str:
    """What `prepare` says of a size; no weight is read, and nothing is communicated."""
    config = EngineConfig(model=str(folder), load_progress=False, **options)
    with pytest.raises(ConfigError) as caught:
        prepare(config, kit.cpu_device(), torch.float32, ThreadGroup(Meeting(size), 0))
    return str(caught.value).replace(str(folder), "MODEL")


def test_a_size_that_does_not_divide_is_refused_by_those_that_do(tmp_path: Path) -> None:
    folder = kit.tiny(
        tmp_path, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8
    )
    assert refused(folder, 2) == (
        "tensor_parallel_size=2 does not divide num_attention_heads=9 of MODEL; possible: 1, 3"
    )  # not 9, which does not divide the intermediate size of 96
    assert refused(folder, 9).startswith(
        "tensor_parallel_size=9 does not divide intermediate_size=96 of MODEL; possible: 1, 3"
    )
    toys.edit_config(folder, intermediate_size=99)
    assert refused(folder, 2).endswith("num_attention_heads=9 of MODEL; possible: 1, 3, 9")


def test_query_heads_stay_with_their_kv_head(tmp_path: Path) -> None:
    """Three ranks would divide six heads, but not in groups that share a KV head."""
    folder = kit.tiny(
        tmp_path, num_attention_heads=6, num_key_value_heads=2, head_dim=8, hidden_size=48
    )
    assert refused(folder, 3) == (
        "tensor_parallel_size=3 neither divides num_key_value_heads=2 nor is a multiple of it of "
        "MODEL; possible: 1, 2, 6"
    )


def test_weights_rounded_to_int4_are_cut_between_groups(tmp_path: Path) -> None:
    """96 inputs in groups of 32 are three groups; 64 inputs two."""
    folder = kit.tiny(tmp_path)
    assert refused(folder, 2, quantization="int4") == (
        "tensor_parallel_size=2 cuts the 96 inputs of model.layers.0.mlp.down_proj.weight inside "
        "a group of 32 (int4) of MODEL; possible: 1"
    )
    config = EngineConfig(
        model=str(folder), quantization="int4", quantization_override="*.down_proj=int8",
        load_progress=False,
    )  # fmt: skip
    prepare(config, kit.cpu_device(), torch.float32, ThreadGroup(Meeting(2), 1))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_stored_groups_are_not_torn(method: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path, method, {"intermediate_size": 64 * 3})
    assert refused(folder, 4) == (
        "tensor_parallel_size=4 cuts the 192 inputs of model.layers.0.mlp.down_proj.weight inside "
        f"a group of 32 ({method}) of MODEL; possible: 1, 2"
    )
    # Two KV heads of 4 outputs are packed into one word.
    folder = quantized(
        tmp_path / "narrow", method,
        {"head_dim": 4, "num_attention_heads": 16, "intermediate_size": 128},
    )  # fmt: skip
    assert refused(folder, 2) == (
        "tensor_parallel_size=2 cuts the 8 outputs of model.layers.0.self_attn.k_proj.weight "
        f"inside a group of 8 ({method}) of MODEL; possible: 1"
    )


def test_blocks_that_share_a_scale_are_not_torn(tmp_path: Path) -> None:
    """Though the weight itself has its usual name."""
    folder = fp8(tmp_path, sizes={"head_dim": 32, "intermediate_size": 64 * 3})
    assert refused(folder, 4) == (
        "tensor_parallel_size=4 cuts the 192 inputs of model.layers.0.mlp.down_proj.weight inside "
        "a group of 32 (fp8) of MODEL; possible: 1, 2"
    )


def test_the_experts_of_a_layer_are_one_component(tmp_path: Path) -> None:
    """An override names them without their number."""
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 96}
    folder = toys.save(toys.make("mixtral", num_local_experts=4, **sizes), tmp_path)
    assert "inside a group of 32 (int4)" in refused(folder, 2, quantization="int4")
    config = EngineConfig(
        model=str(folder), quantization="int4", load_progress=False,
        quantization_override="*.experts.down_proj=int8",
    )  # fmt: skip
    prepare(config, kit.cpu_device(), torch.float32, ThreadGroup(Meeting(2), 1))


def test_an_architecture_that_says_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kit.tiny(tmp_path)
    monkeypatch.delattr(Decoder, "parameter_cuts")
    assert refused(folder, 2) == (
        "tensor_parallel_size=2: Decoder (LlamaForCausalLM) does not say how its parameters are "
        "divided (parameter_cuts); possible: 1"
    )


def test_what_is_prepared_has_the_sizes_of_one_rank(tmp_path: Path) -> None:
    config = EngineConfig(model=str(kit.tiny(tmp_path)), load_progress=False)
    whole = prepare(config, kit.cpu_device(), torch.float32)
    group = ThreadGroup(Meeting(4), 3)
    found = prepare(config, kit.cpu_device(), torch.float32, group)
    assert found.group is group
    assert [(s.num_heads, s.num_kv_heads) for s in found.attention_specs] == [(1, 1)] * 2
    # embedding and norms whole; of the head 259 - 3 * 96 rows are none; the rest by 4, but for
    # keys and values, of which 2 heads are held by 4 ranks.
    replicated = 259 * 64 + 5 * 64
    divided = 2 * (2 * 64 * 64 + 3 * 64 * 96) // 4 + 2 * (2 * 32 * 64) // 2
    assert whole.weight_bytes == 4 * (replicated + 259 * 64 + 2 * (3 * 64 * 96 + 3 * 64 * 64))
    assert found.weight_bytes == 4 * (replicated + divided)
