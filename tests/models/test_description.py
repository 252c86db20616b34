"""Descriptions of models whose weights need not be here."""

import json

import pytest
from tests import kit

from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError
from octavo.models import files
from octavo.models.description import describe_alone
from octavo.models.loader import describe


def described(model, **options):
    return describe_alone(EngineConfig(model=str(model), **options))


def test_with_and_without_weights_a_folder_is_the_same_model(tmp_path):
    folder = kit.tiny(tmp_path / "whole")
    whole = describe(EngineConfig(model=str(folder)))
    assert described(folder)[1:] == whole[1:]
    assert described(folder / "config.json")[0].tensors.keys() == whole[0].tensors.keys()
    (folder / "model.safetensors").unlink()
    found = described(folder)
    assert found[1:] == whole[1:]
    assert not found[0].tensors


def test_of_a_divided_model_the_index_may_be_there_alone(tmp_path):
    folder = kit.tiny(tmp_path / "whole")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not described(folder)[0].tensors


def test_weights_that_are_there_must_be_readable(tmp_path):
    folder = kit.tiny(tmp_path / "whole")
    (folder / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        described(folder)


def test_a_name_is_enough_and_a_folder_of_that_name_goes_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert described("llama-2-13b")[1].hidden_size == 5120
    kit.tiny(tmp_path / "llama-2-13b")
    assert described("llama-2-13b")[1].hidden_size == 64


def test_a_hub_id_fetches_the_description_only(tmp_path, monkeypatch):
    folder, asked = kit.tiny(tmp_path / "fetched"), []

    def fetch(repo, revision, patterns):
        asked.append((repo, revision, patterns))
        return folder

    monkeypatch.setattr(files.hub, "fetch", fetch)
    assert described("someone/tiny", revision="v1")[1].hidden_size == 64
    assert asked == [("someone/tiny", "v1", list(files.DESCRIPTIONS))]
    with pytest.raises(ConfigError, match=r"octavo pull someone/tiny:Q4_0, and plan the \.gguf"):
        described("someone/tiny:Q4_0")


def test_an_unknown_name_says_the_nearest():
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'llama-2-13b'\?; a Hugging Face"):
        described("llama2-13b")
    with pytest.raises(ModelNotFoundError, match=r"known: smollm2, .*llama-2-13b"):
        described("zzz")
