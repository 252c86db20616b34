"""Tokenizers from GGUF metadata and from folders: ids, flags, templates, and files that lie."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece

from octavo.errors import CheckpointError
from octavo.text.loading import read_parts
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.vocab import SPLITTERS


def described(kinds: dict[str, Any], name: str) -> dict[str, Any]:
    """GGUF metadata that describes one of our kinds."""
    if name == "spm":
        processor = sentencepiece.SentencePieceProcessor(
            model_file=str(kinds["spm"].folder / "tokenizer.model")
        )
        size = processor.get_piece_size()

        def type_of(i: int) -> int:
            if processor.is_unknown(i):
                return 2
            if processor.is_control(i):
                return 3
            if processor.is_byte(i):
                return 6
            return 4 if processor.id_to_piece(i) == "<sep>" else 1

        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [processor.get_score(i) for i in range(size)],
            "tokenizer.ggml.token_type": [type_of(i) for i in range(size)],
        }
    state = json.loads((kinds["byte"].folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = {**state["model"]["vocab"], **{t["content"]: i for i, t in added.items()}}
    spelled = sorted(tokens, key=tokens.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": spelled,
        "tokenizer.ggml.token_type": [
            (3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(spelled))
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens["<|bos|>"],
        "tokenizer.ggml.eos_token_id": tokens["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": True,
    }


def from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer("m.gguf", metadata)


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


TEXTS = [
    "Hello world",
    " The  block pool\n\n",
    "Žluťoučký 漢字 🌶",
    "it's 12 345",
    "",
    "a <think> b",
]


@pytest.mark.parametrize("name", ["byte", "spm"])
def test_a_gguf_gives_the_ids_of_the_files_it_was_made_of(
    kinds: dict[str, Any], name: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", described(kinds, name))
    ours, origin = load_tokenizer(path), kinds[name].ours
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (
        origin.vocab_size,
        origin.bos_id,
        origin.eos_ids,
    )
    assert ours.special_ids == origin.special_ids
    for text in TEXTS:
        assert ours.encode(text) == origin.encode(text), text
        assert ours.decode(ours.encode(text), False) == origin.decode(origin.encode(text), False)


def test_a_gguf_s_bytes_equal_the_origin_s(kinds: dict[str, Any]) -> None:
    for name in ("byte", "spm"):
        ours, origin = from_metadata(described(kinds, name)), kinds[name].ours
        for i in range(origin.vocab_size):
            assert ours.token_bytes(i) == origin.token_bytes(i)


def test_an_unknown_split_rule_lists_the_known(kinds: dict[str, Any]) -> None:
    metadata = described(kinds, "byte") | {"tokenizer.ggml.pre": "lama-bpe"}
    with pytest.raises(CheckpointError, match=r"did you mean 'llama-bpe'.*qwen2, .*tekken"):
        from_metadata(metadata)


@pytest.mark.parametrize("name", SPLITTERS)
def test_every_split_rule_compiles_and_loses_nothing(kinds: dict[str, Any], name: str) -> None:
    tokenizer = from_metadata(described(kinds, "byte") | {"tokenizer.ggml.pre": name})
    for text in [*TEXTS, "  x\t\r\n\n 1234567 don't DON'T CamelCase aé́ 漢字かな 5€ /a/ \\ ~~ ．"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_flags_follow_the_file_then_the_kind(kinds: dict[str, Any]) -> None:
    byte, spm = described(kinds, "byte"), described(kinds, "spm")
    byte.pop("tokenizer.ggml.add_bos_token")
    assert not from_metadata(byte).adds_bos
    assert from_metadata(byte | {"tokenizer.ggml.pre": "llama-bpe"}).adds_bos
    assert from_metadata(spm).adds_bos
    assert not from_metadata(spm | {"tokenizer.ggml.add_bos_token": False}).adds_bos
    ended = from_metadata(spm | {"tokenizer.ggml.add_eos_token": True})
    assert ended.encode("x")[-1] == ended.eos_ids[0]
    bare = from_metadata(spm | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" x")) == " x"
    assert not bare.strips_space


def test_every_end_of_a_gguf_counts(kinds: dict[str, Any]) -> None:
    metadata = described(kinds, "byte")
    end = metadata["tokenizer.ggml.tokens"].index("Ġblock")
    metadata["tokenizer.ggml.eot_token_id"] = end
    tokenizer = from_metadata(metadata)
    assert tokenizer.eos_ids == (metadata["tokenizer.ggml.eos_token_id"], end)
    assert end in tokenizer.special_ids


def test_the_templates_of_a_gguf(kinds: dict[str, Any]) -> None:
    tokenizer = from_metadata(
        described(kinds, "byte")
        | {
            "tokenizer.chat_template": "a",
            "tokenizer.chat_template.tool_use": "b",
            "tokenizer.chat_templates": ["tool_use", "absent"],
        }
    )
    assert tokenizer.chat_templates == {"default": "a", "tool_use": "b"}
    assert tokenizer.chat_template == "a"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*are supported"),
        ({"tokenizer.ggml.model": None}, "None.*are supported"),
        ({"tokenizer.ggml.tokens": []}, "with 0 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is not a list of str"),
        ({"tokenizer.ggml.tokens": "x"}, "tokens is not a list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.merges": ["no such merge"]}, "cannot be built: .*`no` out of vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000, outside"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id is -1, outside"),
    ],
)
def test_metadata_that_does_not_fit_is_an_error(
    kinds: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_metadata(described(kinds, "byte") | changes)


def test_a_token_listed_twice_is_an_error(kinds: dict[str, Any]) -> None:
    metadata = described(kinds, "byte")
    metadata["tokenizer.ggml.tokens"][300] = metadata["tokenizer.ggml.tokens"][301]
    with pytest.raises(CheckpointError, match="twice"):
        from_metadata(metadata)
    spm = described(kinds, "spm") | {"tokenizer.ggml.scores": [0.0]}
    with pytest.raises(CheckpointError, match="1 scores"):
        from_metadata(spm)


def test_the_config_s_flags_and_tokens(kinds: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(kinds["byte"].folder / "tokenizer.json", tmp_path)
    size = kinds["byte"].ours.vocab_size

    def loaded(**config: Any) -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path)

    plain = loaded(bos_token="<|bos|>", eos_token="<|im_end|>", add_bos_token=False)
    assert not plain.adds_bos
    ended = loaded(bos_token="<|bos|>", eos_token="<|im_end|>", add_eos_token=True)
    assert ended.encode("x")[-1] == ended.eos_ids[0]
    assert ended.encode("x")[0] != ended.bos_id  # as transformers: one flag given sets both
    listed = {str(size): {"content": "<extra>", "special": True, "lstrip": False}}
    more = loaded(added_tokens_decoder=listed)
    assert more.encode("<extra>", add_special_tokens=False) == [size]
    assert more.vocab_size == size + 1
    with pytest.raises(CheckpointError, match=r"'<extra>' should have the id 9999"):
        loaded(added_tokens_decoder={"9999": {"content": "<extra>"}})
    with pytest.raises(CheckpointError, match="eos_token '<gone>' is not in the vocabulary"):
        loaded(eos_token="<gone>")
    assert loaded(eos_token=None).eos_ids == ()
    named = loaded(eos_token="Ġblock", pad_token="<gone>")
    assert named.eos_ids[0] in named.special_ids


def test_chat_templates_of_a_folder(kinds: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(kinds["byte"].folder / "tokenizer.json", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    assert read_parts(tmp_path).chat_templates == {}
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert read_parts(tmp_path).chat_templates == {"default": "from config"}
    entries = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    config.write_text(json.dumps({"chat_template": entries}))
    assert read_parts(tmp_path).chat_templates == {"default": "d", "rag": "r"}
    (tmp_path / "chat_template.jinja").write_text("from file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    expected = {"default": "from file", "rag": "r", "tool_use": "t"}
    assert read_parts(tmp_path).chat_templates == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"[]"),
    ],
)
def test_files_that_lie_are_one_error(
    kinds: dict[str, Any], tmp_path: Path, name: str, content: bytes
) -> None:
    shutil.copy(kinds["byte"].folder / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path)


def test_special_tokens_map_fills_what_the_config_lacks(
    kinds: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copy(kinds["byte"].folder / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|eot|>"}, "bos_token": "<|bos|>"})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    named = load_tokenizer(tmp_path).named
    assert named == {"eos_token": "<|eot|>", "bos_token": "<|bos|>"}


def test_user_defined_spaces_of_a_gguf_are_found() -> None:
    """llama.cpp's converter spells the spaces of such pieces as spaces, all others as U+2581."""
    pieces = {"<unk>": 2, "<s>": 3, "</s>": 3, "  ": 4, "\u2581": 1, "a": 1, "\u2581a": 1}
    ours = from_metadata({
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": list(pieces.values()),
        "tokenizer.ggml.add_space_prefix": False,
    })  # fmt: skip
    assert ours.encode("a  a a   a", add_special_tokens=False) == [5, 3, 5, 6, 3, 6]
    assert ours.decode([5, 3, 5, 6, 3, 6]) == "a  a a   a"
