"""Tables of cosines and sines against transformers' own, also at far positions."""

from typing import Any

import pytest
import torch

from octavo.layers.rope import RopeSpec, attention_scale, cos_sin_table

LONG = {"original_max_position_embeddings": 8192, "factor": 8.0}
KINDS: list[tuple[RopeSpec, dict[str, Any]]] = [
    (RopeSpec(5e5), {"rope_type": "default"}),
    (RopeSpec(5e5, "linear", 8.0), {"rope_type": "linear", "factor": 8.0}),
    (
        RopeSpec(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    ),
    (RopeSpec(5e5, "yarn", 8.0, 8192), {"rope_type": "yarn", **LONG}),
    (
        RopeSpec(5e5, "yarn", 8.0, 8192, mscale=1.0, mscale_all_dim=0.5),
        {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **LONG},
    ),
]


@pytest.mark.parametrize(("spec", "parameters"), KINDS, ids=lambda v: getattr(v, "kind", ""))
def test_far_positions_equal_transformers(spec: RopeSpec, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=128,
        max_position_embeddings=65536,
        rope_parameters={"rope_theta": 5e5, **parameters},
    )
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 8191, 8192, 40000, 65535])
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = cos_sin_table(spec, 128, 65536)[positions]
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "scale"),
    [
        (RopeSpec(kind="llama3", factor=8.0), 1.0),
        (RopeSpec(kind="yarn", factor=1.0), 1.0),
        (RopeSpec(kind="yarn", factor=16.0), 1.2772589),
        (RopeSpec(kind="yarn", factor=16.0, attention_factor=1.3), 1.3),
        (RopeSpec(kind="yarn", factor=16.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (RopeSpec(kind="yarn", factor=16.0, mscale=2.0), 1.2772589),
    ],
)
def test_mdl_09_the_factor_of_attention(spec: RopeSpec, scale: float) -> None:
    assert attention_scale(spec) == pytest.approx(scale)


def test_dynamic_scaling_starts_past_the_original_length() -> None:
    plain = RopeSpec(1e4)
    dynamic = RopeSpec(1e4, "dynamic", 2.0, 64)
    assert torch.equal(cos_sin_table(dynamic, 16, 64), cos_sin_table(plain, 16, 64))
    assert not torch.equal(cos_sin_table(dynamic, 16, 65)[:64], cos_sin_table(plain, 16, 64))
