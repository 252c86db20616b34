"""The GGUF container: header, metadata and tensor table of a file, read by hand.

The format is ggml's `docs/gguf.md`: magic, version, two counts; then key, type and value one after
the other; then name, dimensions, type and offset of each tensor; then their data. Every length is
checked against the bytes that the file still has before anything is made of it, so that a damaged
file is an error and never a huge allocation. Long arrays of strings are decoded in one plain loop:
100,000 of them take 60 ms, where the `gguf` package, which makes a view of each, takes 2.5 s.

The blocks that tensors are made of are decoded in `quant.gguf`.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import (
    Container,
    OpenedFile,
    StoredTensor,
    TensorFormat,
    file_size,
    one_line,
)
from octavo.checkpoint.mapped import MappedFile
from octavo.errors import CheckpointError, ModelNotFoundError, shown

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
_MAX_DIMS = 4
_LEAST = 24  # bytes before the first key
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from

# ggml's type number -> format.
FORMATS: Mapping[int, TensorFormat] = {
    0: TensorFormat("F32", 1, 4, "float32"),
    1: TensorFormat("F16", 1, 2, "float16"),
    2: TensorFormat("Q4_0", 32, 18),
    3: TensorFormat("Q4_1", 32, 20),
    6: TensorFormat("Q5_0", 32, 22),
    7: TensorFormat("Q5_1", 32, 24),
    8: TensorFormat("Q8_0", 32, 34),
    10: TensorFormat("Q2_K", 256, 84),
    11: TensorFormat("Q3_K", 256, 110),
    12: TensorFormat("Q4_K", 256, 144),
    13: TensorFormat("Q5_K", 256, 176),
    14: TensorFormat("Q6_K", 256, 210),
    20: TensorFormat("IQ4_NL", 32, 18),
    23: TensorFormat("IQ4_XS", 256, 136),
    30: TensorFormat("BF16", 1, 2, "bfloat16"),
}


@dataclass(frozen=True)
class GgufHeader:
    """What precedes the tensor table.

    metadata: key -> number, bool, str, or a list of them.
    tensor_count: entries of the tensor table; offset: the byte at which that table starts.
    """

    version: int
    tensor_count: int
    offset: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the tensor table. dims: the fastest first; offset: from the start of the data."""

    name: str
    dims: tuple[int, ...]
    type_number: int
    offset: int


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """The header of the GGUF file at `path`.

    Raises ModelNotFoundError when there is no such file, CheckpointError when it is not a
    GGUF of version 2 or 3, or is cut off or damaged within the header.
    """
    file = Path(path)
    try:
        with file.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size < _LEAST:
                raise CheckpointError(f"{file} is not a GGUF file: it is shorter than its header")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, str(file)).header()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ModelNotFoundError(f"cannot read {file}: {error.strerror}") from error


