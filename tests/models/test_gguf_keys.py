"""Keys of a GGUF's own architecture: read, harmless, or refused by name; never passed over."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import toys
from tests.models.test_decoder import TOLERANCE

from octavo.errors import CheckpointError
from octavo.models.config import load_spec
from octavo.models.files import resolve
from octavo.models.spec import ModelSpec


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


def read(path: Path) -> ModelSpec:
    return load_spec(resolve(str(path)).open())


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scale_linear": 4.0},  # converters of autumn 2023
        {"rope.scaling.factor": 4.0},  # without a type llama.cpp takes it as linear
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling_in_every_spelling(metadata: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    reference = toys.make("llama", rope_parameters=rope)
    path = toys.write_gguf(reference, tmp_path / "m.gguf", **metadata)
    ids = toys.prompt(40)
    found = toys.Paged(toys.load(path)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "metadata", "said"),
    [
        ("llama", {"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, "factor = 2.0 and rope."),
        ("llama", {"rope.scaling.type": "none", "rope.scale_linear": 4.0}, "scale_linear is 4.0"),
        ("llama", {"rope.scaling.alpha": 1000.0}, "rope.scaling.alpha is 1000.0"),
        ("llama", {"rope.dimension_sections": [4, 2, 2, 0]}, "dimension_sections is .4, 2, 2, 0."),
        ("llama", {"rope.freq_base_swa": 5000.0}, "rope.freq_base_swa is 5000.0.*rope.freq_base"),
        ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5, which is not supported for 'llama'"),
        ("qwen2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("qwen3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale is 0.1"),
        ("llama", {"embedding_scale": 12.0}, "embedding_scale is 12.0"),
        ("llama", {"residual_scale": 0.2}, "residual_scale is 0.2"),
        ("llama", {"attention.max_alibi_bias": 8.0}, "max_alibi_bias is 8.0"),
        ("llama", {"attention.clamp_kqv": 8.0}, "clamp_kqv is 8.0"),
        ("llama", {"expert_count": 8}, "expert_count is 8"),
        ("olmo2", {"attention.key_length_swa": 4}, "key_length_swa is 4"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                   "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                   "rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor is 2.0"),
        ("llama", {"rope.scaling.factors": 4.0}, "key 'rope.scaling.factors'.*is not known.*mean"),
        ("granite", {"wholly.new": 1}, "the key 'wholly.new' of 'granite' is not known"),
    ],
)  # fmt: skip
def test_a_key_that_would_be_passed_over_is_refused(
    family: str, metadata: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = toys.write_gguf(toys.make(family), tmp_path / "m.gguf", **metadata)
    with pytest.raises(CheckpointError, match=said) as error:
        read(path)
    assert "m.gguf" in str(error.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.finetuned": 1, "tensor_data_layout": "Meta AI original pth"},
        {"expert_count": 0, "expert_used_count": 0, "rope.scaling.alpha": 0.0},
        {"final_logit_softcapping": 0.0, "logit_scale": 1.0, "attention.causal": 1},
        {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "pooling_type": 3},
        {"rope.freq_base_swa": 10000.0, "use_parallel_residual": 0},
    ],
)
def test_keys_that_ask_for_nothing_are_taken(metadata: dict[str, Any], tmp_path: Path) -> None:
    reference = toys.make("llama")
    plain = read(toys.write_gguf(reference, tmp_path / "m.gguf"))
    assert read(toys.write_gguf(reference, tmp_path / "n.gguf", **metadata)) == plain


def test_windows_that_old_converters_did_not_write(tmp_path: Path) -> None:
    """Implied as llama.cpp implies them; Gemma 3 had the key from its first day."""

    def windows(family: str, **changes: Any) -> list[int | None]:
        reference = toys.make(family, **changes)
        path = toys.write_gguf(reference, tmp_path / "m.gguf", omit=["attention.sliding_window"])
        return [layer.attention.window for layer in read(path).layers]

    assert windows("gemma2") == [4096, None, 4096]
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "head_dim": 8,
             "num_key_value_heads": 1, "num_hidden_layers": 32}  # fmt: skip
    assert windows("phi3", **small, max_position_embeddings=4096) == [2047] * 32
    assert windows("phi3") == [None] * 3
    with pytest.raises(CheckpointError, match=r"sliding_window is None.*layers of this architect"):
        windows("gemma3_text")
