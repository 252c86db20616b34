"""Checkpoint files as a table of tensors, each checked before anything is allocated for it.

Two containers are read, safetensors and GGUF; neither can run code. A file is mapped, its header
is checked against the bytes that are there, and a tensor is decoded only when it is asked for,
straight into the memory that will keep it.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.models.files import ModelFiles
from octavo.quant.base import Codes
from octavo.quant.gguf import FORMATS, BlockDecoder, BlockFormat, codes_of, decode_into
from octavo.text.gguf_metadata import read_gguf_header

# The limit of the safetensors library itself.
_MAX_HEADER = 100_000_000
_MAX_DIMS = 4
_LFS = b"version https://git-lfs"

_SAFETENSORS = {
    "F64": (8, torch.float64),
    "F32": (4, torch.float32),
    "F16": (2, torch.float16),
    "BF16": (2, torch.bfloat16),
    "I64": (8, torch.int64),
    "I32": (4, torch.int32),
    "I16": (2, torch.int16),
    "I8": (1, torch.int8),
    "U8": (1, torch.uint8),
    "BOOL": (1, torch.bool),
}
# Sizes of types that are known but hold no weights that could be used yet.
_OTHER = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "U32": 4, "U64": 8, "C64": 8}
_SAFE = {
    name: BlockFormat(name, 1, size, dtype=dtype) for name, (size, dtype) in _SAFETENSORS.items()
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a mapped file. `format` is None for a type that cannot be decoded."""

    file: Path
    shape: tuple[int, ...]
    type_name: str
    format: BlockFormat | None
    data: mmap.mmap = field(repr=False, compare=False)
    offset: int
    num_bytes: int

    def read_into(self, out: torch.Tensor, decoder: BlockDecoder | None = None) -> None:
        """Decode into contiguous `out` of the same number of values, rounding to its dtype."""
        if self.format is None:
            raise CheckpointError(f"{self.file}: no way to read tensors of type {self.type_name}")
        if self.num_bytes:
            decode_into(self.format, self._raw(), out, decoder)

    def codes(self) -> Codes | None:
        """A matrix of 4-bit blocks as they are stored; None for any other format."""
        return None if self.format is None else codes_of(self.format, self._raw(), self.shape)

    def _raw(self) -> torch.Tensor:
        return torch.frombuffer(
            self.data, dtype=torch.uint8, count=self.num_bytes, offset=self.offset
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's opened files. tensors: by their names there; metadata: GGUF's, else empty."""

    files: ModelFiles
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any]


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Map the files of a model and check their headers.

    Raises CheckpointError, naming the file and the sizes or names that disagree.
    """
    if files.is_gguf:
        return _open_gguf(files)
    tensors: dict[str, StoredTensor] = {}
    for path in files.weights:
        found = _open_safetensors(path)
        if files.index is not None:
            _check_shard(path, found, files.index)
        tensors.update(found)
    return Checkpoint(files, tensors, {})


def _check_shard(path: Path, found: Iterable[str], index: Mapping[str, str]) -> None:
    """A shard must hold exactly the tensors that the index says."""
    listed = {name for name, file in index.items() if file == path.name}
    held = set(found)
    if missing := sorted(listed - held):
        raise CheckpointError(f"{path} lacks tensors that the index lists: {name_list(missing)}")
    if extra := sorted(held - listed):
        raise CheckpointError(
            f"{path} holds tensors that the index does not place there: {name_list(extra)}"
        )


def name_list(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def _map_file(path: Path, least: int) -> mmap.mmap:
    """The bytes of a file, mapped privately (torch refuses memory that it may not write)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            if handle.read(len(_LFS)) == _LFS:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the file it stands for; run 'git lfs pull'"
                )
            if size < least:
                raise CheckpointError(
                    f"{path} has {size} bytes, less than the {least} of an empty header"
                )
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    data = _map_file(path, 8)
    (length,) = struct.unpack_from("<Q", data, 0)
    if length > min(_MAX_HEADER, len(data) - 8):
        raise CheckpointError(
            f"{path} is cut off or damaged: its header claims {length} bytes, the file has "
            f"{len(data)} in all (a header may have {_MAX_HEADER})"
        )
    start = 8 + length
    tensors: dict[str, StoredTensor] = {}
    for name, entry in _safetensors_header(path, data[8:start]).items():
        if name == "__metadata__":
            continue
        tensors[name] = _safetensors_entry(path, name, entry, data, start)
    _check_cover(path, tensors, start, len(data))
    return tensors


def _safetensors_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{path}: its header names twice: {name_list(twice)}")
        return value

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object")
    return header


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _safetensors_entry(
    path: Path, name: str, entry: object, data: mmap.mmap, start: int
) -> StoredTensor:
    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: tensor {name!r} {why}")

    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise damaged(f"has the shape {shape!r}")
    pair = isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(n) for n in offsets)
    if not pair or not isinstance(offsets, list):
        raise damaged(f"has the offsets {offsets!r}")
    size = _SAFE[kind].block_bytes if kind in _SAFE else _OTHER.get(str(kind))
    if size is None:
        raise damaged(f"has the unknown type {kind!r}")
    begin, end = offsets
    if end - begin != size * math.prod(shape):
        raise damaged(
            f"takes {end - begin} bytes, but its shape {shape} in {kind} needs "
            f"{size * math.prod(shape)}"
        )
    dims = tuple(int(n) for n in shape)
    return StoredTensor(
        path, dims, str(kind), _SAFE.get(str(kind)), data, start + begin, end - begin
    )


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Tensors follow one another from `start` to the file's end without hole or overlap."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda kv: (kv[1].offset, kv[1].num_bytes)):
        if tensor.offset != at:
            what = "overlaps the one before it" if tensor.offset < at else "leaves a hole before it"
            raise CheckpointError(
                f"{path} is damaged: tensor {name!r} starts at byte {tensor.offset}, not {at}: "
                f"it {what}"
            )
        at += tensor.num_bytes
    if at != size:
        raise CheckpointError(f"{path} has {size} bytes, but its header describes {at}")


def _open_gguf(files: ModelFiles) -> Checkpoint:
    path = files.root
    data = _map_file(path, 24)
    header = read_gguf_header(path)
    entries, end = _gguf_table(path, data, header.offset, header.tensor_count)
    alignment = header.metadata.get("general.alignment", 32)
    if not _is_size(alignment) or not alignment or alignment % 8:
        raise CheckpointError(f"{path} is damaged: general.alignment is {alignment!r}")
    start = -(-end // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, dims, number, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path} is damaged: it holds the tensor {name!r} twice")
        tensors[name] = _gguf_tensor(path, name, dims, number, data, start + offset)
    _check_apart(path, tensors)
    return Checkpoint(files, tensors, header.metadata)


def _gguf_table(
    path: Path, data: mmap.mmap, at: int, count: int
) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """(name, dimensions as stored, type number, offset) of each entry, and the table's end."""
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    try:
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", data, at)
            at += 8 + length
            if at > len(data):
                raise struct.error
            name = data[at - length : at].decode()
            (num_dims,) = struct.unpack_from("<I", data, at)
            if num_dims > _MAX_DIMS:
                raise CheckpointError(f"{path} is damaged: {name!r} has {num_dims} dimensions")
            dims = struct.unpack_from(f"<{num_dims}Q", data, at + 4)
            number, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * num_dims)
            at += 16 + 8 * num_dims
            entries.append((name, dims, number, offset))
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is cut off or damaged: entry {len(entries)} of {count} in its tensor table, "
            f"at byte {at}, cannot be read; the file has {len(data)} bytes"
        ) from error
    return entries, at


def _gguf_tensor(
    path: Path, name: str, dims: tuple[int, ...], number: int, data: mmap.mmap, offset: int
) -> StoredTensor:
    kind = FORMATS.get(number)
    if kind is None:
        known = ", ".join(f.name for f in FORMATS.values())
        raise CheckpointError(f"{path}: {name!r} has the ggml type {number}; known are {known}")
    shape = tuple(reversed(dims))  # GGUF stores the fastest dimension first
    if not dims or dims[0] % kind.block_values:
        raise CheckpointError(
            f"{path} is damaged: {name!r} has rows of {dims[:1]} values, no multiple of "
            f"{kind.block_values} ({kind.name})"
        )
    size = math.prod(shape) // kind.block_values * kind.block_bytes
    if offset + size > len(data):
        raise CheckpointError(
            f"{path} is cut off: {name!r} needs {size} bytes at byte {offset}, the file has "
            f"{len(data)}"
        )
    return StoredTensor(path, shape, kind.name, kind, data, offset, size)


def _check_apart(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    end, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda kv: kv[1].offset):
        if tensor.offset < end:
            raise CheckpointError(f"{path} is damaged: tensors {last!r} and {name!r} overlap")
        end, last = tensor.offset + tensor.num_bytes, name
