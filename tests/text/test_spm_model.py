"""The SentencePiece file reader: what it reads, and that damage is an error."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from octavo.errors import CheckpointError
from octavo.text.spm_model import read_spm_model
from octavo.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("name", ["spm", "unigram"])
def test_pieces_scores_and_settings_are_the_file_s(kinds: dict[str, Any], name: str) -> None:
    path = kinds[name].folder / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    model = read_spm_model(path, always_prefix=True)
    size = processor.get_piece_size()
    assert list(model.pieces.texts) == [processor.id_to_piece(i) for i in range(size)]
    assert list(model.pieces.scores) == [processor.get_score(i) for i in range(size)]
    assert (model.bos_id, model.eos_id, model.pad_id) == (1, 2, None)
    assert model.pieces.unk_id == processor.unk_id()
    assert model.pieces.unigram is (name == "unigram")
    assert model.pieces.byte_fallback is (name == "spm")
    assert model.pieces.collapse_spaces is (name == "unigram")
    assert bool(model.pieces.charsmap) is (name == "unigram")
    for i, kind in enumerate(model.pieces.kinds):
        assert (kind == 3) is processor.is_control(i)
        assert (kind == 6) is processor.is_byte(i)


@pytest.mark.parametrize("name", ["spm", "unigram"])
def test_damage_is_an_error_and_never_a_huge_allocation(
    kinds: dict[str, Any], tmp_path: Path, name: str
) -> None:
    data = (kinds[name].folder / "tokenizer.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    rng = random.Random(2)
    refused = 0
    tracemalloc.start()
    for i in range(40):
        changed = bytearray(data)
        if i % 2:
            del changed[rng.randrange(len(data)) :]
        for _ in range(6):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            load_tokenizer(path)
        except CheckpointError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 20
    assert peak < 20_000_000


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    word_model = b"\x0a\x03\x0a\x01a" + b"\x12\x02\x18\x03"  # trainer_spec.model_type = WORD
    for data in (b"", b"\xff" * 40, struct.pack("<Q", 5), word_model):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model is not a SentencePiece model"):
            read_spm_model(path, always_prefix=True)
