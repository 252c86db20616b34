"""GGUF files of every family, with the names, row orders and metadata of llama.cpp's converters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import toys
from tests.models.test_decoder import TOLERANCE, VARIANTS

from octavo.errors import CheckpointError
from octavo.models.config import load_spec
from octavo.models.files import resolve
from octavo.models.registry import FAMILIES, by_gguf_name
from octavo.models.spec import ModelSpec


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


# Gemma's query scale is not in the file: it is that of the head size, but in one size of model.
IN_FILES = {
    "llama": {}, "llama-biases": {}, "llama-tied": {}, "qwen2": {}, "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16}, "gemma2-untied": {"query_pre_attn_scalar": 8,
    "tie_word_embeddings": True, "attention_bias": False},
    "gemma3": {"query_pre_attn_scalar": 8}, "phi3": {}, "phi3-partial-tied": {},
    "olmo2": {}, "olmo2-bias-tied": {"attention_bias": False}, "olmo3": {}, "olmo3-yarn": {},
    "granite": {}, "granite-biases": {"attention_bias": False, "mlp_bias": False},
    "smollm3": {"no_rope_layer_interval": 4}, "ministral3": {"sliding_window": None},
}  # fmt: skip


def read(path: Path) -> ModelSpec:
    return load_spec(resolve(str(path)).open())


@pytest.mark.parametrize("variant", IN_FILES)
def test_gguf_equals_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    reference = toys.make(family, **changes) if not IN_FILES[variant] else toys.make(
        family, **{**changes, **IN_FILES[variant]}
    )  # fmt: skip
    model = toys.load(toys.write_gguf(reference, tmp_path / "m.gguf"))
    assert model.spec.family.name == family
    ids = toys.prompt(40)
    found = toys.Paged(model).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


def test_every_gguf_architecture_has_a_variant() -> None:
    named = {family.name for family in FAMILIES if family.gguf}
    assert named == {VARIANTS[variant][0] for variant in IN_FILES}


@pytest.mark.parametrize(
    ("family", "layers", "said"), [("gemma2", 46, 6.0), ("gemma3_text", 62, 6.0)]
)
def test_the_query_scale_of_gemma_27b_is_of_the_hidden_size(
    family: str, layers: int, said: float, tmp_path: Path
) -> None:
    """The stated number of layers says that a file is of 27B; six of them are enough here."""
    reference = toys.make(
        family, num_hidden_layers=6, hidden_size=12, intermediate_size=8, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    spec = read(toys.write_gguf(reference, tmp_path / "m.gguf", block_count=layers))
    assert len(spec.layers) == layers
    assert {layer.attention.scale for layer in spec.layers} == {said**-0.5}


def test_gemma3_of_4b_scales_positions_of_global_layers_only(tmp_path: Path) -> None:
    changes = VARIANTS["gemma3-linear"][1]
    reference = toys.make(
        "gemma3_text", **{**changes, "query_pre_attn_scalar": 8, "num_hidden_layers": 6,
        "layer_types": None},
    )  # fmt: skip
    path = toys.write_gguf(reference, tmp_path / "m.gguf", **{"rope.freq_base_swa": 100.0})
    ids = toys.prompt(40)
    found = toys.Paged(toys.load(path)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


def longrope(**changes: Any) -> dict[str, Any]:
    generator = np.random.default_rng(5)
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": (1 + generator.random(6)).tolist(),
        "long_factor": (2 + 6 * generator.random(6)).tolist(), **changes,
    }  # fmt: skip


def test_longrope_of_phi3(tmp_path: Path) -> None:
    """The file holds two tensors of divisors, and the factor of cosine and sine."""
    rope = longrope()
    reference = toys.make(
        "phi3", head_dim=16, hidden_size=96, original_max_position_embeddings=32,
        rope_parameters=rope,
    )  # fmt: skip
    extra = {
        f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
    }
    factor = (1 + np.log(512 / 32) / np.log(32)) ** 0.5
    path = toys.write_gguf(
        reference, tmp_path / "m.gguf", extra=extra, **{"rope.scaling.attn_factor": float(factor)}
    )
    ids = toys.prompt(80)
    found = toys.Paged(toys.load(path)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)
    del extra["rope_factors_short.weight"]
    path = toys.write_gguf(reference, tmp_path / "n.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'rope_factors_short\.weight'"):
        read(path)


def test_two_families_of_one_name_differ_by_the_window() -> None:
    assert by_gguf_name("olmo2").name == "olmo2"
    assert by_gguf_name("olmo2", has_window=True).name == "olmo3"
    with pytest.raises(CheckpointError, match=r"GGUF architecture 'gemma4'.*known: llama, "):
        by_gguf_name("gemma4")


@pytest.mark.parametrize(
    ("family", "metadata", "said"),
    [
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "pattern is .True..*must be 3 of"),
        ("phi3", {"rope.dimension_count": 12}, "dimension_count is 12.*at most 8"),
        ("phi3", {"rope.dimension_count": 5}, "dimension_count is 5; it must be even"),
        ("granite", {"attention.scale": -1.0}, "attention.scale is -1.0.*above 0"),
        ("ministral3", {"attention.temperature_scale": -1.0}, "temperature_scale is -1.0"),
        ("gemma3_text", {"attention.sliding_window": -1.0}, "sliding_window is -1.0"),
    ],
)
def test_mdl_07_values_that_are_not_understood(
    family: str, metadata: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = toys.write_gguf(toys.make(family), tmp_path / "m.gguf", **metadata)
    with pytest.raises(CheckpointError, match=said) as error:
        read(path)
    assert "m.gguf" in str(error.value)
