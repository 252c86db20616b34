"""Ids equal to the reference libraries', bytes exact, and clear errors."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from octavo.errors import CheckpointError, ModelNotFoundError, RequestError, RequestTypeError
from octavo.text.tokenizer import bad_words_ids, load_tokenizer

TEXTS = [
    "Hello world",
    "The block pool keeps tokens.",
    " leading space",
    "  two  spaces  inside ",
    "trailing   ",
    "tab\tnew\nline\n\n\nlines",
    "it's we've I'll 1234567 3.14",
    "Žluťoučký kůň",
    "漢字 and かな",
    "👩‍👩‍👧‍👦 family 🌶",
    "nul \x00 and \x7f",
    "a<sep>b <sep> c",
    "x",
    " ",
    "",
    "\n",
    "mixed\r\nline ends",
]


def random_text(rng: random.Random) -> str:
    parts = ["the ", "token", "  ", "ď", "漢", "🌶", "\n", "block", "A", ". ", "x", " ", "é", "12"]
    return "".join(rng.choice(parts) for _ in range(rng.randint(0, 14)))


def test_ids_equal_the_reference(kind: Any) -> None:
    rng = random.Random(7)
    for text in [*TEXTS, *(random_text(rng) for _ in range(300))]:
        if kind.name == "llama" and "<sep>" in text:
            continue  # a plain piece there, user-defined in the others
        assert kind.ours.encode(text, add_special_tokens=False) == kind.encode(text), repr(text)


def test_decoding_equals_the_reference(kind: Any) -> None:
    rng = random.Random(8)
    for text in [*TEXTS, *(random_text(rng) for _ in range(200))]:
        ids = kind.encode(text)
        ours = kind.ours.decode(ids, skip_special_tokens=False)
        if "<unk>" not in ours:  # SentencePiece shows an unknown piece as U+2047
            assert ours == kind.decode(ids), repr(text)


def test_text_survives_a_round_trip(kinds: dict[str, Any]) -> None:
    for name in ("byte", "spm", "llama"):
        for text in TEXTS:
            tokenizer = kinds[name].ours
            assert tokenizer.decode(tokenizer.encode(text)) == text, (name, text)


@pytest.mark.parametrize(
    ("name", "spelled"), [("byte", "<|im_start|>"), ("spm", "<|turn|>"), ("unigram", "<|turn|>")]
)
def test_raw_text_parses_special_tokens_and_ordinary_text_does_not(
    kinds: dict[str, Any], name: str, spelled: str
) -> None:
    tokenizer = kinds[name].ours
    special = tokenizer.token_id(spelled)
    assert special in tokenizer.special_ids
    text = f"a{spelled}b"
    assert tokenizer.encode(text).count(special) == 1
    assert tokenizer.decode(tokenizer.encode(text)) in ("ab", "a b")
    if name != "unigram":
        ordinary = tokenizer.encode_ordinary(text)
        assert special not in ordinary
        assert tokenizer.decode(ordinary) == text


def test_ordinary_text_inside_a_sequence_gets_no_prefix(kinds: dict[str, Any]) -> None:
    for name in ("byte", "spm", "llama"):
        tokenizer = kinds[name].ours
        first, rest = "The bl", "ock pool"
        ids = tokenizer.encode(first) + tokenizer.encode_inside(rest)
        assert tokenizer.decode(ids) == first + rest


def test_cht_01_raw_text_has_the_default_bos_once(kind: Any) -> None:
    tokenizer = kind.ours
    bos = tokenizer.bos_id
    spelled = tokenizer.named["bos_token"]
    assert tokenizer.adds_bos
    for text in ("Hello", spelled + "Hello", ""):
        assert tokenizer.encode(text).count(bos) == 1
        assert tokenizer.encode(text)[0] == bos
    assert tokenizer.encode("Hello", add_special_tokens=False).count(bos) == 0
    assert tokenizer.encode(spelled + spelled + "x").count(bos) == 2


def test_lim_07_an_empty_prompt_is_bos_or_nothing(kind: Any) -> None:
    assert kind.ours.encode("") == [kind.ours.bos_id]
    assert kind.ours.encode("", add_special_tokens=False) == []


def test_lgp_10_every_byte_has_its_token_and_bytes(kinds: dict[str, Any]) -> None:
    byte_level = kinds["byte"].ours
    singles = {byte_level.token_bytes(i) for i in range(byte_level.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= singles
    for name in ("byte", "spm", "llama"):
        tokenizer = kinds[name].ours
        ids = tokenizer.encode_inside("🌶")
        assert b"".join(map(tokenizer.token_bytes, ids)) == "🌶".encode()
        partial = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(i)]
        shown = {(tokenizer.token_text(i), tokenizer.token_bytes(i)) for i in partial}
        assert len(shown) == len(partial) > 0


def test_token_bytes_join_to_the_text(kind: Any) -> None:
    tokenizer = kind.ours
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        expected = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined.removeprefix(" " if tokenizer.strips_space else "") in (
            expected,
            expected.removeprefix(" "),
        )


def test_decoding_skips_special_tokens_only_when_told(kinds: dict[str, Any]) -> None:
    tokenizer = kinds["byte"].ours
    ids = tokenizer.encode("<|im_start|>hi<think>")
    assert tokenizer.decode(ids) == "hi<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|><|im_start|>hi<think>"


def test_added_tokens_are_spelled_as_they_are(kinds: dict[str, Any], tmp_path: Path) -> None:
    """Not in the byte alphabet, in which é stands for one byte."""
    backend = Tokenizer.from_file(str(kinds["byte"].folder / "tokenizer.json"))
    backend.add_tokens(["<é>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a<é>b", add_special_tokens=False)) == "a<é>b"


def test_ids_without_a_token_add_nothing_and_impossible_ids_are_refused(kind: Any) -> None:
    tokenizer = kind.ours
    beyond = tokenizer.vocab_size + 3
    assert tokenizer.decode([beyond]) == ""
    assert tokenizer.token_bytes(beyond) == b""
    with pytest.raises(RequestError, match="-1"):
        tokenizer.decode([-1])


def test_text_that_is_no_unicode_is_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        kind.ours.encode("ab\ud800c")
    with pytest.raises(RequestTypeError, match="bytes"):
        kind.ours.encode(b"ab")


def test_smp_19_bad_words_have_both_forms(kinds: dict[str, Any]) -> None:
    for name in ("byte", "spm", "llama"):
        tokenizer = kinds[name].ours
        sequences = bad_words_ids(tokenizer, ["block", "New York", "\u0007"])
        spelled = {b"".join(map(tokenizer.token_bytes, ids)) for ids in sequences}
        assert spelled == {b"block", b" block", b"New York", b" New York", b"\x07", b" \x07"}
        assert bad_words_ids(tokenizer, [" block"]) == bad_words_ids(tokenizer, ["block"])
    # The whole vocabulary's way of writing " block" is one token; that one must be there.
    byte_level = kinds["byte"].ours
    assert (byte_level.token_id("Ġblock"),) in bad_words_ids(byte_level, ["block"])


def test_smp_19_words_that_cannot_be_written_are_refused(kinds: dict[str, Any]) -> None:
    for word in ("", "  "):
        with pytest.raises(RequestError, match="bad_words") as caught:
            bad_words_ids(kinds["byte"].ours, ["fine", word])
        assert caught.value.param == "bad_words"
    with pytest.raises(RequestError, match="cannot be written"):
        bad_words_ids(kinds["unigram"].ours, ["🌶"])


def test_settings_that_cut_or_pad_are_turned_off(kinds: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(kinds["byte"].folder, tmp_path / "t")
    file = tmp_path / "t" / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(file))
    ids = load_tokenizer(tmp_path / "t").encode("The block pool keeps the cache in blocks")
    assert ids == kinds["byte"].ours.encode("The block pool keeps the cache in blocks")
    assert len(ids) > 3


def test_a_decoder_that_is_no_join_of_bytes_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"WordPiece.*not supported"):
        load_tokenizer(tmp_path)


def test_words_without_a_decoder_are_joined_by_spaces(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "a b a"


def test_mdl_15_paths_that_lead_nowhere_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.gguf"):
        load_tokenizer(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match=r"has no tokenizer: no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_mdl_15_damaged_files_are_named(kinds: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a valid"):
        load_tokenizer(tmp_path)
    shutil.copy(kinds["byte"].folder / "tokenizer.json", tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_mdl_15_odd_folder_names_work(kinds: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "my modèl 漢"
    shutil.copytree(kinds["spm"].folder, folder)
    assert load_tokenizer(f"{folder}/").encode("x") == kinds["spm"].ours.encode("x")


@pytest.mark.model
def test_smollm2_loads_and_names_its_tokens(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    assert not tokenizer.adds_bos
    assert len(tokenizer.special_ids) == 17
    assert tokenizer.chat_template is not None


@pytest.mark.model
def test_smollm2_ids_equal_transformers_from_the_same_file(
    smollm2: Path, smollm2_reference: Any
) -> None:
    """Save for a run of spaces before a digit: transformers gives this file GPT-2's words, its
    own tokenizer.json (and llama.cpp) cut digits out first."""
    reference = smollm2_reference
    ours = load_tokenizer(smollm2)
    rng = random.Random(3)
    texts = [*TEXTS, *(re.sub(r"\s+(?=\d)", " ", random_text(rng)) for _ in range(300))]
    texts.append(json.dumps({"a": [1, 2.5, None]}, indent=None) + "<|im_end|> <|im_start|>user")
    for text in texts:
        ids = ours.encode(text)
        assert ids == reference.encode(text), repr(text)
        for skip in (True, False):
            ref = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip) == ref
    assert ours.encode("x  2") == [*ours.encode("x"), *ours.encode("  "), *ours.encode("2")]
