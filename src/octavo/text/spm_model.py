"""Read a SentencePiece `tokenizer.model`: a protobuf `ModelProto`, of which we need a few fields.

The field numbers are those of `sentencepiece_model.proto`. Reading the wire format takes fewer
lines than a dependency on protobuf, and checks every length against the bytes there are.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError
from octavo.text.charsmap import check_charsmap
from octavo.text.vocab import NORMAL, Pieces

_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_Fields = dict[int, Any]


@dataclass(frozen=True)
class SpmModel:
    """The vocabulary of a `tokenizer.model` and its special ids (None where it has none)."""

    pieces: Pieces
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


def read_spm_model(path: Path, *, always_prefix: bool) -> SpmModel:
    """The model in `path`; `always_prefix` is the older habit of `Pieces.always`.

    Raises CheckpointError when the file is damaged or neither BPE nor Unigram.
    """
    try:
        return _model(path, path.read_bytes(), always_prefix)
    except (LookupError, struct.error, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error


def piece_texts(path: Path) -> list[str]:
    """The pieces alone, in the order of their ids. Raises CheckpointError as `read_spm_model`."""
    try:
        pieces = (value for number, value in _fields(path.read_bytes()) if number == 1)
        return [dict(_fields(piece))[1].decode() for piece in pieces]
    except (LookupError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error


def _model(path: Path, data: bytes, always_prefix: bool) -> SpmModel:
    entries: list[_Fields] = []
    trainer: _Fields = {}
    normalizer: _Fields = {}
    for number, value in _fields(data):
        if number == 1:
            entries.append(dict(_fields(value)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if not entries or kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(
            f"{path} is not a SentencePiece model of type BPE or Unigram "
            f"(type {kind}, {len(entries)} pieces)"
        )
    if charsmap := normalizer.get(2, b""):
        check_charsmap(charsmap, str(path))
    pieces = Pieces(
        texts=[entry[1].decode() for entry in entries],
        scores=[struct.unpack("<f", entry.get(2, b"\0\0\0\0"))[0] for entry in entries],
        kinds=[entry.get(3, NORMAL) for entry in entries],
        unk_id=_id(trainer, 40, 0) or 0,
        unigram=kind == _UNIGRAM,
        byte_fallback=bool(trainer.get(35, 0)),
        dummy_prefix=bool(normalizer.get(3, 1)),
        always=always_prefix,
        collapse_spaces=bool(normalizer.get(4, 1)),
        charsmap=charsmap,
    )
    return SpmModel(pieces, _id(trainer, 41, 1), _id(trainer, 42, 2), _id(trainer, 43, -1))


def _id(fields: _Fields, number: int, default: int) -> int | None:
    """A signed id; protobuf writes -1 (none) as a 64-bit two's complement."""
    value = int(fields.get(number, default))
    return None if value < 0 or value >= 1 << 31 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The (number, value) pairs of one message; fixed values stay bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        value: Any
        if wire == _VARINT:
            value, at = _varint(data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
            if wire == _BYTES:
                size, at = _varint(data, at)
            if size is None or size > len(data) - at:
                raise IndexError(f"a field of wire type {wire} goes past its message")
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number is longer than 64 bits")
