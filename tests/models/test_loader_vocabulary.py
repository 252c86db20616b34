"""Ids that no token stands for: the rows of a padded table are never drawn, listed or accepted."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import toys

import kit
from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.models.files import resolve
from octavo.server.prompts import PromptEncoder
from octavo.text.loading import num_ids
from octavo.text.tokenizer import load_tokenizer

PADDED = 61  # rows beyond the tokenizer's ids


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


def padded(folder: Path, tied: bool = False) -> tuple[Path, int]:
    """A TINY model whose table has rows that no token stands for, which the head favours."""
    count = kit.write_tokenizer(folder)
    config = kit.llama_config(count + PADDED, tie_word_embeddings=tied)
    tensors = kit.llama_tensors(config)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    tensors[name][count:] *= 8
    if tied:
        del tensors["lm_head.weight"]
    return kit.write_checkpoint(folder, config, tensors), count


def open_llm(folder: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "num_gpu_blocks_override": 64, **options}
    return LLM(str(folder), load_progress=False, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_without_a_token_are_never_drawn_or_listed(tied: bool, tmp_path: Path) -> None:
    folder, count = padded(tmp_path / "m", tied)
    llm = open_llm(folder)
    params = SamplingParams(
        temperature=2.0, seed=3, max_tokens=40, logprobs=20, prompt_logprobs=20, ignore_eos=True
    )
    out = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
    choice = out.outputs[0]
    assert max(choice.token_ids) < count
    listed = [i for place in (choice.logprobs or []) for i in place]
    assert listed
    assert max(listed) < count
    assert max(i for place in (out.prompt_logprobs or [])[1:] for i in place or {}) < count
    for name in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(RequestError, match=rf"{name} has token id {count}; .*0 to {count - 1}"):
            llm.generate("a", SamplingParams(**{name: [count]}), use_tqdm=False)
    with pytest.raises(RequestError, match="logit_bias has token id"):
        llm.generate("a", SamplingParams(logit_bias={count: 1.0}), use_tqdm=False)
    with pytest.raises(RequestError, match="prompt has token id"):
        llm.generate({"prompt_token_ids": [count]}, use_tqdm=False)


def test_probabilities_are_over_the_ids_that_exist(tmp_path: Path) -> None:
    """Equal, to the bit, to the model whose table was cut by hand."""
    folder, count = padded(tmp_path / "m")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:count].clone()
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    kit.write_checkpoint(cut, kit.llama_config(count, tie_word_embeddings=False), tensors)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, logprobs=5, ignore_eos=True)
    answers = [
        open_llm(path).generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
        for path in (folder, cut)
    ]
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    assert answers[0].outputs[0].logprobs == answers[1].outputs[0].logprobs


@pytest.mark.parametrize("method", [None, "int8", "int4"])
def test_every_kind_of_head_is_cut(method: str | None, tmp_path: Path) -> None:
    folder, count = padded(tmp_path / "m")
    model = toys.load(folder, quantization=method)
    assert model.logits(torch.randn(3, model.spec.hidden_size)).shape == (3, count)


def test_a_tokenizer_of_the_user_s_own_counts(tmp_path: Path) -> None:
    folder, count = padded(tmp_path / "m")
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in folder.glob("tokenizer*"):
        shutil.move(file, other)
    assert toys.load(folder).spec.num_ids == count + PADDED  # nothing says otherwise
    assert toys.load(folder, tokenizer=str(other)).spec.num_ids == count


def test_an_end_that_no_token_stands_for_is_left_out(tmp_path: Path) -> None:
    folder, count = padded(tmp_path / "m")
    toys.edit_config(folder, eos_token_id=[2, count + 5])
    assert toys.load(folder).spec.eos_token_ids == (2,)


def test_the_light_count_equals_the_tokenizer_s(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    kit.write_tokenizer(folder)
    assert num_ids(folder) == load_tokenizer(folder).vocab_size
    size = load_tokenizer(folder).vocab_size
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": size}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"turn": "<other>", "a": "<new>"}))
    assert num_ids(folder) == load_tokenizer(folder).vocab_size == size + 2
    assert num_ids(tmp_path) is None


def gguf_tokens(count: int, pads: int, pad: str) -> dict[str, Any]:
    texts = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(count - 3))]
    texts += [pad.format(i) for i in range(count, count + pads)]
    return {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts, "tokenizer.ggml.scores": [0.0] * len(texts),
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (count - 3) + [4] * pads,
    }  # fmt: skip


@pytest.mark.parametrize("pad", ["[PAD{}]", "<dummy{:05}>"])
def test_padding_that_converters_name_is_no_token(pad: str) -> None:
    metadata = gguf_tokens(20, 4, pad)
    assert num_ids("m.gguf", metadata) == load_tokenizer("m.gguf", metadata).vocab_size == 20
    plain = gguf_tokens(20, 0, pad)
    plain["tokenizer.ggml.tokens"][-1] = "[PAD7]"  # a token of the model's own
    assert num_ids("m.gguf", plain) == load_tokenizer("m.gguf", plain).vocab_size == 20


def test_both_faces_take_a_folder_with_tokenizer_files_only(tmp_path: Path) -> None:
    from octavo.config import EngineConfig

    folder, count = padded(tmp_path / "m")
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in folder.glob("tokenizer*"):
        shutil.move(file, other)
    config = EngineConfig(model=str(folder), tokenizer=str(other))
    assert PromptEncoder(config).load().vocab_size == count
    out = open_llm(folder, tokenizer=str(other)).generate("a", SamplingParams(max_tokens=1))
    assert len(out[0].outputs[0].token_ids) == 1


def test_both_faces_take_an_id_and_fetch_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is not reached here: what is asked of it is looked at."""
    import huggingface_hub

    from octavo.config import EngineConfig

    folder, count = padded(tmp_path / "m")
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in folder.glob("tokenizer*"):
        shutil.move(file, other)
    asked: list[Any] = []

    def snapshot(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision, [p for p in allow_patterns if "safetensors" in p]))
        return str(other)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config = EngineConfig(model=str(folder), tokenizer="someone/words")
    assert PromptEncoder(config).load().vocab_size == count
    assert open_llm(folder, tokenizer="someone/words").engine is not None
    assert set(map(str, asked)) == {str(("someone/words", None, []))}
    assert resolve(str(folder)).root == folder
