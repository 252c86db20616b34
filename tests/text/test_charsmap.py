"""A character map that lies is an error; those of SentencePiece itself pass."""

import base64
import io
import json
import struct
from pathlib import Path

import pytest
import sentencepiece

from octavo.errors import CheckpointError
from octavo.text.charsmap import check_charsmap, check_tokenizer_json
from octavo.text.spm_model import read_spm_model


@pytest.fixture(scope="module", params=["nmt_nfkc", "nfkc_cf"])
def charsmap(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words of a text", "and some more words"] * 4),
        model_writer=model, model_type="unigram", vocab_size=30, minloglevel=2,
        normalization_rule_name=request.param, hard_vocab_limit=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return read_spm_model(path, always_prefix=True).pieces.charsmap


def test_the_maps_of_sentencepiece_pass(charsmap: bytes) -> None:
    assert len(charsmap) > 100_000
    check_charsmap(charsmap, "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:5], "not even 8"),
        (lambda data: struct.pack("<I", 3267543744) + data[4:], "claims 3267543744 bytes"),
        (lambda data: data[:40_000], "claims"),
        (lambda data: data[:4] + struct.pack("<I", 0x3FFFFF << 10) + data[8:], "unit 0 .* outside"),
        (lambda data: data + b"\xff", "texts of precompiled_charsmap"),
    ],
)
def test_a_map_that_lies_is_refused(charsmap: bytes, change, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_charsmap(change(charsmap), "x")


def test_a_map_inside_a_tokenizer_json_is_checked(charsmap: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def write(data: bytes) -> None:
        inner = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
        path.write_text(json.dumps({"normalizer": {"type": "Sequence", "normalizers": [inner]}}))

    write(charsmap)
    check_tokenizer_json(path)
    write(struct.pack("<I", 2**31) + charsmap[4:])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the trie"):
        check_tokenizer_json(path)
