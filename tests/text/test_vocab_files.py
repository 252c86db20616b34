"""vocab.json and merges.txt without a tokenizer.json: the ids of the same tokenizer's own file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text.test_loading import TEXTS

from octavo.errors import CheckpointError
from octavo.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def folder(kinds: dict[str, Any], tmp_path: Path) -> Path:
    state = json.loads((kinds["byte"].folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in state["model"]["merges"]), ""]
    (tmp_path / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    added = {t["content"]: t["id"] for t in state["added_tokens"] if t["content"] not in vocab}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    return tmp_path


def loaded(folder: Path, **config: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def test_gpt2_s_files(folder: Path, kinds: dict[str, Any]) -> None:
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|eot|>"]
    ours = loaded(
        folder, tokenizer_class="GPT2TokenizerFast", bos_token="<|bos|>", eos_token="<|im_end|>",
        unk_token="<|eot|>", additional_special_tokens=special,
    )  # fmt: skip
    origin = kinds["byte"]
    assert ours.vocab_size == origin.ours.vocab_size
    assert ours.special_ids == origin.ours.special_ids
    for text in [*TEXTS, "<|im_start|>user\nx<|im_end|>", "<think>a</think>"]:
        assert ours.encode(text, add_special_tokens=False) == origin.encode(text), text
        assert ours.decode(ours.encode(text), False) == text


def test_qwen2_s_files_normalize(folder: Path) -> None:
    ours = loaded(folder, tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>")
    assert not ours.adds_bos
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_what_the_two_files_do_not_say_is_an_error(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer_class is None; known are GPT2Tokenizer"):
        loaded(folder)
    with pytest.raises(CheckpointError, match="tokenizer_class is 'XTokenizer'"):
        loaded(folder, tokenizer_class="XTokenizer")
    with pytest.raises(CheckpointError, match=r"eos_token .*endoftext.* is not in the voc"):
        loaded(folder, tokenizer_class="GPT2Tokenizer", bos_token="<|bos|>")
    with pytest.raises(CheckpointError, match="add_prefix_space is true"):
        loaded(folder, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    (folder / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"merges.txt is missing"):
        loaded(folder, tokenizer_class="GPT2Tokenizer")


def test_vocabularies_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"no tokenizer: .*it holds tekken.json, which is not"
    ):
        load_tokenizer(tmp_path)
