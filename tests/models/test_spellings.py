"""One setting in two spellings: merged where they agree, refused by both names where not."""

from typing import Any

import pytest
from tests.models.test_config import rope, spec

from octavo.errors import CheckpointError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def test_rope_parameters_and_rope_scaling_are_merged() -> None:
    found = rope(spec(rope_parameters={"rope_theta": 5e5}, rope_scaling=YARN))
    assert (found.kind, found.theta, found.factor) == ("yarn", 5e5, 4.0)
    both = rope(
        spec(rope_parameters={**YARN, "rope_theta": 5e5}, rope_scaling=YARN, rope_theta=5e5)
    )
    assert both == found
    old = {**YARN, "type": "yarn"}
    assert rope(spec(rope_theta=5e5, rope_scaling=old)) == found
    del old["rope_type"]
    assert rope(spec(rope_theta=5e5, rope_scaling=old)) == found
    assert rope(spec(rope_theta=5e5, rope_scaling=YARN, rope_parameters=None)) == found


def test_blocks_by_window_are_merged() -> None:
    found = spec(
        "gemma3_text", sliding_window=7, num_hidden_layers=6,
        rope_parameters={"full_attention": {"rope_theta": 5e5},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 2e3}},
        rope_scaling={"full_attention": {"type": "linear", "factor": 8.0}},
    )  # fmt: skip
    local, full = found.layers[0].rope, found.layers[5].rope
    assert local is not None
    assert full is not None
    assert (local.kind, local.theta) == ("default", 2e3)
    assert (full.kind, full.theta, full.factor) == ("linear", 5e5, 8.0)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
         r"rope_parameters.rope_type = 'default' and rope_scaling.rope_type = 'yarn' contradict"),
        ("llama", {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
         "rope_theta = 10000.0 and rope: rope_theta = 1000000.0 contradict"),
        ("llama", {"rope_parameters": {**YARN, "factor": 2.0}, "rope_scaling": YARN},
         "rope_parameters.factor = 2.0 and rope_scaling.factor = 4.0"),
        ("llama", {"rope_scaling": {**YARN, "type": "linear"}},
         r"rope_scaling.rope_type = 'yarn' and rope_scaling.type = 'linear'"),
        ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 2048},
         "original_max_position_embeddings = 2048 and rope: original.* = 1024"),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
         "partial_rotary_factor = 0.5 and rope: partial_rotary_factor = 1.0"),
        ("gemma3_text", {"rope_local_base_freq": 1e4, "num_hidden_layers": 6, "rope_parameters": {
            "sliding_attention": {"rope_theta": 2e3}, "full_attention": {}}},
         "rope_local_base_freq = 10000.0 and rope: rope_theta = 2000.0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 2e3, "full_attention": {}}},
         "rope_parameters is .*without .'rope_theta'"),
        ("llama", {"dtype": "bfloat16", "torch_dtype": "float32"},
         "dtype = 'bfloat16' and torch_dtype = 'float32' contradict"),
        ("llama", {"rope_scaling": {**YARN, "attn_factor": 1.5}}, "attn_factor is 1.5; it must"),
        ("llama", {"rope_scaling": {**YARN, "beta_fats": 16}}, "beta_fats. .16. is not known"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_by_both_names(
    family: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        spec(family, **fields)


def test_keys_that_change_nothing_are_taken() -> None:
    more = {**YARN, "attn_factor": 1.0, "extrapolation_factor": 1.0, "finetuned": True}
    assert rope(spec(rope_scaling=more)) == rope(spec(rope_scaling=YARN))
    assert spec(dtype="bfloat16", torch_dtype="bfloat16").checkpoint_dtype == "bfloat16"
    assert spec(dtype=None, torch_dtype="float16").checkpoint_dtype == "float16"
