"""What a config says of experts, and what their parameters are called."""

from pathlib import Path
from typing import Any

import pytest
from tests.models import toys

from octavo.errors import CheckpointError, ConfigError
from octavo.models.config import from_config
from octavo.models.moe import MoeDecoder, experts_of, has_experts
from octavo.models.spec import ModelSpec

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def spec(family: str = "qwen3_moe", **fields: Any) -> ModelSpec:
    return from_config({"model_type": family, **SIZES, **fields})


def test_both_names_of_the_number_of_experts() -> None:
    assert experts_of(spec(num_experts=64)).count == 64
    assert experts_of(spec(num_local_experts=32)).count == 32
    assert experts_of(spec()).count == 128
    assert experts_of(spec("mixtral")).count == 8
    with pytest.raises(CheckpointError, match="num_local_experts is 32; it must be 64"):
        experts_of(spec(num_experts=64, num_local_experts=32))


def test_weights_add_up_to_one_where_the_family_or_the_config_says_so() -> None:
    assert experts_of(spec("mixtral")).renormalize
    assert not experts_of(spec()).renormalize
    assert experts_of(spec(norm_topk_prob=True)).renormalize


def test_which_layers_have_experts() -> None:
    assert has_experts(spec(decoder_sparse_step=2)) == [False, True, False, True]
    assert has_experts(spec(mlp_only_layers=[0, 3])) == [False, True, True, False]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 10**6}, "num_experts is 1000000; it must be at most 65536"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; .* at most 4"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size is 'x'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        MoeDecoder.parameter_shapes(spec(**fields))


def test_mixtrals_names() -> None:
    at, mixtral = "model.layers.3.", spec("mixtral")
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for stored, name in names.items():
        found = MoeDecoder.parameter_name(
            mixtral, f"{at}block_sparse_moe.experts.11.{stored}.weight"
        )
        assert found == f"{at}mlp.experts.11.{name}.weight"
    found = MoeDecoder.parameter_name(mixtral, f"{at}block_sparse_moe.gate.weight")
    assert found == f"{at}mlp.gate.weight"
    assert MoeDecoder.parameter_name(mixtral, "lm_head.weight") == "lm_head.weight"


def test_components_are_those_that_an_override_can_name(tmp_path: Path) -> None:
    found = MoeDecoder.components(spec(mlp_only_layers=[1]))
    assert found[2:4] == ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    assert found[6:8] == ["layers.1.mlp.gate_up_proj", "layers.1.mlp.down_proj"]
    folder = toys.save(toys.make("mixtral", num_hidden_layers=2), tmp_path)
    model = toys.load(folder, quantization_override="layers.1.mlp.experts.*=int8")
    assert "int8 weights" in model.explain()["linear"]
    with pytest.raises(ConfigError, match=r"no part of the model is called 'layers\.0\.mlp\.gate_"):
        toys.load(folder, quantization_override="layers.0.mlp.gate_up_proj=int8")