def open_file(path: Path) -> OpenedFile:
    """See Container.open."""
    file_size(path, _LEAST)
    file = MappedFile(path)
    reader = _Reader(file.data, str(path))
    header = reader.header()
    entries = reader.table(header.tensor_count)
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment < 2**32 or alignment % 8:
        raise CheckpointError(f"{path} is damaged: general.alignment is {shown(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    ends: list[tuple[int, int, str]] = []
    for entry in entries:
        if entry.name in tensors:
            raise CheckpointError(
                f"{path} is damaged: it holds the tensor {shown(entry.name)} twice"
            )
        tensor = _tensor(path, entry, file, start + entry.offset)
        tensors[entry.name] = tensor
        ends.append((entry.offset, entry.offset + tensor.num_bytes, entry.name))
    _check_apart(path, sorted(ends))
    return OpenedFile(tensors, header.metadata)


def _tensor(path: Path, entry: _Entry, file: MappedFile, offset: int) -> StoredTensor:
    name, dims = entry.name, entry.dims
    kind = FORMATS.get(entry.type_number)
    if kind is None:
        known = ", ".join(f.name for f in FORMATS.values())
        raise CheckpointError(
            f"{path}: {shown(name)} has the ggml type {entry.type_number}; known are {known}"
        )
    if not dims or dims[0] % kind.block_values:
        raise CheckpointError(
            f"{path} is damaged: {shown(name)} has rows of {dims[:1]} values, no multiple of "
            f"{kind.block_values} ({kind.name})"
        )
    shape = tuple(reversed(dims))
    size = kind.num_bytes(shape)
    end = offset + size
    if end > len(file.data):
        raise CheckpointError(
            f"{path} is cut off: {shown(name)} needs {size} bytes at byte {offset}, the file has "
            f"{len(file.data)}"
        )
    return StoredTensor(
        path, shape, kind, partial(file.view, offset, end), partial(file.release, offset, end)
    )


def _check_apart(path: Path, places: list[tuple[int, int, str]]) -> None:
    """Raise CheckpointError where two of (begin, end, name), in order of begin, overlap."""
    end, last = 0, ""
    for begin, after, name in places:
        if begin < end:
            raise CheckpointError(
                f"{path} is damaged: tensors {shown(last)} and {shown(name)} overlap"
            )
        end, last = after, name


class _Reader:
    """A cursor `at` a byte of the file; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.at = 0

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.name} is not a GGUF file: it does not start with 'GGUF'")
        version = _U32(self.data, 4)[0]
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.name}: GGUF version {version} is not known (2 and 3 are); a file of the "
                "other byte order shows a huge number here"
            )
        tensors, pairs = _U64(self.data, 8)[0], _U64(self.data, 16)[0]
        self.at = 24
        # A pair takes at least 13 bytes (empty key, type, one byte), a tensor entry 24.
        self._need(pairs * 13 + tensors * 24, "the counts in the header")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string("a key")
            metadata[key] = self._value(self._u32(key), key)
        return GgufHeader(version, tensors, self.at, metadata)

    def table(self, count: int) -> list[_Entry]:
        """The tensor table, which follows the metadata; the cursor is left at its end."""
        entries: list[_Entry] = []
        for number in range(count):
            what = f"entry {number} of {count} in its tensor table"
            name = self._string(what)
            num_dims = self._u32(what)
            if num_dims > _MAX_DIMS:
                raise CheckpointError(
                    f"{self.name} is damaged: {shown(name)} has {num_dims} dimensions"
                )
            dims = self._numbers("Q", num_dims, what)
            entries.append(_Entry(name, dims, self._u32(what), self._u64(what)))
        return entries

    def _need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise CheckpointError(
                f"{self.name} is cut off or damaged: {one_line(what)} needs {count} bytes at byte "
                f"{self.at}, the file has {self.size - self.at} more"
            )

    def _u32(self, what: str) -> int:
        self._need(4, what)
        self.at += 4
        return int(_U32(self.data, self.at - 4)[0])

    def _u64(self, what: str) -> int:
        self._need(8, what)
        self.at += 8
        return int(_U64(self.data, self.at - 8)[0])

    def _string(self, what: str) -> str:
        length = self._u64(what)
        self._need(length, what)
        start, self.at = self.at, self.at + length
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self._not_text(what) from error

    def _not_text(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} is damaged: {one_line(what)} holds bytes that are not UTF-8"
        )

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY and depth < _MAX_DEPTH:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self.name} is damaged: {shown(key)} has the unknown type {kind}"
            )
        return self._numbers(_SCALARS[kind], 1, key)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        kind, count = self._u32(key), self._u64(key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind in _SCALARS:
            return list(self._numbers(_SCALARS[kind], count, key))
        self._need(count * 12, key)
        return [self._value(kind, key, depth + 1) for _ in range(count)]

    def _numbers(self, code: str, count: int, key: str) -> tuple[Any, ...]:
        size = struct.calcsize(code) * count
        self._need(size, key)
        self.at += size
        return struct.unpack_from(f"<{count}{code}", self.data, self.at - size)

    def _strings(self, count: int, key: str) -> list[str]:
        """The long arrays (tokens, merges): one loop over locals, checked once at its end."""
        data, at, size = self.data, self.at, self.size
        texts: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + _U64(data, at)[0]
                if at > size:
                    break
                texts.append(data[start:at].decode())
        except struct.error:
            at = size + 1
        except UnicodeDecodeError as error:
            raise self._not_text(key) from error
        if at > size:
            raise CheckpointError(
                f"{self.name} is cut off or damaged: item {len(texts)} of {shown(key)} "
                "goes past the end of the file"
            )
        self.at = at
        return texts


GGUF = Container("gguf", ".gguf", "gguf", True, open_file)
