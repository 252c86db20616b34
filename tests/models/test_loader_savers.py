"""Folders as the tools that save checkpoints write them (docs/checkpoints.md)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from tests.models import toys
from tests.models.test_decoder import TOLERANCE

from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.models.files import resolve


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


def agrees(folder: Path, reference: object) -> None:
    ids = toys.prompt(30)
    found = toys.Paged(toys.load(folder)).step([("a", ids)])[0]
    torch.testing.assert_close(found, toys.reference_logits(reference, ids), **TOLERANCE)


def test_transformers_5_in_one_file_and_in_shards(tmp_path: Path) -> None:
    reference = toys.make("llama")
    agrees(toys.save(reference, tmp_path / "one"), reference)
    folder = toys.save(reference, tmp_path / "many", max_shard_size="20KB")
    assert len(resolve(str(folder)).weights) > 2
    agrees(folder, reference)


def test_transformers_4_names_its_settings_otherwise(tmp_path: Path) -> None:
    """`torch_dtype`, `rope_theta` outside, `rope_scaling` with `type`."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    reference = toys.make("llama", rope_parameters=rope)
    folder = toys.save(reference, tmp_path)
    toys.edit_config(
        folder, remove=["rope_parameters", "dtype"], torch_dtype="float32", rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 4.0}, transformers_version="4.38.0",
    )  # fmt: skip
    agrees(folder, reference)


@pytest.mark.parametrize("tied", [True, False])
def test_save_model_keeps_one_name_of_a_tied_tensor(tied: bool, tmp_path: Path) -> None:
    reference = toys.make("llama", tie_word_embeddings=tied)
    folder = toys.save(reference, tmp_path)
    save_model(reference, str(folder / "model.safetensors"))
    names = load_file(folder / "model.safetensors").keys()
    assert ("lm_head.weight" in names, "model.embed_tokens.weight" in names) == (True, not tied)
    agrees(folder, reference)


def test_a_state_dict_with_both_names_of_a_tied_tensor(tmp_path: Path) -> None:
    """As merges write it (mergekit, PEFT's merge_and_unload and save)."""
    reference = toys.make("llama", tie_word_embeddings=True)
    folder = toys.save(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    agrees(folder, reference)


def test_mergekit_s_folder(tmp_path: Path) -> None:
    """`model-00001-of-00001.safetensors` with an index, and a recipe beside it."""
    reference = toys.make("llama")
    folder = toys.save(reference, tmp_path)
    name = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / name)
    index = {"metadata": {"mergekit_version": "0.0.5"},
             "weight_map": dict.fromkeys(load_file(folder / name), name)}  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "mergekit_config.yml").write_text("merge_method: slerp")
    agrees(folder, reference)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file(
        {"base_model.model.x.lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(ModelNotFoundError, match="holds no config"):
        resolve(str(tmp_path))


def test_adapter_tensors_that_were_not_merged_are_named(tmp_path: Path) -> None:
    folder = toys.save(toys.make("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    save_file({**tensors, extra: torch.ones(2, 48)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"unexpected: model.layers.0.self_attn.q_proj.lora_A"
    ):
        toys.load(folder)


def test_unsloth_s_remarks_in_a_config(tmp_path: Path) -> None:
    reference = toys.make("qwen2")
    folder = toys.save(reference, tmp_path)
    toys.edit_config(folder, unsloth_fixed=True, unsloth_version="2025.1.5")
    agrees(folder, reference)
